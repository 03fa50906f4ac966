"""Times a server's decode steps and prefills, and fits the simulator's model to them.

usage: python -m tests.real.timing --endpoint http://127.0.0.1:30000 [--pid PID] [--json FILE]

The server must be nobody else's. A step of B requests, from two batches of equal prompts that make 1 and 1 + STEPS
tokens each: the difference of their times, over STEPS. What the model was not fitted to, a crowd of unequal requests,
is played to the server and to the simulator's engine with the times found: both should take as long.
--pid: of the scheduler of a server on this machine's CPU. Its CPU seconds are taken instead of those of the wall,
which on a busy machine measure the others.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy

from app.sglang.simulator.engine import Engine, EngineConfig, Request

BATCHES, PROMPTS, STEPS, TIMES = (1, 2, 4, 8), (64, 512, 1024), 200, 3
MIX, RUNNING, KV_TOKENS = 48, 16, 16_384  # the latter two: the suite's own servers
Row = dict[str, Any]
Clock = Callable[[], float]  #: seconds
_CLIENT = httpx.Client(timeout=300)  # one: to make another takes as long as some steps


def measured(url: str, clock: Clock) -> Row:
    """Everything that is measured there: steps, prefills, the mix."""
    steps = [_step(url, clock, batch, prompt) for batch in BATCHES for prompt in PROMPTS]
    prefills = [_prefill(url, clock, tokens) for tokens in (32, 128, 256, 512, 1024, 1536)]
    jobs = mix()
    info = _CLIENT.get(f"{url}/server_info").json()
    took = _seconds(url, clock, jobs)
    return {"sglang": info["version"], "steps": steps, "prefills": prefills, "mix_seconds": took}


def _step(url: str, clock: Clock, batch: int, prompt: int) -> Row:
    """tokens: in the pool on average."""
    whole, first = [(prompt, 1 + STEPS)] * batch, [(prompt, 1)] * batch
    took = [_seconds(url, clock, whole) - _seconds(url, clock, first) for _ in range(TIMES)]
    tokens = batch * (prompt + 1 + STEPS / 2)
    return {"batch": batch, "prompt": prompt, "tokens": tokens, "seconds": statistics.median(took) / STEPS}


def _prefill(url: str, clock: Clock, tokens: int) -> Row:
    """One prompt and its first token, alone."""
    took = [_seconds(url, clock, [(tokens, 1)]) for _ in range(4 * TIMES)]
    return {"tokens": tokens, "seconds": statistics.median(took)}


def _seconds(url: str, clock: Clock, jobs: Sequence[tuple[int, int]]) -> float:
    """Until all (prompt, answer) tokens are there. One request, so that they come together; no two begin alike."""
    sampling = [{"max_new_tokens": answer, "ignore_eos": True, "temperature": 0.0} for _, answer in jobs]
    ids = [[random.randint(10, 290) for _ in range(prompt)] for prompt, _ in jobs]
    began = clock()
    answers = _CLIENT.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}).json()
    took = clock() - began
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [answer for _, answer in jobs]
    return took


def _cpu_clock(pid: int) -> Clock:
    """What all threads of a process have had of a CPU; Linux."""

    def now() -> float:
        stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in stats) / 1e9

    return now


def mix() -> list[tuple[int, int]]:
    """(prompt, answer) tokens of requests as a run has them, the same each time."""
    rnd = random.Random(3)
    return [(rnd.randint(40, 700), min(400, max(8, int(rnd.lognormvariate(4.6, 0.6))))) for _ in range(MIX)]


def fitted(found: Row) -> dict[str, float]:
    """The simulator's times: least squares of the relative error, none below 0."""
    steps, prefills = found["steps"], found["prefills"]
    columns = [(1, one["batch"], one["tokens"]) for one in steps]
    fixed, request, token = _least(columns, [one["seconds"] for one in steps])
    first, each = _least([(1, one["tokens"]) for one in prefills], [one["seconds"] for one in prefills])
    return {
        "step_seconds": fixed, "step_seconds_per_request": request, "step_seconds_per_token": token,
        "prefill_seconds": first, "prefill_tokens_per_second": 1 / each,
    }  # fmt: skip


def _least(rows: list[tuple], seconds: list[float]) -> list[float]:
    """Weights of the columns; a column whose weight would be negative is left out."""
    matrix, keep = numpy.array(rows, float) / numpy.array(seconds)[:, None], list(range(len(rows[0])))
    while True:
        weights = numpy.linalg.lstsq(matrix[:, keep], numpy.ones(len(rows)), rcond=None)[0]
        if min(weights) >= 0:
            break
        del keep[int(numpy.argmin(weights))]
    result = [0.0] * len(rows[0])
    for column, weight in zip(keep, weights, strict=True):
        result[column] = float(weight)
    return result


def errors(found: Row, times: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """(what, seconds measured, seconds of the simulator's engine)."""
    for one in found["steps"]:
        engine = played([(one["prompt"], 1 + STEPS)] * one["batch"], times)
        first = played([(one["prompt"], 1)] * one["batch"], times)
        yield f"step, {one['batch']} × {one['prompt']}", one["seconds"], (engine - first) / STEPS
    for one in found["prefills"]:
        yield f"prefill, {one['tokens']}", one["seconds"], played([(one["tokens"], 1)], times)
    yield f"mix, {MIX} requests", found["mix_seconds"], played(mix(), times)


def played(jobs: Sequence[tuple[int, int]], times: dict[str, float]) -> float:
    """Seconds that the simulator's engine takes, with no clock."""
    engine = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=RUNNING, **times))
    for prompt, answer in jobs:
        engine.submit(0.0, Request("", prompt, answer, answer))
    now = 0.0
    while (event := engine.next_event()) is not None:
        now = event
        engine.advance(now)
    return now


def main() -> int:
    """Prints the table; the recorded figures go to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--json")
    words = parser.parse_args()
    clock = _cpu_clock(words.pid) if words.pid else time.perf_counter
    _seconds(words.endpoint, clock, [(64, 8)] * max(BATCHES))
    found = measured(words.endpoint, clock)
    found["times"] = fitted(found)
    for what, real, simulated in errors(found, found["times"]):
        print(f"{what:22} {real * 1000:10.2f} ms {simulated * 1000:10.2f} ms {100 * (simulated / real - 1):+6.1f} %")
    print(json.dumps(found["times"]))
    if words.json:
        with open(words.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

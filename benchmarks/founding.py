"""The founding scenario on the real path: `headrace run` and an endpoint that dies of too much.

    python -m benchmarks.founding [--prompts 2000] [--workers 1,2,8] [--lengths log-normal,heavy] [--json FILE]
    python -m benchmarks.founding --prompts 20000 --workers 8
    python -m benchmarks.founding --prompts 8000 --workers 4 --speeds 5,5,2.5,2.5
    python -m benchmarks.founding --server free_space

KV 231,120 tokens, prompts of about 500-1,800 ids, answers log-normal around 2,700 or with a heavy tail (sigma 1.0), an
endpoint with SGLang's reserve rule that dies above 100 running or on a full pool; with --server free_space one that
admits whatever fits now, retracts, and does not die. First a naive client with 150 + 32 requests in flight (not against
several endpoints or free_space), then `headrace run` with nothing tuned on the same prompts for each number of worker
processes. `ratio` is the time from the first request to the last answer over that of the same requests given all at
once to the same endpoint made crash-free, played by the simulator's engine without HTTP; of several endpoints, dealt
out by speed beforehand. Each endpoint runs in a process of its own, so many times as fast as an H200.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import orjson

from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault
from app.sglang.simulator.engine import Engine, EngineConfig, Request
from tests.acceptance.harness import IDS, TOKENIZER, headrace, run
from tests.belt import until

KV_TOKENS, MAX_NEW_TOKENS, NAIVE = 231_120, 8192, 150 + 32
#: Mean and sigma of the answers.
LENGTHS = {"log-normal": (2990, 0.45), "heavy": (2980, 1.0)}
WORDS = (Path(__file__).parent.parent / "README.md").read_text().split()


@dataclass
class Endpoint:
    """A simulated server in its own process."""

    url: str

    def stats(self) -> dict:
        """What it has counted; waits while it is down."""

        def ask() -> dict | None:
            try:
                return httpx.get(f"{self.url}/_sim/stats", timeout=10).json()
            except httpx.TransportError:
                return None

        return until(ask, 60, f"{self.url} is back")


@contextmanager
def endpoints(server: str, lengths: str, speeds: list[float]) -> Iterator[list[Endpoint]]:
    """Endpoints of these speeds, in processes of their own."""
    mean, sigma = LENGTHS[lengths]
    code = (
        "import json, sys\n"
        "from app.sglang.simulator import SimulatorConfig, serve\n"
        "from app.sglang.simulator.faults import Faults\n"
        "faults = Faults(**json.loads(sys.argv[2]))\n"
        "config = SimulatorConfig(**json.loads(sys.argv[1]), faults=faults)\n"
        "serve(config, 0, on_ready=lambda url: print(url, flush=True))"
    )
    faults = {"crash_above_running": 100, "crash_on_kv_full": True} if server == "deadly" else {}
    processes: list[subprocess.Popen] = []
    try:
        for speed in speeds:
            config = {
                **IDS, "max_total_num_tokens": KV_TOKENS, "max_running_requests": 4096, "output_lengths": "lognormal",
                "output_mean": mean, "output_sigma": sigma, "speed": speed,
                "admission": "free_space" if server == "free_space" else "reserve",
            }  # fmt: skip
            words = [sys.executable, "-c", code, json.dumps(config), json.dumps(faults)]
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        yield [Endpoint(process.stdout.readline().strip()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def write_prompts(path: Path, count: int) -> None:
    """Rows of about 500-1,800 tokens."""
    rnd = random.Random(5)
    with path.open("w") as file:
        for number in range(count):
            text = f"{number} " + " ".join(rnd.choices(WORDS, k=rnd.randint(170, 640)))
            file.write(json.dumps({"id": str(number), "messages": [{"role": "user", "content": text}]}) + "\n")


async def naive(url: str, prompts: int) -> int:
    """An engineer's evening: so many at once, whatever happens. Returns how many answers came."""
    client, gate, rnd, done = SGLangClient(), asyncio.Semaphore(NAIVE), random.Random(1), 0

    async def one() -> None:
        nonlocal done
        ids = [rnd.randrange(256, 4000) for _ in range(rnd.randint(500, 1800))]
        async with gate:
            try:
                await client.generate(url, ids, {"max_new_tokens": MAX_NEW_TOKENS}, rid=new_rid(), deadline_seconds=120)
                done += 1
            except Fault:
                pass

    await asyncio.gather(*(one() for _ in range(prompts)))
    await client.aclose()
    return done


def at_once(lengths: list[tuple[int, int]], admission: str) -> float:
    """Engine seconds for these (prompt, output) tokens, all submitted at the start, crash-free."""
    engine, now = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission)), 0.0
    for number, (prompt, output) in enumerate(lengths):
        engine.submit(0.0, Request(str(number), prompt, MAX_NEW_TOKENS, output))
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        engine.advance(now)
    return now


def base_seconds(lengths: list[tuple[int, int]], speeds: list[float], server: str) -> float:
    """The same requests, dealt out by speed, each endpoint given its share at once."""
    admission, dealt = "free_space" if server == "free_space" else "reserve", [[] for _ in speeds]
    for one in lengths:
        at = min(range(len(speeds)), key=lambda e: (len(dealt[e]) + 1) / speeds[e])
        dealt[at].append(one)
    return max(at_once(share, admission) / speed for share, speed in zip(dealt, speeds, strict=True) if share)


def founding(data: Path, out: Path, lengths: str, workers: int, arguments: argparse.Namespace) -> dict:
    """One `headrace run`, untuned."""
    with endpoints(arguments.server, lengths, arguments.speeds) as there:
        options = [word for one in there for word in ("--endpoint", one.url)]
        options += ["--tokenizer", TOKENIZER, "--max-new-tokens", MAX_NEW_TOKENS, "--workers", workers]
        with run(out, data, *options, "--temperature", "0") as going:
            code = going.process.wait()
        stats = [one.stats() for one in there]
    rows = [orjson.loads(line) for path in out.glob("*/raw_responses.jsonl") for line in path.open("rb")]
    rows.sort(key=lambda row: row["row_number"])
    starts = [datetime.fromisoformat(row["started_at"]).timestamp() for row in rows]
    wall = max(s + r["latency_seconds"] for s, r in zip(starts, rows, strict=True)) - min(starts)
    tokens = [(row["num_prompt_tokens"], row["num_output_tokens"]) for row in rows]
    base = base_seconds(tokens, arguments.speeds, arguments.server)
    return {
        "client": "headrace run", "lengths": lengths, "workers": workers, "exit": code, "rows": len(rows),
        "crashes": sum(one["crashes"] for one in stats), "seconds": round(wall, 1), "ratio": round(wall / base, 3),
        "peak_running": max(one["peak_running"] for one in stats),
        "fullest": round(max(one["peak_used_tokens"] for one in stats) / KV_TOKENS, 3),
        "retractions": sum(one["retractions"] for one in stats), "recalled": sum(one["aborted"] for one in stats),
        "mean_length": round(sum(output for _, output in tokens) / len(rows)),
        "verified": headrace("verify", out, timeout=300).returncode == 0,
    }  # fmt: skip


def naive_dies(lengths: str, speed: float) -> dict:
    """What becomes of the naive client."""
    with endpoints("deadly", lengths, [speed]) as (there,):
        done = asyncio.run(naive(there.url, 2 * NAIVE))
        crashes = there.stats()["crashes"]
    return {"client": f"naive, {NAIVE} in flight", "lengths": lengths, "rows": done, "of": 2 * NAIVE,
            "crashes": crashes}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--workers", default="1,2,8")
    parser.add_argument("--lengths", default="log-normal,heavy")
    parser.add_argument("--server", choices=["deadly", "free_space"], default="deadly")
    parser.add_argument("--speeds", type=lambda text: list(map(float, text.split(","))), default=[5.0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []

    def show(result: dict) -> None:
        results.append(result)
        print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        write_prompts(data, arguments.prompts)
        for lengths in arguments.lengths.split(","):
            if arguments.server == "deadly" and len(arguments.speeds) == 1:
                show(naive_dies(lengths, arguments.speeds[0]))
            for workers in map(int, arguments.workers.split(",")):
                show(founding(data, Path(folder) / f"{lengths}-{workers}", lengths, workers, arguments))


if __name__ == "__main__":
    main()

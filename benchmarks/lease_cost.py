"""What admission adds to a request: CPU of Redis and of the workers, with many requests in flight and several workers.

    python -m benchmarks.lease_cost [--leases 100,1000,2000] [--workers 1,8] [--seconds 10] [--json FILE]

The workers' own admission (workers/admission.py) on a real Redis and on their event loop, one endpoint, answers
log-normal around 2,700 tokens that last about ten seconds each, half as many tasks waiting as there are leases. Nothing
is generated: a lease is held for as long as its answer would take, and ended as a worker ends it, by the script that
publishes. Then the same number of slots does the same without leases; the difference is what admission adds.

adds_us      CPU of both that admission adds to a request
redis_us     CPU of the Redis process per request, decisions, refusals and publishing included; of which without leases
worker_us    CPU of all workers per request, this benchmark's own tasks included; of which without leases
decisions    per second, over all workers
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from app.capacity.lengths import kind_of
from app.manifest import RunManifest
from app.records import Task
from app.sglang.sampling import sampling_body
from app.sglang.wire import EndpointInfo
from app.store.connection import connect
from app.store.courier import Courier
from app.store.embedded import PrivateServer
from app.store.keys import DEATHS, EPOCH, EXPECTED, EndpointKeys, RunKeys
from app.urls import endpoint_key
from workers.admission import Admission, Past
from workers.holdings import Holdings
from workers.stages import ask_of
from workers.suspects import name_of

URL, MAX_NEW_TOKENS, RATE = "http://127.0.0.1:1", 8192, 0.27  # tokens per millisecond of one request
RUN = RunManifest(
    run_id="r", recipe="recipe", sampling=sampling_body({"max_new_tokens": MAX_NEW_TOKENS}), endpoints=[URL],
    vocab_size=1000, output_vocab_size=1000,
)  # fmt: skip
KEYS, NAMES = RunKeys(RUN.run_id), EndpointKeys(endpoint_key(URL))
MEAN_HELD = 2350  # tokens of a half-grown request
CURVE = "0:1 1000:0.98 2000:0.75 3000:0.42 4000:0.2 5000:0.09 6000:0.04 8000:0.006 8192:0"


class OneEndpoint:
    """What admission asks of workers/endpoints.py, for an endpoint that is always there."""

    grows = False  #: none is on its way back

    def __init__(self, kv_tokens: int):
        self.when_back: list = []
        self._info = EndpointInfo(url=URL, max_total_num_tokens=kv_tokens)

    def info(self, url: str) -> EndpointInfo:
        """What it says of itself."""
        return self._info

    def is_open(self, url: str) -> bool:
        """Never."""
        return False

    def objection(self, url: str, run_id: str) -> None:
        """None."""


@dataclass(slots=True)
class Slot:
    """A task after the other, as a worker does them; without admission each holds nothing."""

    courier: Courier
    admission: Admission | None
    rnd: random.Random
    done: list[int]  #: how many, over all slots

    async def work(self) -> None:
        """Lease, hold it as long as an answer takes, publish, again."""
        prompt = list(range(self.rnd.randint(500, 1800)))
        task = Task(
            key="0" * 32, dataset="d", row_id="0" * 24, source_id="", row_number=1, turn=0, turns=1,
            completion_index=0, max_new_tokens=MAX_NEW_TOKENS, prompt_token_ids=prompt,
        )  # fmt: skip
        if self.admission is None:
            await asyncio.sleep(self.rnd.random() * 10.0)
        while True:
            lease = self.admission and await self.admission.lease(RUN, task, ask_of(RUN, task), Past())
            tokens = min(MAX_NEW_TOKENS, max(2, self.rnd.lognormvariate(7.9, 0.45)))
            await asyncio.sleep(tokens / RATE / 1000)
            self.done[0] += 1
            if lease:
                self.admission.released_by_publish(lease)
            key = f"{self.done[0]:032x}"
            await self.courier.script(
                "publish",
                [KEYS.responses, KEYS.payload("d"), KEYS.claims("d"), KEYS.holders("d"), KEYS.published("d"),
                 NAMES.leases, NAMES.lease_info, DEATHS],
                [key, "d", "response", b"", lease.id if lease else "", name_of(RUN.run_id, key)],
            )  # fmt: skip


async def measure(leases: int, workers: int, seconds: float) -> dict[str, float]:
    """One row of the table."""
    with_leases = await _on_own_redis(leases, workers, seconds, admitted=True)
    without = await _on_own_redis(round(with_leases["held"]), workers, seconds, admitted=False)
    adds = sum(with_leases[name] - without[name] for name in ("redis_us", "worker_us"))
    return {"leases": leases, "workers": workers, "adds_us": adds} | with_leases | {
        "redis_us_without": without["redis_us"], "worker_us_without": without["worker_us"],
    }  # fmt: skip


async def _on_own_redis(leases: int, workers: int, seconds: float, *, admitted: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        server = PrivateServer(Path(folder))
        server.start()
        try:
            return await _measure(server.url, leases, workers, seconds, admitted)
        finally:
            server.stop()


async def _measure(url: str, leases: int, workers: int, seconds: float, admitted: bool) -> dict[str, float]:
    client, kv_tokens, done, rnd = connect(url), leases * MEAN_HELD, [0], random.Random(1)
    client.set(EPOCH, 0)
    client.hset(NAMES.control, mapping={"f": 1.1, "rate": RATE, "at": 10**15})
    client.hset(EXPECTED, kind_of(RUN.recipe, "d", "short"), CURVE)
    couriers = [Courier(url) for _ in range(workers)]
    admissions = [
        Admission(courier, Holdings(courier), OneEndpoint(kv_tokens), f"w{number}")
        for number, courier in enumerate(couriers)
    ]
    slots = [
        Slot(couriers[n % workers], admissions[n % workers] if admitted else None, rnd, done)
        for n in range(leases * 3 // 2 if admitted else leases)
    ]
    loops = [asyncio.create_task(admission.run_forever()) for admission in admissions]
    tasks = [asyncio.create_task(slot.work()) for slot in slots]
    await asyncio.sleep(12.0)  # the pool fills, and its requests come to all ages
    client.config_resetstat()
    before, ours, began, count, held = client.info("cpu"), time.process_time(), time.monotonic(), done[0], []
    while time.monotonic() - began < seconds:
        await asyncio.sleep(0.5)
        held.append(sum(admission.held for admission in admissions))
        for broken in filter(asyncio.Task.done, loops):
            broken.result()
    after, ours, count = client.info("cpu"), time.process_time() - ours, done[0] - count
    elapsed, scripts = time.monotonic() - began, client.info("commandstats")["cmdstat_evalsha"]
    for task in [*loops, *tasks]:
        if task.done():
            task.result()  # none ends by itself: raises what ended it
        task.cancel()
    await asyncio.gather(*loops, *tasks, return_exceptions=True)
    await asyncio.gather(*(courier.close() for courier in couriers))
    spent = sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))
    return {
        "held": sum(held) / len(held), "requests_per_s": count / elapsed,
        "decisions_per_s": (scripts["calls"] - count) / elapsed, "redis_us": 1e6 * spent / count,
        "worker_us": 1e6 * ours / count,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", default="100,1000,2000")
    parser.add_argument("--workers", default="1,8")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for leases in map(int, arguments.leases.split(",")):
        for workers in map(int, arguments.workers.split(",")):
            rows.append(uvloop.run(measure(leases, workers, arguments.seconds)))
            print("  ".join(f"{name} {value:.0f}" for name, value in rows[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What admission costs: CPU of Redis and of the workers per request, with many requests in flight and several workers.

    python -m benchmarks.lease_cost [--leases 100,1000,5000] [--workers 1,8] [--seconds 10] [--json FILE]

The workers' own admission (workers/admission.py) on a real Redis, one endpoint, answers log-normal around 2,700 tokens
that last about ten seconds each, half as many tasks waiting as there are leases. Nothing is generated: a granted lease
is held for as long as its answer would take, and given back.

redis_us    CPU of the Redis process per granted lease, everything included (decisions, refusals, releases)
worker_us   CPU of all workers per granted lease, asyncio and this benchmark's own tasks included
decision_us time that Redis takes for one script (a decision, or a lease given back)
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
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
from app.store.keys import EPOCH, EXPECTED, EndpointKeys
from app.urls import endpoint_key
from workers.admission import Admission, Past
from workers.holdings import Holdings
from workers.stages import ask_of

URL, MAX_NEW_TOKENS, RATE = "http://127.0.0.1:1", 8192, 0.27  # tokens per millisecond of one request
MEAN_HELD = 2350  # tokens of a half-grown request
CURVE = "0:1 1000:0.98 2000:0.75 3000:0.42 4000:0.2 5000:0.09 6000:0.04 8000:0.006 8192:0"


class OneEndpoint:
    """What admission asks of workers/endpoints.py, for an endpoint that is always there."""

    def __init__(self, kv_tokens: int):
        self.when_back: list = []
        self._info = EndpointInfo(url=URL, max_total_num_tokens=kv_tokens)

    def info(self, url: str) -> EndpointInfo:
        """What it says of itself."""
        return self._info

    def is_open(self, url: str) -> bool:
        """Never."""
        return False


async def task_after_task(admission: Admission, run: RunManifest, rnd: random.Random, granted: list[int]) -> None:
    """A slot of a worker: lease, hold it as long as an answer takes, give it back, again."""
    prompt = list(range(rnd.randint(500, 1800)))
    task = Task(
        key="0" * 32, dataset="d", row_id="0" * 24, source_id="", row_number=1, turn=0, turns=1, completion_index=0,
        max_new_tokens=MAX_NEW_TOKENS, prompt_token_ids=prompt,
    )  # fmt: skip
    while True:
        lease = await admission.lease(run, task, ask_of(run, task), Past())
        granted[0] += 1
        tokens = min(MAX_NEW_TOKENS, max(2, rnd.lognormvariate(7.9, 0.45)))
        await asyncio.sleep(tokens / RATE / 1000)
        admission.release(lease)


async def measure(leases: int, workers: int, seconds: float) -> dict:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        server = PrivateServer(Path(folder))
        server.start()
        try:
            return await _measure(server.url, leases, workers, seconds)
        finally:
            server.stop()


async def _measure(url: str, leases: int, workers: int, seconds: float) -> dict:
    client, names, kv_tokens = connect(url), EndpointKeys(endpoint_key(URL)), leases * MEAN_HELD
    run = RunManifest(
        run_id="r", recipe="recipe", sampling=sampling_body({"max_new_tokens": MAX_NEW_TOKENS}), endpoints=[URL],
        vocab_size=1000, output_vocab_size=1000,
    )  # fmt: skip
    client.set(EPOCH, 0)
    client.hset(names.control, mapping={"f": 1.1, "rate": RATE, "at": 10**15})
    couriers = [Courier(url) for _ in range(workers)]
    admissions = [
        Admission(courier, Holdings(courier), OneEndpoint(kv_tokens), f"w{number}")
        for number, courier in enumerate(couriers)
    ]
    client.hset(EXPECTED, kind_of(run.recipe, "d", "short"), CURVE)
    granted, rnd = [0], random.Random(1)
    loops = [asyncio.create_task(admission.run_forever()) for admission in admissions]
    slots = [
        asyncio.create_task(task_after_task(admissions[n % workers], run, rnd, granted))
        for n in range(leases * 3 // 2)
    ]
    await asyncio.sleep(12.0)  # the pool fills, and its requests come to all ages
    client.config_resetstat()
    before, ours, began, count = client.info("cpu"), time.process_time(), time.monotonic(), granted[0]
    held = []
    while time.monotonic() - began < seconds:
        await asyncio.sleep(0.5)
        held.append(sum(admission.held for admission in admissions))
    after, ours, count = client.info("cpu"), time.process_time() - ours, granted[0] - count
    elapsed, stats = time.monotonic() - began, client.info("commandstats")
    for task in [*loops, *slots]:
        task.cancel()
    await asyncio.gather(*loops, *slots, return_exceptions=True)
    await asyncio.gather(*(courier.close() for courier in couriers))
    spent = sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))
    scripts = stats["cmdstat_evalsha"]
    return {
        "leases": leases, "held": round(sum(held) / len(held)), "workers": workers,
        "granted_per_s": round(count / elapsed, 1), "decisions_per_s": round(scripts["calls"] / elapsed, 1),
        "decision_us": round(scripts["usec_per_call"]), "redis_us": round(1e6 * spent / count),
        "worker_us": round(1e6 * ours / count), "redis_core": round(spent / elapsed, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", default="100,1000,5000")
    parser.add_argument("--workers", default="1,8")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for leases in map(int, arguments.leases.split(",")):
        for workers in map(int, arguments.workers.split(",")):
            rows.append(uvloop.run(measure(leases, workers, arguments.seconds)))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

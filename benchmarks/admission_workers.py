"""The founding scenario on the real path: worker processes, Redis, HTTP, and an endpoint that dies of too much.

    python benchmarks/admission_workers.py [PROMPTS] [WORKERS ...]

KV 231,120 tokens, prompts of 1,150 ids, answers log-normal around 2,700, an endpoint with SGLang's reserve rule that
dies above 100 running or on a full pool; nothing tuned. Compares with everything at once on the same endpoint made
crash-free, played by the simulator's engine.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.faults import Faults
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, EndpointKeys, RunKeys
from app.urls import endpoint_key
from tests.belt import manifest, put, until, worker

KV_TOKENS, PROMPT_TOKENS, MAX_NEW_TOKENS = 231_120, 1150, 8192
CONFIG = {
    "max_total_num_tokens": KV_TOKENS, "max_running_requests": 4096, "output_lengths": "lognormal",
    "output_mean": 2990, "output_sigma": 0.45,
}  # fmt: skip
DEADLY = Faults(crash_above_running=100, crash_on_kv_full=True)


def play(folder: Path, prompts: int, workers: int, faults: Faults, concurrency: int = -1) -> None:
    """One run; prints what came of it."""
    server = PrivateServer(folder / "redis")
    server.start()
    client = connect(server.url)
    client.set(EPOCH, 0)
    with running_simulator(SimulatorConfig(**CONFIG, faults=faults)) as endpoint, contextlib.ExitStack() as stack:
        run = manifest(endpoint.url, max_new_tokens=MAX_NEW_TOKENS, concurrency=concurrency)
        for number in range(workers):
            stack.enter_context(worker(server.url, folder, name=f"w{number}"))
        put(client, server.url, run, prompts, prompt=PROMPT_TOKENS)
        until(lambda: endpoint.stats()["running"] > 0, what="the first request")
        began = time.monotonic()
        until(lambda: client.xlen(RunKeys("run1").responses) >= prompts, 1800, "all answers")
        seconds, stats = time.monotonic() - began, endpoint.stats()
        f = client.hget(EndpointKeys(endpoint_key(endpoint.url)).control, "f")
        print(f"{workers} workers: {seconds:6.1f} s  crashes {stats['crashes']}  peak running {stats['peak_running']}"
              f"  fullest {stats['peak_used_tokens'] / KV_TOKENS:.2f}  retractions {stats['retractions']}"
              f"  aborted {stats['aborted']}  f {float(f or 1):.2f}", flush=True)  # fmt: skip
    client.close()
    server.stop()


def main() -> None:
    prompts = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        for number, workers in enumerate(map(int, sys.argv[2:] or ["1", "2", "8"])):
            place = Path(folder) / str(number)
            place.mkdir()
            play(place, prompts, workers, DEADLY)
        print("everything at once, crash-free:")
        place = Path(folder) / "flood"
        place.mkdir()
        play(place, prompts, 1, Faults(), concurrency=100_000)


if __name__ == "__main__":
    main()

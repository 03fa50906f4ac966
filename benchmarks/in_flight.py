"""One worker, a thousand requests of ten seconds in flight: how full is the endpoint, and what does the worker cost?

Usage: python benchmarks/in_flight.py [--requests 1000] [--seconds 10] [--rounds 4] [--json FILE]
Prints occupancy at the endpoint (time-averaged running ÷ requests, over the middle of the run), the worker's resident
memory and CPU per request. The endpoint is the simulated one: answers of one length, so that a request takes SECONDS.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from app.sglang.simulator import SimulatorConfig, running_simulator  # noqa: E402
from app.store.connection import connect  # noqa: E402
from app.store.embedded import PrivateServer  # noqa: E402
from app.store.holders import forget_all  # noqa: E402
from app.store.keys import RunKeys  # noqa: E402
from tests.belt import manifest, put  # noqa: E402

TOKENS = 400


def measure(requests: int, seconds: float, rounds: int, sigma: float) -> dict[str, float]:
    """One run; figures from its middle."""
    config = SimulatorConfig(
        output_lengths="lognormal" if sigma else "fixed", output_sigma=sigma or 0.1, output_mean=TOKENS,
        step_seconds=seconds / TOKENS, step_seconds_per_request=0.0,
        max_running_requests=requests, max_total_num_tokens=10_000_000, prefill_tokens_per_second=10_000_000.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, running_simulator(config) as endpoint:
        server = PrivateServer(Path(folder))
        server.start()
        client = connect(server.url)
        forget_all(client)
        run = manifest(endpoint.url, max_new_tokens=TOKENS * 4, concurrency=requests)
        put(client, server.url, run, requests * rounds)
        worker = subprocess.Popen(
            [sys.executable, "-m", "app.cli.main", "worker", "--redis", server.url, "--slots", str(requests * 2)],
            cwd=ROOT, stdin=subprocess.DEVNULL, env=os.environ,
        )  # fmt: skip
        try:
            return _watch(client, endpoint, psutil.Process(worker.pid), requests, rounds)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
            server.stop()


def _watch(client, endpoint, worker: psutil.Process, requests: int, rounds: int) -> dict[str, float]:
    stream = RunKeys("run1").responses
    while client.xlen(stream) < requests:  # the first round fills the endpoint
        time.sleep(0.1)
    begin, cpu, samples, memory = time.monotonic(), sum(worker.cpu_times()[:2]), [], []
    first = client.xlen(stream)
    while (done := client.xlen(stream)) < requests * (rounds - 1):
        samples.append(endpoint.stats()["running"])
        memory.append(worker.memory_info().rss)
        time.sleep(0.1)
    spent = sum(worker.cpu_times()[:2]) - cpu
    return {
        "occupancy": sum(samples) / len(samples) / requests, "rss_mb": max(memory) / 1e6,
        "cpu_ms_per_request": 1000 * spent / (done - first), "seconds": time.monotonic() - begin,
        "threads": worker.num_threads(), "open_files": worker.num_fds(),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sigma", type=float, default=0.0, help="spread of the lengths; 0: all end in lockstep")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.requests, arguments.seconds, arguments.rounds, arguments.sigma)
    for name, value in figures.items():
        print(f"{name:<20} {value:,.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

"""An endpoint that crashes again and again: how much of what it made is kept?

    python -m benchmarks.goodput [--rows 1700] [--running 24] [--every 500] [--down-seconds 10]
        [--stage N] [--repeat 1] [--json FILE]

A real worker and a private Redis; the endpoint runs so many requests at once, answers have 100 tokens, a second each.
It is played once whole, for its pace, then with a crash after every so many answers. `goodput` is the tokens kept over
what it would have made at that pace while it was up; `bound` is what the crashes leave at best: what was in flight then
is lost, except for stages that were kept. (No multiple of `every` for the rows, or the last crash leaves a few of them
alone at the endpoint.) `extra` is the number of requests sent again, `in_flight` what crashes cut. --repeat: medians of
so many, all at once, each with a worker, a Redis and an endpoint of its own.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from app.sglang.simulator import Faults, SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, RunKeys
from tests.belt import manifest, published, put, worker

TOKENS, STEP_SECONDS, FREEZE_SECONDS = 100, 0.01, 0.2


def play(rows: int, running: int, stage: int | None, faults: Faults) -> dict[str, float]:
    """One run."""
    config = SimulatorConfig(
        output_lengths="lognormal", output_mean=TOKENS, output_sigma=0.3, step_seconds=STEP_SECONDS,
        step_seconds_per_token=0.0, max_running_requests=running, faults=faults,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, running_simulator(config) as endpoint:
        folder = Path(name)
        server = PrivateServer(folder / "redis")
        server.start()
        client = connect(server.url)
        client.set(EPOCH, 0)
        run = manifest(endpoint.url, max_new_tokens=4 * TOKENS, stage_tokens=stage, stop_ids=[config.eos_id])
        put(client, server.url, run, rows)
        with worker(server.url, folder):
            while endpoint.stats(detail=False)["requests"] == 0:
                time.sleep(0.01)
            begun = time.monotonic()
            while client.xlen(RunKeys("run1").responses) < rows:
                time.sleep(0.02)
            seconds, stats = time.monotonic() - begun, endpoint.stats(detail=False)
        records = published(client)
        server.stop()
    assert len({one["key"] for one in records}) == rows
    return {
        "seconds": seconds, "crashes": stats["restarts"],
        "kept_tokens": sum(one["num_output_tokens"] for one in records), "made_tokens": stats["generated_tokens"],
        "extra": sum(one["attempt"] - 1 for one in records),
        "in_flight": stats["lost"],
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Whole, and with crashes."""
    down = arguments.down_seconds
    deadly = Faults(crash_after_completions=arguments.every, down_seconds=down, freeze_seconds=FREEZE_SECONDS)
    whole = play(arguments.rows, arguments.running, arguments.stage, Faults())
    crashed = play(arguments.rows, arguments.running, arguments.stage, deadly)
    pace = whole["kept_tokens"] / whole["seconds"]
    up = crashed["seconds"] - crashed["crashes"] * (down + FREEZE_SECONDS)
    return crashed | {
        "seconds_whole": whole["seconds"], "up_seconds": up, "goodput": crashed["kept_tokens"] / (pace * up),
        "bound": crashed["kept_tokens"] / crashed["made_tokens"],
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1700)
    parser.add_argument("--running", type=int, default=24)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--down-seconds", type=float, default=10.0)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.repeat, get_context("spawn")) as pool:
        found = list(pool.map(measure, [arguments] * arguments.repeat))
    figures = {name: statistics.median(one[name] for one in found) for name in found[0]}
    for name, value in figures.items():
        print(f"{name:<16}{value:>14,.3f}")
    print(f"goodput from {min(one['goodput'] for one in found):.3f} to {max(one['goodput'] for one in found):.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

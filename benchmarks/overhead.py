"""What Headrace costs a row, beside bare Celery: an endpoint that answers at once, one worker, one collector.

    python -m benchmarks.overhead [--rows 6000] [--rounds 5] [--workers 1] [--prompt 64] [--output 64] [--json FILE]

Each round drains two queues of as many messages from the same private Redis, one after the other: no-op tasks by a
stock Celery worker (threads pool, 64 slots), and completions by one Headrace worker and the collector, from the queue
to lines that are synced. Rates are taken over the middle of a round. `ratio` is rows per second over tasks per second;
the report has the median of the rounds. CPU is of each process by itself, milliseconds a row.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from app.celery_app import make_app
from app.lanes import Lane
from app.rundir import RAW, RunDir
from app.samples import SampleFilters
from app.sglang.simulator import SimulatorConfig, serve
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.holders import forget_all
from app.store.keys import CELERY_PREFIX, EPOCH
from tests.belt import manifest, put, worker
from workers.collector import Collector

_SPAWN = multiprocessing.get_context("spawn")
_NOOP, _NOOP_SLOTS = "bare.noop", 64
_FIRST, _LAST = 0.2, 0.95  #: the part of a round that is measured
_NETWORK = {
    "round_trips": "total_reads_processed", "commands": "total_commands_processed",
    "bytes_to_redis": "total_net_input_bytes", "bytes_from_redis": "total_net_output_bytes",
}  # fmt: skip


# the processes


def _noop_app(url: str):
    celery = make_app(url)

    @celery.task(name=_NOOP, ignore_result=True, acks_late=True)
    def noop(run_id: str, dataset: str, key: str) -> None:
        return None

    return celery


def _noop_worker(url: str) -> None:
    os.dup2(2, 1)  # Celery says good-bye on stdout
    _noop_app(url).Worker(
        pool="threads", concurrency=_NOOP_SLOTS, queues=[Lane.SHORT.queue], loglevel="ERROR", without_mingle=True,
        without_gossip=True, quiet=True, optimization="fair",
    ).start()  # fmt: skip


def _endpoint(config: SimulatorConfig, ready) -> None:
    serve(config, port=0, on_ready=ready.send)


def _collector(out: Path, url: str) -> None:
    collector = Collector(RunDir(out), connect(url), "run1", SampleFilters())
    signal.signal(signal.SIGTERM, lambda *_: collector.stopping.set())
    collector.run()


@contextmanager
def _process(target: Callable, *arguments: object) -> Iterator[psutil.Process]:
    process = _SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join(20)
        process.kill()


@contextmanager
def _redis(folder: Path) -> Iterator[PrivateServer]:
    server = PrivateServer(folder / "redis")
    server.start()
    try:
        yield server
    finally:
        server.stop()


# measuring


def _middle(count: Callable[[], int], total: int, client, parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """What a row costs while the share of done rows goes from `_FIRST` to `_LAST`."""
    begun = _await(lambda: count() >= total * _FIRST and count(), parts)
    before, network, cpu = time.monotonic(), client.info("stats"), _cpu(parts)
    done = _await(lambda: count() >= total * _LAST and count(), parts)
    seconds, rows, spent = time.monotonic() - before, done - begun, _cpu(parts)
    after = client.info("stats")
    figures = {"per_second": rows / seconds}
    figures |= {f"{name}_cpu_ms": 1000 * (spent[name] - cpu[name]) / rows for name in parts}
    return figures | {name: (after[field] - network[field]) / rows for name, field in _NETWORK.items()}


def _await(condition: Callable[[], int], parts: dict[str, list[psutil.Process]]) -> int:
    """Wait for it while all processes live."""
    while not (value := condition()):
        for name, some in parts.items():
            if any(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in some):
                raise SystemExit(f"The {name} ended before its time.")
        time.sleep(0.02)
    return value


def _cpu(parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    return {name: sum(sum(one.cpu_times()[:2]) for one in some) for name, some in parts.items()}


def _done_of(celery_client, total: int) -> Callable[[], int]:
    """Messages neither queued nor unacknowledged."""

    def count() -> int:
        pipeline = celery_client.pipeline(transaction=False)
        pipeline.llen(CELERY_PREFIX + Lane.SHORT.queue)
        pipeline.hlen(CELERY_PREFIX + "unacked")
        return total - sum(pipeline.execute())

    return count


def _lines_of(path: Path) -> Callable[[], int]:
    """Lines in a file that grows."""
    lines, read = 0, 0

    def count() -> int:
        nonlocal lines, read
        if path.exists():
            with path.open("rb") as file:
                file.seek(read)
                new = file.read()
            lines, read = lines + new.count(b"\n"), read + len(new)
        return lines

    return count


def bare(folder: Path, tasks: int) -> dict[str, float]:
    """Celery alone."""
    with ExitStack() as stack:
        server = stack.enter_context(_redis(folder))
        celery = _noop_app(server.url)
        with celery.producer_pool.acquire(block=True) as producer, producer.batch(max_size=500):
            for number in range(tasks):
                celery.send_task(
                    _NOOP, ("run1", "d", f"{number:032x}"), queue=Lane.SHORT.queue, producer=producer,
                    ignore_result=True, argsrepr=f"d row {number}", kwargsrepr="",
                )  # fmt: skip
        client = connect(server.url)
        one = stack.enter_context(_process(_noop_worker, server.url))
        return _middle(_done_of(client, tasks), tasks, client, {"worker": [one], "redis": [psutil.Process(server.pid)]})


def ours(folder: Path, rows: int, workers: int, prompt: int, output: int) -> dict[str, float]:
    """The same number of rows, from the queue to synced lines."""
    config = SimulatorConfig(instant=True, output_lengths="fixed", output_mean=output)
    with ExitStack() as stack:
        server = stack.enter_context(_redis(folder))
        ready, end = _SPAWN.Pipe()
        endpoint = stack.enter_context(_process(_endpoint, config, end))
        client = connect(server.url)
        forget_all(client)
        client.set(EPOCH, 0)
        run = manifest(ready.recv(), max_new_tokens=2 * output)
        put(client, server.url, run, rows, prompt=prompt)
        out = folder / "out"
        (out / ".headrace").mkdir(parents=True)
        collector = stack.enter_context(_process(_collector, out, server.url))
        some = [
            psutil.Process(stack.enter_context(worker(server.url, folder, name=f"w{number}")).pid)
            for number in range(workers)
        ]
        parts = {"worker": some, "collector": [collector], "endpoint": [endpoint],
                 "redis": [psutil.Process(server.pid)]}  # fmt: skip
        return _middle(_lines_of(RunDir(out).file("d", RAW)), rows, client, parts)


def compare(rows: int, rounds: int, workers: int, prompt: int, output: int) -> dict[str, dict[str, float]]:
    """Medians of the rounds."""
    pairs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            pairs.append((bare(Path(one), rows), ours(Path(other), rows, workers, prompt, output)))
    ratios = [mine["per_second"] / celery["per_second"] for celery, mine in pairs]
    tables = {name: _medians([pair[place] for pair in pairs]) for place, name in enumerate(("celery", "headrace"))}
    return tables | {"ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}}


def _medians(some: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in some) for name in some[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = compare(arguments.rows, arguments.rounds, arguments.workers, arguments.prompt, arguments.output)
    print(f"{'a row':<20}{'bare Celery':>14}{'Headrace':>14}")
    for name in found["headrace"]:
        celery = found["celery"].get(name)
        print(f"{name:<20}{'' if celery is None else f'{celery:,.2f}':>14}{found['headrace'][name]:>14,.2f}")
    print("ratio {median:.2f} (of {least:.2f} to {most:.2f})".format(**found["ratio"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

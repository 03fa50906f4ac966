"""What Headrace costs a row, beside bare Celery: an endpoint that answers at once, workers, one collector.

    python -m benchmarks.overhead [--rows 6000] [--repeat 5] [--workers 1,2] [--pin] [--prompt 64] [--output 64]
                                  [--json FILE]

Each round drains queues of as many messages from a private Redis, one after the other: no-op tasks by a stock Celery
worker (threads pool, 64 slots), and completions by as many Headrace workers as asked for, and the collector, from the
queue to lines that are synced. Rates are taken over the middle of a round; printed are medians of the rounds. `ratio`
is rows per second of the first number of workers over tasks per second, `scaling` that of each other number over the
first. CPU is of each kind of process, milliseconds a row; `cores` is what all of them together keep busy.
--pin gives each worker a core of its own, and Redis, the collector and the endpoint others (as many as there are):
without it, on few cores, they stand in each other's way.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


class Cores:
    """Which cores a process may use: all, or of its own where pinned."""

    def __init__(self, pin: bool, workers: int):
        """workers: how many there will be at most."""
        self._all = sorted(os.sched_getaffinity(0)) if pin else []
        if pin and len(self._all) <= workers:
            raise SystemExit(f"--pin needs more cores than workers; here are {len(self._all)}.")
        self._others = self._all[workers:]

    @contextmanager
    def of_worker(self, number: int) -> Iterator[None]:
        """What is started inside is worker `number`, from 0."""
        with self._only(self._all[number : number + 1]):
            yield

    @contextmanager
    def of_other(self, number: int) -> Iterator[None]:
        """What is started inside is none: 0 Redis, 1 collector, 2 endpoint."""
        with self._only(self._others and [self._others[number % len(self._others)]]):
            yield

    @contextmanager
    def _only(self, cores: list[int]) -> Iterator[None]:
        before = os.sched_getaffinity(0) if cores else set()
        if cores:
            os.sched_setaffinity(0, cores)
        try:
            yield
        finally:
            if cores:
                os.sched_setaffinity(0, before)


@contextmanager
def _process(cores: AbstractContextManager, target: Callable, *arguments: object) -> Iterator[psutil.Process]:
    process = _SPAWN.Process(target=target, args=arguments, daemon=True)
    with cores:
        process.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join(20)
        process.kill()


@contextmanager
def _redis(folder: Path, cores: Cores) -> Iterator[PrivateServer]:
    server = PrivateServer(folder / "redis")
    with cores.of_other(0):
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
    figures["cores"] = sum(spent[name] - cpu[name] for name in parts) / seconds
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


def bare(folder: Path, tasks: int, cores: Cores) -> dict[str, float]:
    """Celery alone."""
    with ExitStack() as stack:
        server = stack.enter_context(_redis(folder, cores))
        celery = _noop_app(server.url)
        with celery.producer_pool.acquire(block=True) as producer, producer.batch(max_size=500):
            for number in range(tasks):
                celery.send_task(
                    _NOOP, ("run1", "d", f"{number:032x}"), queue=Lane.SHORT.queue, producer=producer,
                    ignore_result=True, argsrepr=f"d row {number}", kwargsrepr="",
                )  # fmt: skip
        client = connect(server.url)
        one = stack.enter_context(_process(cores.of_worker(0), _noop_worker, server.url))
        return _middle(_done_of(client, tasks), tasks, client, {"worker": [one], "redis": [psutil.Process(server.pid)]})


def ours(folder: Path, rows: int, workers: int, prompt: int, output: int, cores: Cores) -> dict[str, float]:
    """The same number of rows, from the queue to synced lines."""
    config = SimulatorConfig(instant=True, output_lengths="fixed", output_mean=output)
    with ExitStack() as stack:
        server = stack.enter_context(_redis(folder, cores))
        ready, end = _SPAWN.Pipe()
        endpoint = stack.enter_context(_process(cores.of_other(2), _endpoint, config, end))
        client = connect(server.url)
        forget_all(client)
        client.set(EPOCH, 0)
        run = manifest(ready.recv(), max_new_tokens=2 * output)
        put(client, server.url, run, rows, prompt=prompt)
        out = folder / "out"
        (out / ".headrace").mkdir(parents=True)
        collector = stack.enter_context(_process(cores.of_other(1), _collector, out, server.url))
        some = []
        for number in range(workers):
            with cores.of_worker(number):
                some.append(psutil.Process(stack.enter_context(worker(server.url, folder, name=f"w{number}")).pid))
        parts = {"worker": some, "collector": [collector], "endpoint": [endpoint],
                 "redis": [psutil.Process(server.pid)]}  # fmt: skip
        return _middle(_lines_of(RunDir(out).file("d", RAW)), rows, client, parts)


def compare(rows: int, rounds: int, workers: list[int], prompt: int, output: int, cores: Cores) -> dict[str, dict]:
    """Medians of the rounds; of ratios also the least and the most."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found["celery"].append(bare(Path(folder), rows, cores))
        for number in workers:
            with tempfile.TemporaryDirectory() as folder:
                found[f"headrace {number}"].append(ours(Path(folder), rows, number, prompt, output, cores))
    first, *others = (f"headrace {number}" for number in workers)
    ratios = {"ratio": _ratio(found[first], found["celery"])}
    ratios |= {f"scaling {name.split()[1]}": _ratio(found[name], found[first]) for name in others}
    return {name: _medians(some) for name, some in found.items()} | ratios


def _ratio(these: list[dict[str, float]], those: list[dict[str, float]]) -> dict[str, float]:
    each = [one["per_second"] / other["per_second"] for one, other in zip(these, those, strict=True)]
    return {"median": statistics.median(each), "least": min(each), "most": max(each)}


def _medians(some: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in some) for name in some[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--workers", default="1", help="numbers of workers, the first of which is compared with Celery")
    parser.add_argument("--pin", action="store_true", help="each worker on a core of its own, the rest on others")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    workers = [int(number) for number in arguments.workers.split(",")]
    cores = Cores(arguments.pin, max(workers))
    found = compare(arguments.rows, arguments.repeat, workers, arguments.prompt, arguments.output, cores)
    columns = [name for name in found if "per_second" in found[name]]
    print(f"{'a row':<20}" + "".join(f"{name:>14}" for name in columns))
    for figure in found[columns[-1]]:
        cells = (f"{found[name][figure]:,.2f}" if figure in found[name] else "" for name in columns)
        print(f"{figure:<20}" + "".join(f"{cell:>14}" for cell in cells))
    for name in (name for name in found if name not in columns):
        print(f"{name} {found[name]['median']:.2f} (of {found[name]['least']:.2f} to {found[name]['most']:.2f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How fast rows become tasks, beside what could be the limit, and in how much memory.

Usage: python -m benchmarks.enqueue [--rows 1000000] [--repeat 1] [--json FILE]
Rows of about 20 tokens, the bundled tokenizer, a private Redis that somebody empties. Four rates, in rows per second:

    headrace     the producer alone, from exec to its end: start, reading, ledger, rendering and sending
    tokenizer    render() of the same rows, and nothing else, in as many processes as the producer's pool has
    broker       bare Celery alone: no-op tasks with messages of the same size from one process, in its quickest way
                 (Producer.batch of 500, explicit argsrepr)
    both         tokenizer and broker at once: what one would get that had nothing else to do with these cores

The limits are measured before and after the producer, and their means taken. `ratio` is the producer's rate by the
slower of the tokenizer and the broker, each of which has all cores to itself while it is measured; `ratio_to_both` by
the two of them at once, sharing the cores as they do in a run. The CPU of a row, in the producer's own process and in
its pool (starts included), hardly depends on what else the machine does.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from app.celery_app import make_app  # noqa: E402
from app.lanes import Lane  # noqa: E402
from app.records import Conversation  # noqa: E402
from app.settings import RunSettings  # noqa: E402
from app.store.connection import connect  # noqa: E402
from app.store.embedded import PrivateServer  # noqa: E402
from app.store.keys import CELERY_PREFIX, RunKeys  # noqa: E402
from app.tokenization import Renderer, RenderOptions  # noqa: E402
from producers.catalog import CHUNK_ROWS  # noqa: E402
from producers.enqueue import Producer  # noqa: E402
from producers.inputs import parse_inputs  # noqa: E402
from producers.rendering import POOL_PROCESSES, Row, render  # noqa: E402
from tests.belt import manifest  # noqa: E402

TOKENIZER = str(ROOT / "app" / "demo_data" / "tokenizer")
OPTIONS = RenderOptions(tokenizer=TOKENIZER)
_SPAWN = multiprocessing.get_context("spawn")
_LIMIT_ROWS = 40_000  #: at most, to measure a limit


def write_rows(path: Path, rows: int) -> None:
    """Rows of about 20 tokens, no two equal."""
    with path.open("w") as file:
        for n in range(rows):
            file.write(f'{{"prompt": "What is {n} plus {n * 7 % 1000}?"}}\n')


def produce(folder: Path, url: str, told: Connection) -> None:
    """The producer's process; tells the seconds of CPU that it and its pool took."""
    settings = RunSettings(
        inputs=[f"d={folder / 'rows.jsonl'}"], out=folder / "out", endpoints=["http://nowhere:1"], tokenizer=TOKENIZER
    )
    Producer(
        settings, parse_inputs(settings.inputs), manifest("http://nowhere:1"), OPTIONS, connect(url), make_app(url),
        lambda: False,
    ).run(wait=False)  # fmt: skip
    pool = resource.getrusage(resource.RUSAGE_CHILDREN)
    told.send((time.process_time(), pool.ru_utime + pool.ru_stime))


@contextmanager
def emptied_redis() -> Iterator[tuple[str, dict[str, float]]]:
    """A server of its own, and what he saw who stands in for workers and collector: he forgets tasks as they come."""
    with tempfile.TemporaryDirectory() as folder:
        server = PrivateServer(Path(folder))
        server.start()
        seen, over = {"redis_peak_mb": 0.0, "peak_queue": 0.0}, threading.Event()
        drain = threading.Thread(target=_empty, args=(server.url, over, seen))
        drain.start()
        try:
            yield server.url, seen
        finally:
            over.set()
            drain.join()
            server.stop()


def _empty(url: str, over: threading.Event, seen: dict[str, float]) -> None:
    client = connect(url)
    payload, lanes = RunKeys("run1").payload("d"), [CELERY_PREFIX + lane.queue for lane in Lane]
    while not over.is_set():
        seen["redis_peak_mb"] = max(seen["redis_peak_mb"], client.info("memory")["used_memory"] / 1e6)
        seen["peak_queue"] = max(seen["peak_queue"], client.hlen(payload))
        client.delete(*lanes, payload)
        time.sleep(0.05)


def whole(rows: int) -> dict[str, float]:
    """The producer from file to queue."""
    with tempfile.TemporaryDirectory() as name, emptied_redis() as (url, seen):
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows)
        heard, told = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=produce, args=(folder, url, told))
        begin = time.monotonic()
        process.start()
        memory = _watch(process, begin)
        seconds = time.monotonic() - begin
        assert process.exitcode == 0
        own, pool = heard.recv()
        early = max(m for at, m in memory if at <= max(10.0, seconds / 10))
        return {"headrace": rows / seconds, "memory_early_mb": early / 1e6,
                "memory_peak_mb": max(m for _, m in memory) / 1e6, "cpu_us_a_row": own / rows * 1e6,
                "cpu_us_a_row_of_pool": pool / rows * 1e6, **seen}  # fmt: skip


def _watch(process, begin: float) -> list[tuple[float, int]]:
    """Unshared memory (USS) of the main process alone, over time; its rendering children hold one tokenizer each."""
    me, memory = psutil.Process(process.pid), []
    while process.is_alive():
        try:
            memory.append((time.monotonic() - begin, me.memory_info().rss))
        except psutil.Error:
            break
        time.sleep(0.2)
    process.join()
    return memory


def limits(rows: int) -> dict[str, float]:
    """Rendering alone, bare Celery alone, and both at once."""
    with emptied_redis() as (url, _):
        tokenizer = [(_render, (rows // POOL_PROCESSES,))] * POOL_PROCESSES
        broker = [(_send_noops, (url, rows))]
        some = {"tokenizer": tokenizer, "broker": broker, "both": tokenizer + broker}
        return {name: rows / _seconds_of(works) for name, works in some.items()}


def _seconds_of(works: list[tuple[Callable, tuple]]) -> float:
    """Until all are done, each in a process of its own; from when the last is ready to begin."""
    begun = _SPAWN.Barrier(len(works) + 1)
    processes = [_SPAWN.Process(target=work, args=(*arguments, begun)) for work, arguments in works]
    for process in processes:
        process.start()
    begun.wait()
    begin = time.monotonic()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.monotonic() - begin


def _render(rows: int, begun) -> None:
    renderer, run = Renderer(OPTIONS), manifest("http://nowhere:1")
    asked = [[{"role": "user", "content": f"What is {n} plus {n * 7 % 1000}?"}] for n in range(rows)]
    some = [Row("d", f"{n:024x}", "", n + 1, Conversation(messages), (0,)) for n, messages in enumerate(asked)]
    begun.wait()
    for start in range(0, rows, CHUNK_ROWS):
        render(some[start : start + CHUNK_ROWS], renderer, run, False)


def _send_noops(url: str, tasks: int, begun) -> None:
    celery = make_app(url)
    begun.wait()
    with celery.producer_pool.acquire(block=True) as producer, producer.batch(max_size=500):
        for n in range(tasks):
            celery.send_task(
                "noop", ("run1", "d", f"{n:032x}"), task_id=f"d:{n:024x}:0:0", queue=Lane.SHORT.queue,
                producer=producer, ignore_result=True, argsrepr=f"d row {n}", kwargsrepr="",
            )  # fmt: skip


def measure(rows: int) -> dict[str, float]:
    """The producer between two measurements of its limits."""
    few = min(rows, _LIMIT_ROWS)
    before, figures, after = limits(few), whole(rows), limits(few)
    figures |= {name: (before[name] + after[name]) / 2 for name in before}
    figures["ratio"] = figures["headrace"] / min(figures["tokenizer"], figures["broker"])
    figures["ratio_to_both"] = figures["headrace"] / figures["both"]
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=1, help="medians of so many")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = [measure(arguments.rows) for _ in range(arguments.repeat)]
    figures = {name: statistics.median(one[name] for one in found) for name in found[0]}
    for name, value in figures.items():
        print(f"{name:<26} {value:>14,.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

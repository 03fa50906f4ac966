"""How fast rows become tasks, and in how much memory: the producer alone, with somebody who empties the queues.

Usage: python benchmarks/enqueue.py [--rows 1000000] [--json FILE]
Short synthetic rows, the bundled tokenizer, a private Redis. Beside the whole it measures what could be the limit:
tokenizer and template on one core, and the broker (payload and message of ready tasks). Prints rows/s, the peak memory
of the producer's processes over the run's first tenth and its rest, and the peak of Redis.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
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
from producers.conveyor import Conveyor  # noqa: E402
from producers.enqueue import Producer  # noqa: E402
from producers.inputs import parse_inputs  # noqa: E402
from producers.rendering import Row, render  # noqa: E402
from tests.belt import manifest  # noqa: E402

TOKENIZER = str(ROOT / "app" / "demo_data" / "tokenizer")
OPTIONS = RenderOptions(tokenizer=TOKENIZER)


def write_rows(path: Path, rows: int) -> None:
    """Rows of about 20 tokens, no two equal."""
    with path.open("w") as file:
        for n in range(rows):
            file.write(f'{{"prompt": "What is {n} plus {n * 7 % 1000}?"}}\n')


def produce(folder: Path, url: str) -> None:
    """The producer's process."""
    settings = RunSettings(
        inputs=[f"d={folder / 'rows.jsonl'}"], out=folder / "out", endpoints=["http://nowhere:1"], tokenizer=TOKENIZER
    )
    Producer(
        settings, parse_inputs(settings.inputs), manifest("http://nowhere:1"), OPTIONS, connect(url), make_app(url),
        lambda: False,
    ).run(wait=False)  # fmt: skip


def empty_queues(url: str, over: threading.Event, seen: dict[str, int]) -> None:
    """Stand in for workers and collector: forget tasks as they come, and watch how much lies there."""
    client = connect(url)
    payload, lanes = RunKeys("run1").payload("d"), [CELERY_PREFIX + lane.queue for lane in Lane]
    while not over.is_set():
        seen["redis_peak_mb"] = max(seen.get("redis_peak_mb", 0), client.info("memory")["used_memory"] / 1e6)
        seen["peak_queue"] = max(seen.get("peak_queue", 0), client.hlen(payload))
        client.delete(*lanes, payload)
        time.sleep(0.05)


def whole(rows: int) -> dict[str, float]:
    """The producer from file to queue."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows)
        server = PrivateServer(folder / "redis")
        server.start()
        seen, over = {}, threading.Event()
        drain = threading.Thread(target=empty_queues, args=(server.url, over, seen))
        drain.start()
        process = multiprocessing.get_context("spawn").Process(target=produce, args=(folder, server.url))
        begin = time.monotonic()
        process.start()
        memory = _watch(process, begin)
        seconds = time.monotonic() - begin
        over.set()
        drain.join()
        server.stop()
        assert process.exitcode == 0
        early = max(m for at, m in memory if at <= max(10.0, seconds / 10))
        late = max(m for at, m in memory)
        return {"rows_per_second": rows / seconds, "seconds": seconds, "memory_early_mb": early / 1e6,
                "memory_peak_mb": late / 1e6, **seen}  # fmt: skip


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


def parts(rows: int) -> dict[str, float]:
    """The two that could limit it: one core's rendering, and the broker alone."""
    renderer, run = Renderer(OPTIONS), manifest("http://nowhere:1")
    asked = [[{"role": "user", "content": f"What is {n} plus {n * 7 % 1000}?"}] for n in range(rows)]
    some = [Row("d", f"{n:024x}", "", n + 1, Conversation(messages), (0,)) for n, messages in enumerate(asked)]
    begin = time.process_time()
    parcels = [item for row in some for item in render(row, renderer, run, False)]
    rendering = rows / (time.process_time() - begin)
    with tempfile.TemporaryDirectory() as folder:
        server = PrivateServer(Path(folder))
        server.start()
        conveyor = Conveyor(connect(server.url), make_app(server.url), "run1", 10**9, lambda: False)
        begin = time.monotonic()
        for start in range(0, rows, 64):
            conveyor.put(parcels[start : start + 64])
        broker = rows / (time.monotonic() - begin)
        server.stop()
    return {"render_per_core_second": rendering, "broker_rows_per_second": broker}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = parts(min(arguments.rows, 20_000)) | whole(arguments.rows)
    for name, value in figures.items():
        print(f"{name:<26} {value:>14,.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

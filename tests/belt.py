"""Helpers of tests that drive workers over a real Redis: a run's manifest, tasks on the belt, a worker process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from app.celery_app import make_app
from app.lanes import lane_of
from app.manifest import RunManifest
from app.packing import decompress, pack_task
from app.records import Task
from app.sglang.sampling import sampling_body
from app.store.keys import RunKeys
from producers.conveyor import Conveyor
from producers.lost import Lost
from producers.rendering import Parcel

ROOT = Path(__file__).parent.parent
VOCAB = 163_840


def manifest(*urls: str, run_id: str = "run1", max_new_tokens: int = 64, **fields: Any) -> RunManifest:
    """A run on these endpoints."""
    return RunManifest(
        run_id=run_id, recipe="recipe", sampling=sampling_body({"max_new_tokens": max_new_tokens}),
        endpoints=list(urls), vocab_size=VOCAB, output_vocab_size=VOCAB, **fields,
    )  # fmt: skip


def put(client, url: str, run: RunManifest, count: int, *, dataset: str = "d", prompt: int = 20) -> list[str]:
    """Publish the run and put `count` tasks on the belt; returns their keys."""
    client.set(RunKeys(run.run_id).manifest, run.model_dump_json())
    parcels = [_parcel(run, dataset, number, prompt) for number in range(count)]
    Conveyor(client, make_app(url), run.run_id, 1_000_000, lambda: False).put(parcels)
    return [parcel.key for parcel in parcels]


def lost(client, url: str, run_id: str = "run1") -> Lost:
    """What the producer asks for the messages that are to be sent again."""
    return Lost(Conveyor(client, make_app(url), run_id, 1_000_000, lambda: False), client, run_id)


def _parcel(run: RunManifest, dataset: str, number: int, prompt: int) -> Parcel:
    task = Task(
        key=f"{number:032x}", dataset=dataset, row_id=f"{number:024x}", source_id="", row_number=number + 1, turn=0,
        turns=1, completion_index=0, max_new_tokens=run.max_new_tokens,
        prompt_token_ids=[(number * 31 + i) % 1000 for i in range(prompt)],
    )  # fmt: skip
    return Parcel(task.key, task.id, dataset, task.row_number, lane_of(prompt, run.max_new_tokens), pack_task(task))


def published(client, run_id: str = "run1") -> list[dict]:
    """What is in the stream, as records."""
    entries = client.xrange(RunKeys(run_id).responses)
    return [{"kind": f[b"kind"].decode(), **orjson.loads(decompress(f[b"blob"]))} for _, f in entries]


def until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """Wait for a condition that other processes bring about; fails the test when it does not come."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.02)
    return value


#: Our command line in a process whose clock is wrong.
_WRONG_CLOCK = (
    "import runpy, time; true = time.time; time.time = lambda: true() + {:g};"
    " runpy.run_module('app.cli.main', run_name='__main__', alter_sys=True)"
)


@contextmanager
def worker(
    url: str, tmp_path: Path, *arguments: str, name: str = "w1", clock_ahead_seconds: float = 0.0
) -> Iterator[subprocess.Popen]:
    """A real worker process, killed at the end if it still runs."""
    log = (tmp_path / f"{name}.log").open("ab")
    program = ["-c", _WRONG_CLOCK.format(clock_ahead_seconds)] if clock_ahead_seconds else ["-m", "app.cli.main"]
    process = subprocess.Popen(
        [sys.executable, *program, "worker", "--redis", url, "--name", name, *arguments],
        cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "HEADRACE_LOG_LEVEL": "INFO"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        log.close()

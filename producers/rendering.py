"""Rendering: conversations in, packed tasks out; a small input here, a large one on some cores.

A process that renders loads the tokenizer once and keeps it; what comes back is ready for Redis, so that the producer
only ships it. Other processes are started when rendering here has taken longer than they take to start. Rows and
parcels are tuples: they go from process to process in half the time of dataclasses.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

from app.chats import opening, start_of
from app.errors import HeadraceError
from app.identity import task_key
from app.lanes import Lane, lane_of
from app.manifest import RunManifest
from app.packing import pack_task
from app.reasons import Reason, Rejected
from app.records import Conversation, Task
from app.tokenization import Renderer, RenderOptions


class Row(NamedTuple):
    """A row that needs completions: who it is, where it stood, what it says."""

    dataset: str
    row_id: str
    source_id: str
    number: int
    conversation: Conversation | None  #: None: it could not be read
    missing: tuple[int, ...]  #: completion indices to get
    allowances: Mapping[int, int] = {}  #: of single completions (-1: all), where not the run's
    turns: int = 1  #: as many as each of them may have

    def wants(self, index: int, of_the_run: int) -> int:
        """New tokens that a completion is to have."""
        return self.allowances.get(index) or self.allowances.get(-1) or of_the_run


class Parcel(NamedTuple):
    """A task as it goes to Redis."""

    key: str
    task_id: str
    dataset: str
    number: int
    lane: Lane
    blob: bytes


class Refusal(NamedTuple):
    """A row that could not be rendered."""

    row: Row
    reason: Reason
    detail: str


Rendered = list[Parcel | Refusal]
#: A core renders about 9,000 short rows a second, the producer sends 18,000; each process costs 60 MB and a start.
POOL_PROCESSES = min(4, os.cpu_count() or 1)
_ALONE_SECONDS = 1.0  #: as much CPU as a process needs to load a tokenizer


def render(rows: list[Row], renderer: Renderer, run: RunManifest, fit_output: bool) -> Rendered:
    """Tasks of each row, or the one refusal that stands for all of them."""
    prompts = renderer.render_each(opening(row.conversation) if row.turns > 1 else row.conversation for row in rows)
    found: Rendered = []
    for row, ids in zip(rows, prompts, strict=True):
        try:
            if isinstance(ids, Rejected):
                raise ids
            found += _parcels(row, ids, run, fit_output)
        except Rejected as verdict:
            found.append(Refusal(row, verdict.reason, verdict.detail))
    return found


def _parcels(row: Row, ids: list[int], run: RunManifest, fit_output: bool) -> list[Parcel]:
    """Raises Rejected if one of them fits nowhere."""
    wanted = [row.wants(index, run.max_new_tokens) for index in row.missing]
    allowances = [allowance_of(len(ids), run, tokens, fit_output) for tokens in wanted]
    parcels = []
    for index, tokens, allowance in zip(row.missing, wanted, allowances, strict=True):
        task = Task(
            key=task_key(run.recipe, row.dataset, row.row_id, 0, index), dataset=row.dataset, row_id=row.row_id,
            source_id=row.source_id, row_number=row.number, turn=0, turns=row.turns, completion_index=index,
            max_new_tokens=allowance, prompt_token_ids=ids,
            chat=start_of(row.conversation, tokens) if row.turns > 1 else b"",
        )  # fmt: skip
        parcels.append(parcel_of(task))
    return parcels


def parcel_of(task: Task, blob: bytes | None = None) -> Parcel:
    """A task, ready to be sent. blob: the same, packed, where it is at hand."""
    lane = lane_of(len(task.prompt_token_ids), task.max_new_tokens)
    return Parcel(task.key, task.id, task.dataset, task.row_number, lane, blob or pack_task(task))


def allowance_of(num_prompt_tokens: int, run: RunManifest, wanted: int, fit_output: bool) -> int:
    """New tokens that a prompt may ask for. Raises Rejected(TOO_LONG) if no endpoint has room for it."""
    if run.endpoints_for(num_prompt_tokens, wanted):
        return wanted
    room = run.output_room(num_prompt_tokens) or 0
    if fit_output and room >= 1:
        return room
    remedy = "" if room < 1 else f" (--fit-output would allow {room} new tokens)"
    raise Rejected(
        Reason.TOO_LONG,
        f"{num_prompt_tokens} prompt tokens + {wanted} new are more than any endpoint takes (context, KV pool){remedy}",
    )


class RenderPool:
    """Renders chunks of rows in order, with a bounded number under way: here at first, then in other processes."""

    def __init__(self, options: RenderOptions, run: RunManifest, fit_output: bool):
        self._options, self._run, self._fit_output = options, run, fit_output
        self._seconds_here = 0.0
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[int]] = []
        self._under_way: deque[Future[Rendered]] = deque()

    @property
    def full(self) -> bool:
        """Whether taking a result should come before submitting more."""
        return len(self._under_way) >= 3 * POOL_PROCESSES

    def submit(self, rows: list[Row]) -> None:
        """Give a chunk."""
        if rows:
            self._under_way.append(self.apply(render, rows))

    def results(self, *, wait: bool) -> Iterator[Rendered]:
        """Chunks that are done, in order; with `wait`, all that were given."""
        while self._under_way and (wait or self._under_way[0].done() or self.full):
            yield result_of(self._under_way.popleft())

    def apply(self, work: Callable[..., Any], items: list[Any]) -> Future[Any]:
        """Have `work(items, renderer, run, fit_output)` done, by one of the processes or before this returns."""
        if self._pool is None and POOL_PROCESSES > 1 and self._seconds_here > _ALONE_SECONDS:
            self._start()
        if self._pool is not None and all(one.done() for one in self._starting):
            return self._pool.submit(_in_child, work, items)
        renderer, future, begun = self._renderer, Future(), time.monotonic()
        try:
            future.set_result(work(items, renderer, self._run, self._fit_output))
        except Exception as exc:  # noqa: BLE001 - whoever takes the result gets it, as from a process
            future.set_exception(exc)
        self._seconds_here += time.monotonic() - begun
        return future

    def close(self) -> None:
        """End the processes, each behind its chunk; left to end by themselves they race with the end of Python."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._options)

    def _start(self) -> None:
        """They load the tokenizer while rendering goes on here."""
        self._pool = ProcessPoolExecutor(
            POOL_PROCESSES, get_context("spawn"), initializer=_start_child,
            initargs=(self._options, self._run, self._fit_output),
        )  # fmt: skip
        self._starting = [self._pool.submit(os.getpid) for _ in range(POOL_PROCESSES)]


def result_of(future: Future[Any]) -> Any:
    """What a process of the pool made. Raises HeadraceError if there is no pool any more."""
    try:
        return future.result()
    except BrokenProcessPool as exc:
        raise HeadraceError(
            "A rendering process was ended from outside (out of memory, perhaps); start the run again."
        ) from exc


_child: tuple[Renderer, RunManifest, bool] | None = None


def _start_child(options: RenderOptions, run: RunManifest, fit_output: bool) -> None:
    global _child
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _child = (Renderer(options), run, fit_output)


def _end_with_parent() -> None:
    """A producer that is killed says nothing, and the pipe on which we wait for work stays open: all hold both ends."""
    parent_process().join()
    os._exit(1)


def _in_child(work: Callable[..., Any], items: list[Any]) -> Any:
    return work(items, *_child)

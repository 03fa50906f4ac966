"""What comes after each turn of a chat: the next prompt, made of what the model said, or the end.

A worker that made a turn leaves the chat in Redis (turned.lua) and knows no more of it; here it is taken up, rendered
by the same processes as any prompt, and sent as the next message, in the lane of its new length. So whoever generates
needs no tokenizer, and what was generated is safe before the next prompt is thought of. A chat that is over goes to
the collector as a whole.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson

from app.chats import Replay, Said, all_said, history_of, parts_of, replay
from app.crash import crash_point
from app.identity import task_key
from app.ledger import Ledger
from app.manifest import RunManifest
from app.reasons import STAGE_OF, Rejected
from app.records import Conversation, RejectedRecord, ResponseRecord, Task, completion_id, line_of
from app.tokenization import Renderer
from producers.conveyor import Conveyor
from producers.rendering import Parcel, RenderPool, allowance_of, parcel_of, result_of

_CHUNK_CHATS = 16
_MOST_CHATS = 1024  #: being rendered at once


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a turn: a parcel, or lines for the collector. slot: (dataset, row id, completion index)."""

    slot: tuple[str, str, int]
    key: str
    parcel: Parcel | None
    kind: str = ""
    lines: bytes = b""


class Turns:
    """The producer's hand in chats: whatever waits for its next prompt gets it, or goes to the collector."""

    def __init__(self, conveyor: Conveyor, pool: RenderPool, ledger: Ledger):
        self._conveyor, self._pool, self._ledger = conveyor, pool, ledger
        self._under_way: list[tuple[list[bytes], Future[list[Next]]]] = []

    def go_on(self, datasets: Sequence[str]) -> None:
        """Send what is ready, take up what waits. Never waits itself. Raises Stopped while Redis is away."""
        done = [one for one in self._under_way if one[1].done()]
        self._under_way = [one for one in self._under_way if one not in done]
        for _, future in done:
            self._send(result_of(future))
        rendering = {key for keys, _ in self._under_way for key in keys}
        for dataset in datasets:
            waiting = [key for key in self._conveyor.turned(dataset) if key not in rendering]
            room = max(0, _MOST_CHATS - len(rendering))
            for start in range(0, min(room, len(waiting)), _CHUNK_CHATS):
                keys = waiting[start : start + _CHUNK_CHATS]
                rendering.update(keys)
                tasks = self._conveyor.take_turned(dataset, keys)
                self._under_way.append((keys, self._pool.apply(next_of_all, tasks)))

    def _send(self, found: list[Next]) -> None:
        """A chat that the files have already (Redis forgot, and was told again) is dropped."""
        crash_point("turn_rendered")
        known = set(self._ledger.known([one.slot for one in found]))
        for one in found:
            if one.slot in known:
                self._conveyor.forget(one.slot[0], one.key)
            elif one.parcel is None:
                self._conveyor.end(one.slot[0], one.key, one.kind, one.lines)
        self._conveyor.advance([one.parcel for one in found if one.parcel is not None])


def next_of_all(tasks: list[Task], renderer: Renderer, run: RunManifest, fit_output: bool) -> list[Next]:
    """`next_of` each."""
    return [next_of(task, renderer, run, fit_output) for task in tasks]


def next_of(task: Task, renderer: Renderer, run: RunManifest, fit_output: bool) -> Next:
    """What follows the last turn that was made of a chat."""
    slot = (task.dataset, task.row_id, task.completion_index)
    given, max_new_tokens, made = parts_of(task.chat)
    said = all_said(made, renderer.decode)
    so_far = replay(given.messages, [one.message for one in said])
    if so_far.ended == "" and made[-1].finish_reason == "length":
        so_far = replace(so_far, ended="length")  # half an answer is no history
    if so_far.ended:
        lines = _whole(made, said, so_far, task.turns, renderer)
        return Next(slot, task.key, None, "response", b"".join(map(line_of, lines)))
    try:
        ids = renderer.render(Conversation(so_far.messages, given.tools))
        allowance = allowance_of(len(ids), run, max_new_tokens, fit_output)
    except Rejected as verdict:
        return Next(slot, task.key, None, "rejected", line_of(_rejection(task, made, run, verdict)))
    return Next(
        slot, task.key, parcel_of(replace(task, turn=len(made), max_new_tokens=allowance, prompt_token_ids=ids))
    )


def _whole(
    made: list[ResponseRecord], said: list[Said], chat: Replay, turns: int, renderer: Renderer
) -> list[ResponseRecord]:
    """The raw lines of a chat that is over; what there is to know of a turn stands in its meta_info as `chat`."""
    lines = []
    for turn, (record, one) in enumerate(zip(made, said, strict=True)):
        notes: dict[str, Any] = {}
        if turn:
            notes |= history_of(made[turn - 1], record.prompt_token_ids, renderer.decode)
        if one.malformed:
            notes["malformed_calls"] = True
        if turn == len(made) - 1:
            notes |= {"ended": chat.ended, "turns_given": turns, "results_passed_over": chat.passed_over}
        meta_info = orjson.dumps({**orjson.loads(record.meta_info), "chat": notes}).decode()
        lines.append(replace(record, turns=len(made), meta_info=meta_info))
    return lines


def _rejection(task: Task, made: list[ResponseRecord], run: RunManifest, verdict: Rejected) -> RejectedRecord:
    turn = len(made)
    place = (task.dataset, task.row_id, turn, task.completion_index)
    return RejectedRecord(
        key=task_key(run.recipe, *place), id=completion_id(*place), primary_id=f"{task.dataset}:{task.row_id}",
        dataset=task.dataset, row_id=task.row_id, source_id=task.source_id, row_number=task.row_number,
        stage=STAGE_OF[verdict.reason], reason=verdict.reason,
        detail=f"turn {turn + 1} of {task.turns}: {verdict.detail}", attempts=sum(record.attempt for record in made),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip

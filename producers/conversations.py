"""Answers beside the messages that they answer: chats again, for trainers that render them themselves.

The messages are read from the input anew and found by row id, never decoded out of a prompt: what a template dropped or
rewrote (earlier reasoning, a date) is there as it was given. An answer whose row the input no longer has is left out,
and counted. Order: the input's, then completion.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from app.chats import all_said, replay
from app.jsonl import iterate
from app.ledger import Ledger
from app.ledger.files import fact_of
from app.ledger.schema import pack_row_id
from app.offline.scratch import Scratch
from app.reasons import Rejected
from app.records import ResponseRecord
from app.rundir import RAW, TOKENIZED, RunDir
from app.settings import RunSettings
from app.tokenization import Renderer
from app.verify_lines import whole
from producers.catalog import InputRow, rows_of
from producers.inputs import Dataset

_SCHEMA = """
CREATE TABLE answer(row BLOB, idx INTEGER, turn INTEGER, turns INTEGER, start INTEGER, kept INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(row, idx, turn)) WITHOUT ROWID;
"""
_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def conversations(
    rundir: RunDir, datasets: list[Dataset], settings: RunSettings, ledger: Ledger, renderer: Renderer
) -> Iterator[dict[str, Any] | None]:
    """The chats of every completion that has its sample(s), as lines of conversations.jsonl; None for each completion
    that is left out because its row is gone or a raw line damaged. ledger: a scratch one, that gives the rows their
    ids."""
    for dataset in datasets:
        with Scratch(_SCHEMA) as scratch:
            yield from [None] * _index(rundir, dataset.name, scratch)
            path = rundir.file(dataset.name, RAW)
            if not path.exists():
                continue
            with path.open("rb") as file:
                for row in rows_of([dataset], settings, ledger):
                    for index, group in _groups(row, scratch, file):
                        yield _line(row, index, group, renderer)
            query = "SELECT count(DISTINCT hex(row) || idx) FROM answer WHERE kept"
            yield from [None] * scratch.one(query)[0]


def _index(rundir: RunDir, dataset: str, scratch: Scratch) -> int:
    """Where the answers stand; returns how many raw lines cannot be read."""
    unreadable = 0
    for name in (RAW, TOKENIZED):
        for line in iterate(rundir.file(dataset, name)):
            fact = fact_of(dataset, name, line.raw, line.offset)
            if fact is None:
                unreadable += name == RAW
                continue
            place = (fact.row_id, fact.completion_index, fact.turn)
            if name == RAW:
                statement = "INSERT OR IGNORE INTO answer(row, idx, turn, turns, start) VALUES(?, ?, ?, ?, ?)"
                scratch.run(statement, (*place, fact.turns, line.offset))
            else:
                scratch.run("UPDATE answer SET kept = 1 WHERE row = ? AND idx = ? AND turn = ?", place)
    return unreadable


def _groups(row: InputRow, scratch: Scratch, file: Any) -> Iterator[tuple[int, list[ResponseRecord]]]:
    """(completion index, its raw records by turn) of completions that have all their samples; each is taken once. None
    of the records where one is damaged."""
    key = pack_row_id(row.row_id)
    query = (
        "SELECT idx, turns FROM answer WHERE row = ? AND kept GROUP BY idx HAVING count(*) = max(turns) ORDER BY idx"
    )
    for index, turns in list(scratch.all(query, (key,))):
        places = scratch.all("SELECT start FROM answer WHERE row = ? AND idx = ? ORDER BY turn", (key, index))
        group = []
        for (start,) in list(places):
            file.seek(start)
            with suppress(ValueError):
                group.append(ResponseRecord(**whole(RAW, file.readline())))
        yield index, group if len(group) == turns else []
    scratch.run("DELETE FROM answer WHERE row = ?", (key,))


def _line(row: InputRow, index: int, group: list[ResponseRecord], renderer: Renderer) -> dict[str, Any] | None:
    if isinstance(row.result, Rejected) or not group:  # it was readable once
        return None
    primary_id = f"{row.dataset}:{row.row_id}"
    messages = _with_answers(row, group, renderer)
    return {
        "id": f"{primary_id}:{index}", "primary_id": primary_id, "dataset": row.dataset,
        "conversations": [_message(one) for one in messages], "tools": _json(row.result.tools or []),
    }  # fmt: skip


def _with_answers(row: InputRow, group: list[ResponseRecord], renderer: Renderer) -> list[dict[str, Any]]:
    """The messages with one answer at the end (or in place of the beginning that it continues), or, of a row that gets
    all its turns, the chat as it went: tool results answer the calls that the model made."""
    answers = [one.message for one in all_said(group, renderer.decode)]
    messages = row.result.messages
    if row.turns > 1:
        return replay(messages, answers).messages
    if messages[-1]["role"] != "assistant":
        return [*messages, answers[0]]
    return [*messages[:-1], answers[0] | {"content": messages[-1]["content"] + answers[0]["content"]}]


def _message(message: dict[str, Any]) -> dict[str, str]:
    """Every message has the same fields, all of them text ("" for nothing): a list of calls that is empty in the first
    ten megabytes of a file would keep Arrow from loading the rest."""
    calls = message.get("tool_calls")
    return {name: message.get(name) or "" for name in _FIELDS} | {"tool_calls": _json(calls) if calls else ""}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()

"""Answers beside the messages that they answer: chats again, for trainers that render them themselves.

The messages are read from the input anew and found by row id, never decoded out of a prompt: what a template dropped or
rewrote (earlier reasoning, a date) is there as it was given. An answer whose row the input no longer has is left out,
and counted. Order: the input's, then completion.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from app.jsonl import iterate, parse
from app.ledger import Ledger
from app.ledger.files import fact_of
from app.ledger.schema import pack_row_id
from app.offline.answers import answer_of, ends_in_reasoning
from app.offline.scratch import Scratch
from app.reasons import Rejected
from app.records import Conversation
from app.rundir import RAW, TOKENIZED, RunDir
from app.settings import RunSettings
from app.tokenization import Renderer
from producers.catalog import InputRow, rows_of
from producers.inputs import Dataset

_SCHEMA = """
CREATE TABLE answer(row BLOB, idx INTEGER, turn INTEGER, turns INTEGER, start INTEGER, kept INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(row, idx, turn)) WITHOUT ROWID;
"""
_PROMPT_END_IDS = 8
_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def conversations(
    rundir: RunDir, datasets: list[Dataset], settings: RunSettings, ledger: Ledger, renderer: Renderer
) -> Iterator[dict[str, Any] | None]:
    """The chats of every completion that has its sample(s), as lines of conversations.jsonl; None for each completion
    that is left out because its row is gone. ledger: a scratch one, that gives the rows their ids."""
    for dataset in datasets:
        with Scratch(_SCHEMA) as scratch:
            _index(rundir, dataset.name, scratch)
            path = rundir.file(dataset.name, RAW)
            if not path.exists():
                continue
            with path.open("rb") as file:
                for row in rows_of([dataset], settings, ledger):
                    for index, group in _groups(row, scratch, file):
                        yield _line(row, index, group, renderer)
            query = "SELECT count(DISTINCT hex(row) || idx) FROM answer WHERE kept"
            yield from [None] * scratch.one(query)[0]


def _index(rundir: RunDir, dataset: str, scratch: Scratch) -> None:
    for name in (RAW, TOKENIZED):
        for line in iterate(rundir.file(dataset, name)):
            fact = fact_of(dataset, name, line.raw, line.offset)
            if fact is None:
                continue
            place = (fact.row_id, fact.completion_index, fact.turn)
            if name == RAW:
                statement = "INSERT OR IGNORE INTO answer(row, idx, turn, turns, start) VALUES(?, ?, ?, ?, ?)"
                scratch.run(statement, (*place, fact.turns, line.offset))
            else:
                scratch.run("UPDATE answer SET kept = 1 WHERE row = ? AND idx = ? AND turn = ?", place)


def _groups(row: InputRow, scratch: Scratch, file: Any) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(completion index, its raw records by turn) of completions that have all their samples; each is taken once."""
    key = pack_row_id(row.row_id)
    query = (
        "SELECT idx, turns FROM answer WHERE row = ? AND kept GROUP BY idx HAVING count(*) = max(turns) ORDER BY idx"
    )
    for index, _ in list(scratch.all(query, (key,))):
        places = scratch.all("SELECT start FROM answer WHERE row = ? AND idx = ? ORDER BY turn", (key, index))
        group = []
        for (start,) in list(places):
            file.seek(start)
            group.append(parse(file.readline()))
        yield index, group
    scratch.run("DELETE FROM answer WHERE row = ?", (key,))


def _line(row: InputRow, index: int, group: list[dict[str, Any]], renderer: Renderer) -> dict[str, Any] | None:
    if isinstance(row.result, Rejected):  # it was readable once
        return None
    primary_id = f"{row.dataset}:{row.row_id}"
    messages = _with_answers(row.result, [_answer(record, renderer) for record in group])
    return {
        "id": f"{primary_id}:{index}", "primary_id": primary_id, "dataset": row.dataset,
        "conversations": [_message(one) for one in messages], "tools": _json(row.result.tools or []),
    }  # fmt: skip


def _answer(record: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    ids = record["output_ids"]
    if record["finish_reason"] == "stop" and record["matched"] == str(ids[-1]):
        ids = ids[:-1]
    opened = ends_in_reasoning(renderer.decode(record["prompt_token_ids"][-_PROMPT_END_IDS:]))
    said = answer_of(renderer.decode(ids), opened=opened)
    message = {"role": "assistant", "content": said.content, "reasoning_content": said.reasoning}
    return message | ({"tool_calls": said.tool_calls} if said.tool_calls else {})


def _with_answers(conversation: Conversation, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one answer at the end (or in place of the beginning that it continues), or, with several, one
    after each message of the user."""
    messages = conversation.messages
    if len(answers) == 1:
        if messages[-1]["role"] != "assistant":
            return [*messages, answers[0]]
        return [*messages[:-1], answers[0] | {"content": messages[-1]["content"] + answers[0]["content"]}]
    waiting, made = iter(answers), []
    for message in messages:
        made.append(message)
        if message["role"] == "user":
            made += [answer for answer in (next(waiting, None),) if answer is not None]
    return made


def _message(message: dict[str, Any]) -> dict[str, str]:
    """Every message has the same fields, all of them text ("" for nothing): a list of calls that is empty in the first
    ten megabytes of a file would keep Arrow from loading the rest."""
    calls = message.get("tool_calls")
    return {name: message.get(name) or "" for name in _FIELDS} | {"tool_calls": _json(calls) if calls else ""}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()

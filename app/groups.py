"""The lines of a completion of several turns: written in one go, one after the other, in the order of their turns.

Invariant: a group is in a file as a whole or not at all. A crash can leave half of one at the end of a file, which goes
with the torn line before anything is appended (`end_of_groups`); what somebody took out of the middle is found by the
ledger (`Ledger.torn`), and its remains give way to a group made anew.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from app.errors import StorageError
from app.jsonl import line_before, parse, read_at
from app.records import ResponseRecord


def groups_of(records: Iterable[ResponseRecord]) -> Iterator[list[ResponseRecord]]:
    """Records in the order of a file, by completion. Of a group that is not whole, nothing."""
    group: list[ResponseRecord] = []
    for record in records:
        if record.turn != len(group) or (group and _slot(record) != _slot(group[0])):
            group = []
        if record.turn == len(group):
            group.append(record)
        if len(group) == record.turns:
            yield group
            group = []


def group_at(path: Path, offset: int) -> list[ResponseRecord]:
    """The raw lines of the completion whose first one starts at `offset`. Raises StorageError if they are not there."""
    group: list[ResponseRecord] = []
    while not group or len(group) < group[0].turns:
        raw = read_at(path, offset)
        record = ResponseRecord(**parse(raw))
        if record.turn != len(group) or (group and _slot(record) != _slot(group[0])):
            raise StorageError(f"{path}: turns of {record.primary_id} stand apart; the file was changed from outside")
        group.append(record)
        offset += len(raw) + 1
    return group


def end_of_groups(path: Path, end: int) -> int:
    """Where the last whole group ends in the first `end` bytes of a file of raw lines or samples, which are whole."""
    expected, slot = -1, None
    while end and (line := line_before(path, end)):
        record = parse(line.raw)
        turn, turns = record["turn"], _turns(record)
        if expected < 0:
            if turn + 1 >= turns:
                return end
            expected, slot = turn, slot_of_id(record["id"])
        if turn != expected or slot_of_id(record["id"]) != slot:
            return end
        end, expected = line.offset, expected - 1
        if expected < 0:
            return end
    return end


def _turns(record: dict[str, Any]) -> int:
    return record["turns"] if "turns" in record else orjson.loads(record["metadata"]).get("turns", 1)


def _slot(record: ResponseRecord) -> tuple[str, int]:
    return record.primary_id, record.completion_index


def slot_of_id(line_id: str) -> str:
    """Row and completion, from the id of any of its lines."""
    head, _, index = line_id.rpartition(":")
    return f"{head.rpartition(':')[0]}:{index}"

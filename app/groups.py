"""The lines of a completion of several turns: written in one go, one after the other, in the order of their turns.

Invariant: a group is in a file as a whole or not at all; what is one is judged here and nowhere else (`Groups`). A
crash can leave half of one at the end of a file, which goes with the torn line before anything is appended
(`end_of_groups`). What somebody took out of the middle, or put elsewhere, is known to the ledger (`Ledger.torn`), and
mended by whoever starts next (app/offline/torn.py).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from app.errors import StorageError
from app.jsonl import iterate, line_before, parse
from app.records import ResponseRecord
from app.rundir import RAW
from app.verify_lines import whole

T = TypeVar("T")


class Place(NamedTuple):
    """What a line says of itself: its completion, which turn it is (from 0), and of how many."""

    completion: Hashable
    turn: int
    turns: int


class Order(Enum):
    """What some neighbouring lines of one completion are."""

    WHOLE = "whole"  #: all its turns, in their order
    BROKEN = "broken"  #: turns are missing before, between or after them
    OPEN = "open"  #: the beginning, at the end of what was read


Group = tuple[list[T], Order]


class Groups(Generic[T]):
    """Lines by completion, fed one by one in the order of their file."""

    def __init__(self) -> None:
        self._lines: list[T] = []
        self._first = Place(None, 0, 0)

    def add(self, line: T, place: Place | None) -> Iterator[Group[T]]:
        """What is decided by this line, in order. place None: it cannot be read; it belongs to nothing."""
        follows = place is not None and place == self._first._replace(turn=len(self._lines))
        if self._lines and not follows:
            yield self._lines, Order.BROKEN
            self._lines = []
        if place is None:
            return
        if place.turn != len(self._lines):
            yield [line], Order.BROKEN
            return
        self._first = place if not self._lines else self._first
        self._lines.append(line)
        if place.turn + 1 == place.turns:
            yield self._lines, Order.WHOLE
            self._lines = []

    def end(self) -> Iterator[Group[T]]:
        """What is left when no line follows."""
        if self._lines:
            yield self._lines, Order.OPEN


def grouped(lines: Iterable[T], place_of: Callable[[T], Place | None]) -> Iterator[Group[T]]:
    """All lines of a file by completion."""
    groups = Groups[T]()
    for line in lines:
        yield from groups.add(line, place_of(line))
    yield from groups.end()


def place_of(record: ResponseRecord | None) -> Place | None:
    """Of a raw line; None of one that could not be read."""
    return record and Place((record.primary_id, record.completion_index), record.turn, record.turns)


def group_at(path: Path, offset: int) -> list[ResponseRecord]:
    """The raw lines of the completion whose first one starts at `offset`. Raises StorageError if they are not there."""
    readable = takewhile(lambda record: record is not None, (_record(line.raw) for line in iterate(path, offset)))
    for records, order in grouped(readable, place_of):
        if order is Order.WHOLE:
            return records
        break
    raise StorageError(f"{path}: no whole answer at byte {offset:,}; the file was changed from outside")


def end_of_groups(path: Path, end: int) -> int:
    """Where the last whole group ends in the first `end` bytes of a file of raw lines or samples, which are whole."""
    expected, slot = -1, None
    while end and (line := line_before(path, end)):
        place = _place_of_line(line.raw)
        if place is None:
            return end
        if expected < 0:
            if place.turn + 1 >= place.turns:
                return end
            expected, slot = place.turn, place.completion
        if (place.completion, place.turn) != (slot, expected):
            return end
        end, expected = line.offset, expected - 1
        if expected < 0:
            return end
    return end


def _place_of_line(raw: bytes) -> Place | None:
    """Of a whole line; None if it is none of ours."""
    try:
        record = parse(raw)
        return Place(slot_of_id(record["id"]), int(record["turn"]), int(turns_of(record)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def turns_of(record: dict[str, Any]) -> int:
    """How many turns the completion of a raw line or sample has."""
    if "turns" in record:
        return record["turns"]
    said = orjson.loads(record["metadata"])
    found = said.get("turns") if isinstance(said, dict) else None
    return found if isinstance(found, int) else 1


def slot_of_id(line_id: str) -> str:
    """Row and completion, from the id of any of its lines."""
    head, _, index = line_id.rpartition(":")
    return f"{head.rpartition(':')[0]}:{index}"


def _record(raw: bytes) -> ResponseRecord | None:
    try:
        return ResponseRecord(**whole(RAW, raw))
    except ValueError:
        return None

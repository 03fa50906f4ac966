"""JSON that does not keep to lines: a whole-file array, or pretty-printed objects one after the other.

Invariant: memory is one record, whatever the size of the file. Only brackets and strings are followed here; whether a
record is valid JSON is decided when it has been cut out, so that a bad one costs itself and not its neighbours.
"""

import re
from collections.abc import Iterator

from app.reasons import Reason
from producers.readers.rows import Damaged, Held, RawRow, json_row, rejected_row, too_large_row
from producers.readers.source import Source

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+", re.DOTALL)
_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^"{}\[\],]++|' + _STRING + rb")*+", re.DOTALL)
_TO_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING = b"{["


def array_rows(source: Source, max_bytes: int) -> Iterator[RawRow]:
    """Rows of a file that is one JSON array. What stands behind a trailing comma is nothing."""
    cutter = _Cutter(source, max_bytes, array=True)
    for number, raw, too_large in cutter.records():
        if raw or not cutter.closed:
            yield _row(number, raw, too_large, source, max_bytes)


def object_rows(source: Source, max_bytes: int) -> Iterator[RawRow]:
    """Rows of a file of objects that span lines."""
    for number, raw, too_large in _Cutter(source, max_bytes, array=False).records():
        yield _row(number, raw, too_large, source, max_bytes)


def _row(number: int, raw: bytes, too_large: bool, source: Source, max_bytes: int) -> RawRow:
    if too_large:
        return too_large_row(number, raw, source.name, f"record {number}", max_bytes)
    if not raw:
        return rejected_row(Reason.UNREADABLE, number, raw, source.name, f"record {number}", "nothing before the comma")
    return json_row(number, raw, source.name, "record")


class _Cutter:
    """Cuts records out of the chunks. Its state is all that has to survive from one chunk to the next."""

    def __init__(self, source: Source, max_bytes: int, *, array: bool):
        self.closed = False  #: the bracket of the array has been closed
        self._source = source
        self._array = array
        self._held = Held(max_bytes)
        self._number = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False  #: the last chunk ended between a backslash and what it escapes

    def records(self) -> Iterator[tuple[int, bytes, bool]]:
        """(number from 1, bytes, whether it was too large). Raises Damaged where the file cannot be followed."""
        for chunk in self._chunks():
            start = 0
            for end, resume in self._cuts(chunk):
                self._held.add(chunk[start:end])
                start = resume
                yield self._take()
            self._held.add(chunk[start:])
        self._finish()

    def _chunks(self) -> Iterator[bytes]:
        chunks = iter(self._source)
        if self._array:
            yield next(chunks).lstrip()[1:]  # without the opening bracket, so that elements stand at depth 0
        yield from chunks

    def _take(self) -> tuple[int, bytes, bool]:
        raw, too_large = self._held.take()
        self._number += 1
        return self._number, raw.strip(), too_large

    def _cuts(self, chunk: bytes) -> Iterator[tuple[int, int]]:
        """Where a record ends in this chunk, and where what follows begins."""
        pos = 0
        while pos < len(chunk) and not self.closed:
            if self._in_string:
                pos = self._leave_string(chunk, pos)
                continue
            to_next = _TO_BRACKET_OR_COMMA if self._array and self._depth == 0 else _TO_BRACKET
            pos = to_next.match(chunk, pos).end()
            if pos == len(chunk):
                return
            sign = chunk[pos]
            pos += 1
            if sign == _QUOTE:  # a whole string would have been skipped: this one goes on in the next chunk
                self._in_string = True
            elif sign == _COMMA or self._is_end(sign):
                yield (pos - 1 if self._array else pos), pos

    def _is_end(self, bracket: int) -> bool:
        """Whether this bracket ends a record: the array's own, or the last one of an object."""
        self._depth += 1 if bracket in _OPENING else -1
        if self._array:
            self.closed = self._depth < 0
            return self.closed
        self._depth = max(self._depth, 0)  # a stray closing bracket is a bad record, not a new level
        return self._depth == 0

    def _leave_string(self, chunk: bytes, pos: int) -> int:
        pos = _TO_STRING_END.match(chunk, pos + self._escaped).end()
        self._in_string = chunk[pos : pos + 1] != b'"'
        self._escaped = chunk[pos : pos + 1] == b"\\"
        return pos + 1

    def _finish(self) -> None:
        rest = self._held.take()[0].strip()
        number = self._number + 1
        self._source.refuse_damage(number, rest, "record")
        if self._array and not self.closed:
            raise Damaged(number, rest, "the array ends in the middle: cut off, or a bracket or quote is not closed")
        if rest:
            what = "there is text after the end of the array" if self._array else "a bracket or quote is not closed"
            raise Damaged(number, rest, what)

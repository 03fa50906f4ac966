"""CSV: a row is a record below the header, its value a dict of texts.

Invariant: a stray quote costs the row it stands in. What is between it and the end of the file is read as rows again.
"""

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.reasons import Reason
from producers.readers.formats import csv_header
from producers.readers.lines import split_lines
from producers.readers.rows import Damaged, Held, RawRow, rejected_row, too_large_row
from producers.readers.source import Source


def csv_rows(source: Source, max_bytes: int) -> Iterator[RawRow]:
    """Rows of a CSV file; number is the line where the record begins."""
    delimiter, above, names = csv_header(source)
    names = [name.strip() for name in names]
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes))  # per process; the module's own is 128 KiB
    for index, record in enumerate(_records(_Feed(split_lines(source, max_bytes), max_bytes), delimiter)):
        if index > above and (record.cells or record.fault or record.too_large):
            yield _row(record, names, source.name, max_bytes)


@dataclass(frozen=True, slots=True)
class _Record:
    """The lines of one record, with its cells or with what is wrong with it."""

    number: int
    raw: bytes
    cells: list[str] = field(default_factory=list)
    fault: str = ""
    too_large: bool = False


class _TooLarge(Exception):
    """Leaves the csv.reader."""


def _row(record: _Record, names: list[str], file: str, max_bytes: int) -> RawRow:
    place = f"line {record.number}"
    if record.too_large:
        return too_large_row(record.number, record.raw, file, place, max_bytes)
    if what := record.fault or _fault(record, len(names)):
        return rejected_row(Reason.UNREADABLE, record.number, record.raw, file, place, what)
    return RawRow(record.number, dict(zip(names, record.cells, strict=False)), record.raw)


def _fault(record: _Record, width: int) -> str:
    if any(record.cells[width:]):
        return f"has {len(record.cells)} cells under {width} names"
    if b"\0" in record.raw:
        return "holds NUL bytes (a torn write)"
    try:
        record.raw.decode()
    except UnicodeDecodeError as exc:
        return f"byte {exc.start + 1} is not UTF-8"
    return ""


def _records(feed: "_Feed", delimiter: str) -> Iterator[_Record]:
    """All records, the header, what is above it and blank ones (without cells) included."""
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        feed.start_record()
        try:
            cells = next(reader, None)
        except _TooLarge:
            yield feed.skip_record()
        except csv.Error as exc:
            fault = f"is no CSV: {exc}" if len(feed.taken) == 1 and not feed.ended else "a quote is not closed in it"
            feed.give_back_all_but_first()
            yield _Record(*feed.record(), fault=fault)
        else:
            if cells is None:
                return
            yield _Record(*feed.record(), cells if any(cells) else [])
            continue
        reader = csv.reader(feed, delimiter=delimiter, strict=True)  # the old one holds half a record


class _Feed:
    """Hands lines to a csv.reader and remembers which ones the record at hand took."""

    def __init__(self, lines: Iterator[tuple[int, bytes, bool]], max_bytes: int):
        self.taken: list[tuple[int, bytes]] = []
        self.ended = False
        self._lines = lines
        self._again: deque[tuple[int, bytes, bool]] = deque()
        self._max_bytes = max_bytes
        self._size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        entry = self._next_line()
        if entry is None:
            self.ended = True
            raise StopIteration
        number, line, too_large = entry
        self.taken.append((number, line))
        self._size += len(line)
        if too_large or self._size > self._max_bytes:
            raise _TooLarge
        return line.removesuffix(b"\r").decode(errors="replace") + "\n"

    def _next_line(self) -> tuple[int, bytes, bool] | None:
        try:
            return self._again.popleft() if self._again else next(self._lines, None)
        except Damaged as exc:
            if not self.taken:
                raise
            number, raw = self.record()
            raise Damaged(number, raw + b"\n" + exc.raw, exc.what, "line") from exc

    def start_record(self) -> None:
        """What was taken so far is done with."""
        self.taken = []
        self._size = 0

    def record(self) -> tuple[int, bytes]:
        """Number of the first line of the record at hand, and its bytes."""
        return self.taken[0][0], b"\n".join(line for _, line in self.taken).removesuffix(b"\r")

    def give_back_all_but_first(self) -> None:
        """The lines behind an open quote are to be read again as records of their own."""
        self._again.extendleft((number, line, False) for number, line in reversed(self.taken[1:]))
        del self.taken[1:]
        self.ended = False

    def skip_record(self) -> _Record:
        """The record at hand, which is too large, up to the line that closes its quote."""
        number, raw = self.record()
        held = Held(self._max_bytes)
        held.add(raw)
        is_open = raw.count(b'"') % 2
        while is_open and (entry := self._next_line()) is not None:
            held.add(b"\n" + entry[1])
            is_open ^= entry[1].count(b'"') % 2
        return _Record(number, held.take()[0], too_large=True)

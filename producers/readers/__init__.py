"""From a file to its rows: the only place that knows file formats.

Invariant: every record of a file comes out exactly once, in order, with its number; one that cannot be read comes out
too, with the reason. Nothing is skipped but blank lines (which are counted) and what stands above a CSV header.

The format is told by the bytes, never by the name (only a CSV with an unusual header needs `.csv` or `.tsv`):

    gzip, zstd         any of the text formats below, compressed; several members or frames are one file
    Parquet            a row is a record; a field that is null in a row is not in that row
    JSON array         an element is a row; read element by element
    JSON Lines         a line is a row, also under a `.json` name
    JSON objects       pretty-printed, one after the other: each is a row
    CSV                `,` `;` or tab; the header may stand below other lines; a cell may hold newlines
    plain text         a line is a prompt; there are no comments, so a line that begins with `#` is a prompt too

Lines end at `\\n` alone (a `\\r` before it is dropped): U+2028, U+0085 and their like are text. Numbers are physical
lines from 1, blank ones counted (JSON Lines, text; CSV: where the row begins), or record numbers from 1 (the others).

A file whose end is damaged gives the rows before the damage and then one rejected row that says what is missing.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from app.errors import UsageError
from app.reasons import Reason
from producers.readers.formats import Format, sniff
from producers.readers.json_records import array_rows, object_rows
from producers.readers.lines import json_line_rows, rows_at, text_rows
from producers.readers.parquet import MAGIC as PARQUET_MAGIC
from producers.readers.parquet import parquet_rows, row_count
from producers.readers.rows import Damaged, RawRow, rejected_row
from producers.readers.source import Source, inflated_bytes
from producers.readers.tables import csv_rows

__all__ = ["DEFAULT_MAX_ROW_BYTES", "RawRow", "expected_rows", "is_plain_lines", "read_lines_at",
           "read_lines_behind", "read_records"]  # fmt: skip

DEFAULT_MAX_ROW_BYTES = 64 * 1024 * 1024

_SAMPLE_BYTES = 16 * 1024 * 1024

_READERS: dict[Format, Callable[[Source, int], Iterator[RawRow]]] = {
    Format.JSON_LINES: json_line_rows,
    Format.JSON_ARRAY: array_rows,
    Format.JSON_OBJECTS: object_rows,
    Format.CSV: csv_rows,
    Format.TEXT: text_rows,
}


def read_records(path: Path, *, max_row_bytes: int = DEFAULT_MAX_ROW_BYTES) -> Iterator[RawRow]:
    """The rows of a file, streamed. Raises UsageError for a file that cannot be read at all, or has no row.

    A record larger than max_row_bytes comes out rejected and is never held in memory (Parquet excepted).
    """
    with _open(path) as file:
        magic = file.read(len(PARQUET_MAGIC))
    if not magic:
        raise UsageError(f"{path} is empty.")
    if magic == PARQUET_MAGIC:
        return _finished(path, parquet_rows(path, max_row_bytes))
    source = Source(path)
    return _finished(path, _READERS[sniff(source)](source, max_row_bytes))


def read_lines_at(
    path: Path, numbers: set[int], max_row_bytes: int, offset: int = 0, number: int = 0
) -> Iterator[RawRow]:
    """The rows at these line numbers of a JSON Lines file; nothing but them is parsed. Of another format: none.

    offset: a byte to begin at, of a plain file, where line `number` has ended.
    """
    if offset:
        yield from rows_at(Source(path, offset), numbers, max_row_bytes, number + 1)
        return
    with _open(path) as file:
        if file.read(len(PARQUET_MAGIC)) in (b"", PARQUET_MAGIC):
            return
    source = Source(path)
    if sniff(source) is Format.JSON_LINES:
        yield from rows_at(source, numbers, max_row_bytes)


def is_plain_lines(path: Path) -> bool:
    """Whether each line of the file itself is a JSON row, so that its rows are found by line and byte."""
    with _open(path) as file:
        if file.read(len(PARQUET_MAGIC)) in (b"", PARQUET_MAGIC):
            return False
    source = Source(path)
    return not source.is_compressed and sniff(source) is Format.JSON_LINES


def read_lines_behind(path: Path, offset: int, number: int, max_row_bytes: int) -> Iterator[RawRow]:
    """The rows of a plain JSON Lines file from byte `offset` on, where line `number` has ended. There may be none."""
    return json_line_rows(Source(path, offset), max_row_bytes, number + 1)


def expected_rows(path: Path, sample: int = 1000) -> int:
    """About how many rows a file has, by the size of its first ones; exact for Parquet. Costs milliseconds.

    Raises UsageError as `read_records` does.
    """
    with _open(path) as file:
        if file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
            return row_count(path)
    rows = size = 0
    for row in islice(read_records(path), sample):
        rows, size = rows + 1, size + len(row.raw) + 1
        if size > _SAMPLE_BYTES:
            break
    else:
        if rows < sample:
            return rows
    return max(rows, round(inflated_bytes(path) * rows / size))


def _open(path: Path):
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file; name the data file itself.")
        return path.open("rb")
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc


def _finished(path: Path, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """The rows, then the verdict on a damaged end; a file without any row is an error."""
    count = 0
    try:
        for first in rows:
            count = 1
            yield first
            break
        yield from rows
    except Damaged as exc:
        count = 1
        yield rejected_row(Reason.UNREADABLE, exc.number, exc.raw, path.name, f"{exc.unit} {exc.number}", exc.what)
    if not count:
        raise UsageError(f"{path} has no rows.")

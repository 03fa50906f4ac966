"""Formats where a line is a row: JSON Lines and plain text.

Invariant: a line ends at the byte 0x0A and nowhere else, and every line counts.
"""

from collections.abc import Iterator

from app.reasons import Reason
from producers.readers.rows import Held, RawRow, json_row, rejected_row, too_large_row
from producers.readers.source import Source


def split_lines(source: Source, max_bytes: int, number: int = 1) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line without its end, whether it was too large). Raises Damaged at a damaged end.

    number: of the first line.
    """
    held = Held(max_bytes)
    for chunk in source:
        first, *others = chunk.split(b"\n")
        held.add(first)
        if not others:
            continue
        yield number, *held.take()
        last = others.pop()
        for number, line in enumerate(others, number + 1):  # noqa: B020 - it goes on counting
            if len(line) > max_bytes:
                held.add(line)
                yield number, *held.take()
            else:
                yield number, line, False
        number += 1
        held.add(last)
    rest, too_large = held.take()
    source.refuse_damage(number, rest, "line")
    if rest:
        yield number, rest, too_large


def json_line_rows(source: Source, max_bytes: int, first: int = 1) -> Iterator[RawRow]:
    """Rows of a JSON Lines file, the first line of which has this number."""
    for line in split_lines(source, max_bytes, first):
        yield from _json_rows(source, line, max_bytes)


def rows_at(source: Source, numbers: set[int], max_bytes: int, first: int = 1) -> Iterator[RawRow]:
    """The rows of a JSON Lines file that stand at these lines, as `json_line_rows` has them."""
    last = max(numbers, default=0)
    for line in split_lines(source, max_bytes, first):
        if line[0] in numbers:
            yield from _json_rows(source, line, max_bytes)
        if line[0] >= last:
            return


def _json_rows(source: Source, line: tuple[int, bytes, bool], max_bytes: int) -> Iterator[RawRow]:
    """The row of a line; none of a blank one."""
    number, text, too_large = line
    if too_large:
        yield too_large_row(number, text, source.name, f"line {number}", max_bytes)
    elif text and not text.isspace():
        yield json_row(number, text.removesuffix(b"\r"), source.name, "line")


def text_rows(source: Source, max_bytes: int) -> Iterator[RawRow]:
    """Rows of a plain text file: each line is a prompt, as it stands."""
    for number, line, too_large in split_lines(source, max_bytes):
        if too_large:
            yield too_large_row(number, line, source.name, f"line {number}", max_bytes)
        elif line and not line.isspace():
            yield _text_row(number, line.removesuffix(b"\r"), source.name)


def _text_row(number: int, line: bytes, file: str) -> RawRow:
    if b"\0" in line:
        return rejected_row(Reason.UNREADABLE, number, line, file, f"line {number}", "holds NUL bytes (a torn write)")
    try:
        return RawRow(number, line.decode(), line)
    except UnicodeDecodeError as exc:
        what = f"byte {exc.start + 1} is not UTF-8"
        return rejected_row(Reason.UNREADABLE, number, line, file, f"line {number}", what)

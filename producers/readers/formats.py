"""Which format a file is in, told by its first bytes.

Invariant: the name of the file decides nothing that its content can tell.
"""

import csv
import io
import json
import re
from enum import Enum, auto

import orjson

from app.errors import UsageError
from producers.readers.source import Source
from producers.shapes.fields import PROMPT_FIELDS

_SAMPLE_LINES = 20
_SAMPLE_TEXT = 256 * 1024
_HEADER_WITHIN = 10  #: records above which a CSV header is not looked for
_NAME = re.compile(r"[\w.\-]{1,64}")
_FOREIGN = {
    b"BZh": "bzip2; unpack it first", b"\xfd7zXZ": "xz; unpack it first", b"PK\x03\x04": "zip; unpack it first",
    b"\x1f\x8b": "gzip twice; unpack it once", b"\x28\xb5\x2f\xfd": "zstd twice; unpack it once",
    b"PAR1": "compressed Parquet; unpack it first",
    b"\xff\xfe": "UTF-16; convert it to UTF-8", b"\xfe\xff": "UTF-16; convert it to UTF-8",
}  # fmt: skip


class Format(Enum):
    """What the readers can read, Parquet apart."""

    JSON_LINES = auto()
    JSON_ARRAY = auto()
    JSON_OBJECTS = auto()
    CSV = auto()
    TEXT = auto()


def sniff(source: Source) -> Format:
    """The format of an opened file. Raises UsageError for what is no text."""
    head = source.head
    _refuse_foreign(source)
    lines = _sample_lines(source)
    start = head.lstrip()
    if start.startswith(b"{"):
        return Format.JSON_OBJECTS if _spans_lines(start) else Format.JSON_LINES
    if start.startswith(b"[") and (found := _array_or_lines(start, lines)):
        return found
    if _mostly_json(lines):
        return Format.JSON_LINES
    if not _is_text(lines):
        raise UsageError(f"{source.path} is neither UTF-8 text nor of a format known here.")
    return Format.CSV if csv_header(source) else Format.TEXT


def _refuse_foreign(source: Source) -> None:
    for magic, what in _FOREIGN.items():
        if source.head.startswith(magic):
            raise UsageError(f"{source.path} is {what}.")


def _is_text(lines: list[bytes]) -> bool:
    """Whether at least half of the first lines are; the others are damaged rows."""
    return sum(b"\0" not in line and _is_utf8(line) for line in lines) * 2 >= len(lines)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _sample_lines(source: Source) -> list[bytes]:
    lines = source.head.split(b"\n")
    if not source.is_whole and len(lines) > 1:
        lines.pop()  # cut in the middle
    return [line for line in lines if line and not line.isspace()][:_SAMPLE_LINES]


def _spans_lines(start: bytes) -> bool:
    """Whether the first object goes on over several lines, as pretty-printed JSON does."""
    first_line = start.split(b"\n", 1)[0].strip()
    if first_line == b"{":
        return True
    text = start.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _array_or_lines(start: bytes, lines: list[bytes]) -> Format | None:
    """One array, or lines that are arrays; None if it only looks like one (`[INST] ...`)."""
    second = start[1:].lstrip()[:1]
    if second not in (b"{", b"[", b'"', b"]"):
        return None
    if len(lines) > 1 and isinstance(_parsed(lines[0]), list):
        return Format.JSON_LINES if _parsed(lines[1]) is not None else None
    return None if _goes_on_as_text(lines[0]) else Format.JSON_ARRAY


def _goes_on_as_text(line: bytes) -> bool:
    """Whether prose follows a list of texts on its line: `["a", "b"] is a list in which language?`"""
    try:
        value, end = json.JSONDecoder().raw_decode(line.decode(errors="replace").strip())
    except (ValueError, RecursionError):
        return False
    return end < len(line.strip()) and not any(isinstance(element, dict | list) for element in value)


def _mostly_json(lines: list[bytes]) -> bool:
    """Whether at least half of the first lines are JSON objects or strings: then the others are torn rows."""
    good = sum(isinstance(_parsed(line), dict | str) for line in lines)
    return good > 0 and good * 2 >= len(lines)


def _parsed(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def csv_header(source: Source) -> tuple[str, int, list[str]] | None:
    """(delimiter, records above the header, names) if the file is CSV, else None.

    A header is a record of distinct names with records of the same width below it: one of them a prompt field we know,
    or, in the first record, all of them as a program would write them. Called `.csv` or `.tsv`, a file's first record
    of distinct cells will do.
    """
    text = source.head[:_SAMPLE_TEXT].decode(errors="replace")
    named = any(suffix in (".csv", ".tsv") for suffix in source.path.suffixes)
    found = [(delimiter, *header) for delimiter in ",;\t" if (header := _header(text, delimiter, named))]
    return max(found, key=lambda f: len(f[2]), default=None)


def _header(text: str, delimiter: str, named: bool) -> tuple[int, list[str]] | None:
    records = _first_records(text, delimiter)
    for above, names in enumerate(records[:_HEADER_WITHIN]):
        if _is_header(names, records[above + 1 :], first=above == 0):
            return above, names
    if named:
        for above, names in enumerate(records[:_HEADER_WITHIN]):
            if len(names) > 1 and all(names) and len(set(names)) == len(names):
                return above, names
    return None


def _first_records(text: str, delimiter: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    records: list[list[str]] = []
    try:
        for record in reader:
            records.append(record)
            if len(records) > _SAMPLE_LINES:
                break
    except csv.Error:  # a cell beyond the module's limit, a bare \r: what was read so far decides
        pass
    return records


def _is_header(cells: list[str], below: list[list[str]], *, first: bool) -> bool:
    names = [cell.strip().lower() for cell in cells]
    if len(set(names)) < len(names) or not all(names[1:]) or (len(names) == 1 and not first):
        return False
    known = any(name in PROMPT_FIELDS for name in names)
    filled = [record for record in below if record]
    if not filled:
        return known and len(names) > 1
    as_wide = sum(len(record) == len(names) for record in filled)
    written_by_a_program = first and len(names) > 1 and all(_NAME.fullmatch(cell) for cell in cells)
    return as_wide * 2 > len(filled) and (known or written_by_a_program)

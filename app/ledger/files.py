"""What the lines of our files say to the ledger: which completion, and what it has reached.

Invariant: a line is believed only if it is whole and of this dataset; the ids of a line stand before its token lists,
so that of a line of megabytes only the head is parsed. What the rest holds is for `verify` to prove.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import orjson

from app.jsonl import iterate, parse
from app.ledger.schema import Slot, State, pack_row_id
from app.rundir import RAW, REJECTED, TOKENIZED

FILES = (RAW, TOKENIZED, REJECTED)
CHUNK_LINES = 1000
_MARK_BYTES = 256
_BLOCK_BYTES = 1 << 20
# An unescaped quote ends a JSON string, so none of these can be part of somebody's text.
_LISTS_START = {RAW: b',"prompt_token_ids":', TOKENIZED: b',"input_ids":'}
_LINE_STARTS = {RAW: b'{"key":', TOKENIZED: b'{"id":'}


class LineFact(NamedTuple):
    """What one line says. turns: how many lines its completion has in this file, -1 if the line does not tell."""

    row_id: bytes
    completion_index: int
    turn: int
    turns: int
    slot: Slot


class Chunk(NamedTuple):
    """Some lines of a file, from byte `start` to `end`: what they say, and how many could not be read."""

    start: int
    end: int
    facts: list[LineFact]
    unreadable: int


def chunks(path: Path, dataset: str, name: str, start: int, stop: int) -> Iterator[Chunk]:
    """The lines between two bytes. Unreadable lines at the end belong to no chunk: they may be about to be cut."""
    facts: list[LineFact] = []
    end, unreadable, waiting = start, 0, 0
    for line in iterate(path, start):
        if line.end > stop:
            break
        fact = fact_of(dataset, name, line.raw, line.offset)
        if fact is None:
            waiting += 1
            continue
        facts.append(fact)
        end, unreadable, waiting = line.end, unreadable + waiting, 0
        if len(facts) >= CHUNK_LINES:
            yield Chunk(start, end, facts, unreadable)
            start, facts, unreadable = end, [], 0
    if facts:
        yield Chunk(start, end, facts, unreadable)


def fact_of(dataset: str, name: str, raw: bytes, offset: int) -> LineFact | None:
    """What a line of the file `name` says; None if it is damaged or not of this dataset."""
    try:
        fields = parse(raw) if name == REJECTED else _head(name, raw)
        of, row_id, turn, index = fields["id"].rsplit(":", 3)
        if of != dataset:
            return None
        slot, turns = _slot(name, fields, offset)
        return LineFact(pack_row_id(row_id), int(index), int(turn), turns, slot)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _slot(name: str, fields: dict, offset: int) -> tuple[Slot, int]:
    if name == RAW:
        return Slot(State.GENERATED, "", offset), int(fields["turns"])
    if name == TOKENIZED:
        return Slot(State.TOKENIZED, "", -1), -1
    return Slot(State.REJECTED, str(fields["reason"]), -1), 1


def _head(name: str, raw: bytes) -> dict:
    """The fields before the token lists. Raises ValueError for a line that is torn, glued or full of NULs."""
    stop = raw.find(_LISTS_START[name])
    if stop < 0 or not raw.endswith(b'"}') or b"\0" in raw or raw.find(_LINE_STARTS[name], 1) >= 0:
        raise ValueError("not one whole record")
    return orjson.loads(raw[:stop] + b"}")


def mark_of(path: Path, offset: int) -> bytes:
    """A hash of the last bytes before `offset`, by which a file is known again; b"" if it is missing or shorter."""
    start = max(0, offset - _MARK_BYTES)
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), offset - start, start)
    except FileNotFoundError:
        data = b""
    if len(data) < offset - start:
        return b""
    return blake2b(data, digest_size=8).digest()


def count_lines(path: Path, start: int, stop: int) -> int:
    """Newlines between two bytes of a file."""
    lines = 0
    with path.open("rb") as file:
        while start < stop:
            data = os.pread(file.fileno(), min(_BLOCK_BYTES, stop - start), start)
            if not data:
                break
            lines += data.count(b"\n")
            start += len(data)
    return lines


def size_of(path: Path) -> int:
    """Bytes in a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

"""What the lines of our files say to the ledger: which completion, and what it has reached.

Invariant: a line is believed only if it is whole and of this dataset; the ids of a line stand before its token lists,
so that of a line of megabytes only the head is parsed. What the rest holds is for `verify` to prove.
"""

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import orjson

from app.groups import Groups, Order, Place, turns_of
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
# The last field of a sample's metadata (app/samples.py), which is the last of the line; samples of old have none.
_SAMPLE_TURNS = re.compile(rb'\\"turns\\":([0-9]+)}"}$')
_TAIL_BYTES = 40


class LineFact(NamedTuple):
    """What one line says. turns: how many lines its completion has in this file."""

    row_id: bytes
    completion_index: int
    turn: int
    turns: int
    slot: Slot


class Chunk(NamedTuple):
    """Some lines of a file, from byte `start` to `end`: what they say, and how many could not be read."""

    start: int
    end: int
    facts: list[LineFact]  #: one for each completion, of its first line
    torn: list[LineFact]  #: of each line whose completion is not whole there
    lines: int  #: that could be read
    unreadable: int
    begun: LineFact | None = None  #: a completion of which only the beginning stands there, behind `end`


def chunks(path: Path, dataset: str, name: str, start: int, stop: int) -> Iterator[Chunk]:
    """The lines between two bytes, all of a completion in one chunk. Unreadable lines, and the beginning of a
    completion, at the end belong to no chunk: they are being written, or about to be cut."""
    groups = Groups[tuple[int, LineFact]]()
    facts: list[LineFact] = []
    torn: list[LineFact] = []
    end, lines, unreadable, waiting = start, 0, 0, 0
    for line in iterate(path, start):
        if line.end > stop:
            break
        fact = fact_of(dataset, name, line.raw, line.offset)
        for group, order in groups.add((line.end, fact), fact and _place(fact, name)):
            found = [one for _, one in group]
            facts += found[:1] if order is Order.WHOLE else []
            torn += found if order is Order.BROKEN else []
            end, lines, unreadable, waiting = group[-1][0], lines + len(group), unreadable + waiting, 0
        waiting += fact is None
        if lines >= CHUNK_LINES:
            yield Chunk(start, end, facts, torn, lines, unreadable)
            start, facts, torn, lines, unreadable = end, [], [], 0, 0
    begun = next((group[0][1] for group, _ in groups.end()), None)
    if lines or begun is not None:
        yield Chunk(start, end, facts, torn, lines, unreadable, begun)


def _place(fact: LineFact, name: str) -> Place:
    """A rejection stands for all turns of its completion, whichever it names."""
    of = fact.row_id, fact.completion_index
    return Place(of, 0, 1) if name == REJECTED else Place(of, fact.turn, fact.turns)


def fact_of(dataset: str, name: str, raw: bytes, offset: int) -> LineFact | None:
    """What a line of the file `name` says; None if it is damaged or not of this dataset."""
    try:
        fields = parse(raw) if name == REJECTED else _head(name, raw)
        of, row_id, turn, index = fields["id"].rsplit(":", 3)
        if of != dataset:
            return None
        slot, turns = _slot(name, fields, raw, offset)
        return LineFact(pack_row_id(row_id), int(index), int(turn), turns, slot)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _slot(name: str, fields: dict, raw: bytes, offset: int) -> tuple[Slot, int]:
    if name == RAW:
        return Slot(State.GENERATED, "", offset), int(fields["turns"])
    if name == TOKENIZED:
        return Slot(State.TOKENIZED, "", -1), _turns_of_sample(fields, raw)
    return Slot(State.REJECTED, str(fields["reason"]), -1), 1


def _turns_of_sample(fields: dict, raw: bytes) -> int:
    if "metadata" in fields:
        return turns_of(fields)
    found = _SAMPLE_TURNS.search(raw[-_TAIL_BYTES:])
    return int(found.group(1)) if found else 1


def _head(name: str, raw: bytes) -> dict:
    """The fields before the token lists; all of them where another program wrote the line anew, with spaces or in
    another order. Raises ValueError for a line that is torn, glued or full of NULs."""
    stop = raw.find(_LISTS_START[name])
    ours = stop > 0 and raw.startswith(_LINE_STARTS[name]) and raw.endswith(b'"}') and b"\0" not in raw
    if not ours or raw.find(_LINE_STARTS[name], 1) >= 0:
        return parse(raw)
    return orjson.loads(raw[:stop] + b"}")


def time_of(path: Path, end: int) -> int:
    """When a file was changed last, in nanoseconds, if it is `end` bytes long; 0 if it is longer, shorter or gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return status.st_mtime_ns if status.st_size == end else 0


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

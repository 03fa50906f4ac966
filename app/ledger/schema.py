"""The ledger's tables and the small records that go in and out of it.

The packed row id is the 12 bytes of the digest, followed, from the second equal row on, by the occurrence number in
4 bytes. Keys are hashes, so that each row written dirties a page of its own: hence few writes, and a large WAL.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

VERSION = 3
PAGE_BYTES = 4096
VERDICT = -1  #: the completion index of a verdict on a whole row

SCHEMA = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE dataset(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    samples_wanted INTEGER NOT NULL,   -- completions wanted per row
    rows INTEGER NOT NULL,             -- how many stand in `row`
    rows_final INTEGER NOT NULL);      -- 1: the input was read to its end
CREATE TABLE row(                      -- the rows of the current input
    dataset INTEGER NOT NULL, row_id BLOB NOT NULL,
    seq INTEGER NOT NULL,              -- when it was registered: grows with every row, in the order of the input
    file INTEGER NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY(dataset, row_id)) WITHOUT ROWID;
CREATE TABLE completion(               -- what the files say of a completion, or of a whole row (idx -1)
    dataset INTEGER NOT NULL, row_id BLOB NOT NULL, idx INTEGER NOT NULL,
    state INTEGER NOT NULL, reason TEXT NOT NULL,
    raw_offset INTEGER NOT NULL,       -- byte of its (first) raw line; -1: none, or not read yet
    PRIMARY KEY(dataset, row_id, idx)) WITHOUT ROWID;
CREATE TABLE torn(                     -- completions of several turns with lines in a file that are no whole group
    dataset INTEGER NOT NULL, row_id BLOB NOT NULL, idx INTEGER NOT NULL, sample INTEGER NOT NULL,
    PRIMARY KEY(dataset, row_id, idx, sample)) WITHOUT ROWID;
CREATE TABLE file(                     -- how far each file has been read into this ledger
    dataset INTEGER NOT NULL, name TEXT NOT NULL,
    offset INTEGER NOT NULL, lines INTEGER NOT NULL, unreadable INTEGER NOT NULL,
    mark BLOB NOT NULL,                -- hash of the bytes before `offset`: another file has another
    time INTEGER NOT NULL,             -- when it was changed last, if it ended at `offset` then; else 0
    PRIMARY KEY(dataset, name)) WITHOUT ROWID;
CREATE TABLE bookmark(                 -- up to where the input was read, and all its rows are in `row`
    dataset INTEGER NOT NULL, file INTEGER NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,
    rows INTEGER NOT NULL, whole INTEGER NOT NULL, digest BLOB NOT NULL, stamp TEXT NOT NULL,
    PRIMARY KEY(dataset, file, number)) WITHOUT ROWID;
CREATE TABLE tally(                    -- how many completions are what; changed with them, so that nobody scans
    dataset INTEGER NOT NULL, present INTEGER NOT NULL, idx INTEGER NOT NULL,
    state INTEGER NOT NULL, reason TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY(dataset, present, idx, state, reason)) WITHOUT ROWID;
"""
TABLES = {"meta", "dataset", "row", "completion", "torn", "file", "bookmark", "tally"}

# Equal rows seen in this pass: they belong to the pass's own process, so they need not be on the disk.
PASS_SCHEMA = """
CREATE TEMP TABLE repeat(dataset INTEGER, digest BLOB, n INTEGER, PRIMARY KEY(dataset, digest)) WITHOUT ROWID;
"""


class State(IntEnum):
    """What a completion has reached; the higher one wins where a file says both."""

    GENERATED = 1  #: its raw line is there, and neither sample nor rejection yet
    REJECTED = 2
    TOKENIZED = 3


# Two facts that are counted beside the states.
HAS_RAW = 10  #: it has its raw line(s)
SHADOWED = 11  #: it has a record of its own although its whole row was rejected, for this reason


class Slot(NamedTuple):
    """What the files say of one completion. raw_offset -1: it has no raw line."""

    state: State
    reason: str
    raw_offset: int


class Committed(NamedTuple):
    """A completion that reached a state. raw_offset -1: it has no raw line (rejected before generation)."""

    dataset: str
    row_id: str
    completion_index: int
    state: State
    reason: str = ""
    raw_offset: int = -1


class Seen(NamedTuple):
    """A row of the input after its occurrence was counted.

    final: completion indices that need no generation (generated, tokenized or rejected);
    row_verdict: the whole row was rejected.
    """

    row_id: str
    final: frozenset[int]
    row_verdict: bool


class Missing(NamedTuple):
    """A completion wanted of which the files say nothing; file and number are where its row stood when last seen."""

    row_id: str
    completion_index: int
    file: int
    number: int


class Bookmark(NamedTuple):
    """A place in the input. rows: of the dataset, before it."""

    file: int
    number: int  #: the last line (or record) before it
    offset: int  #: the byte behind that
    rows: int
    whole: bool  #: it says nothing of a file that is longer by now
    digest: bytes  #: of the bytes since the bookmark before it in the same file
    stamp: str  #: of the file; "" if that may change without a sign


class Torn(NamedTuple):
    """(packed row id, completion index) of completions of several turns whose raw lines, or samples, are not all there
    one after the other."""

    responses: list[tuple[bytes, int]]
    samples: list[tuple[bytes, int]]


@dataclass(frozen=True, slots=True)
class DatasetCounts:
    """Counts of completions wanted: `rows` = rows of the input × samples wanted = tokenized + rejected + pending."""

    dataset: str
    rows: int
    rows_final: bool  #: the input has been read to its end
    generated: int
    tokenized: int
    rejected_by_reason: dict[str, int]
    responses: int  #: lines in raw_responses.jsonl
    samples: int  #: lines in tokenized_data.jsonl
    orphans: int  #: completions and verdicts on file that the current input does not ask for
    unreadable: int  #: damaged lines that were skipped

    @property
    def rejected(self) -> int:
        """Completions that will get no sample, before or after generation."""
        return sum(self.rejected_by_reason.values())

    @property
    def pending(self) -> int:
        """The rest."""
        return self.rows - self.tokenized - self.rejected


def pack_row_id(row_id: str) -> bytes:
    """The 12 or 16 bytes of a row id. Raises ValueError for what is none."""
    digest, dash, occurrence = row_id.partition("-")
    packed = bytes.fromhex(digest)
    if len(packed) != 12 or len(digest) != 24:
        raise ValueError(f"{row_id!r} is no row id")
    return packed + int(occurrence).to_bytes(4, "big") if dash else packed


def unpack_row_id(packed: bytes) -> str:
    """Back from `pack_row_id`."""
    digest = packed[:12].hex()
    return digest if len(packed) == 12 else f"{digest}-{int.from_bytes(packed[12:], 'big')}"

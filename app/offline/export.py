"""What trainers get beside the run's own files: the split into train and eval, the order, a folder written as a whole.

Invariant: which side a row is on depends on the row and the seed alone, so that all its completions, and rows equal to
it, are on the same side, and a run that grows moves no row.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from app.errors import StorageError, UsageError
from app.jsonl import iterate
from app.ledger.files import fact_of
from app.ledger.schema import pack_row_id
from app.offline.redo import responses
from app.offline.scratch import Scratch
from app.rundir import TOKENIZED, RunDir
from app.verify_lines import whole

NOTE = "export.json"
SIDES = ("train", "eval")
_SCHEMA = """
CREATE TABLE place(row BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE sample(number INTEGER, row BLOB, idx INTEGER, turn INTEGER, start INTEGER,
    PRIMARY KEY(number, row, idx, turn)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Split:
    """How rows are divided."""

    eval_fraction: float
    seed: int

    def side_of(self, primary_id: str) -> str:
        """train or eval."""
        dataset, _, row_id = primary_id.rpartition(":")
        digest = row_id.partition("-")[0]  # equal rows differ only in what follows it
        value = blake2b(f"{self.seed}\0{dataset}:{digest}".encode(), digest_size=8).digest()
        return SIDES[int.from_bytes(value, "big") < self.eval_fraction * 2**64]


def samples_in_order(rundir: RunDir, dataset: str) -> Iterator[dict[str, Any] | None]:
    """The samples of a dataset by (row number, row, completion, turn), read one at a time; None for a damaged one."""
    path = rundir.file(dataset, TOKENIZED)
    with Scratch(_SCHEMA) as scratch:
        for _, record in responses(rundir, dataset):
            place = (pack_row_id(record["row_id"]), record["row_number"])
            scratch.run("INSERT OR IGNORE INTO place VALUES(?, ?)", place)
        for line in iterate(path):
            fact = fact_of(dataset, TOKENIZED, line.raw, line.offset)
            if fact is None:
                yield None
                continue
            found = scratch.one("SELECT number FROM place WHERE row = ?", (fact.row_id,))
            at = (found[0] if found else 0, fact.row_id, fact.completion_index, fact.turn, line.offset)
            scratch.run("INSERT OR IGNORE INTO sample VALUES(?, ?, ?, ?, ?)", at)
        if not path.exists():
            return
        with path.open("rb") as file:
            for (start,) in scratch.all("SELECT start FROM sample ORDER BY number, row, idx, turn"):
                file.seek(start)
                try:
                    yield whole(TOKENIZED, file.readline())
                except ValueError:
                    yield None


@contextmanager
def folder_as_a_whole(to: Path) -> Iterator[Path]:
    """A new folder to write into, that takes the name `to` when all went well. One of an earlier export is replaced.

    Raises UsageError if something else is there.
    """
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / NOTE).exists())):
        raise UsageError(f"{to} holds something that is no earlier export; give another --to.")
    partial, old = to.with_name(to.name + ".partial"), to.with_name(to.name + ".old")
    try:
        for stale in (partial, old):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if to.exists():
            to.rename(old)
        partial.rename(to)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as exc:
        raise StorageError(f"Cannot write {to}: {exc.strerror}.") from exc


def write_note(folder: Path, said: dict[str, Any]) -> None:
    """What was exported, from where and how."""
    (folder / NOTE).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


class Lines:
    """train/NAME and eval/NAME as JSON Lines. Use as a context manager; a side without a line has no file."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._files: dict[str, Any] = {}
        self.counts = dict.fromkeys(SIDES, 0)

    def __enter__(self) -> "Lines":
        return self

    def write(self, side: str, record: dict[str, Any]) -> None:
        """Append one line."""
        if side not in self._files:
            (self._folder / side).mkdir()
            self._files[side] = (self._folder / side / self._name).open("wb", buffering=1 << 20)
        self._files[side].write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self.counts[side] += 1

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

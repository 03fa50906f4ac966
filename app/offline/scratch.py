"""Sets and joins that do not fit into memory: a temporary SQLite file, gone with its connection."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Self


def hash_of(value: bytes | str) -> bytes:
    """16 bytes that stand for a text or for bytes."""
    return blake2b(value.encode() if isinstance(value, str) else value, digest_size=16).digest()


class Scratch:
    """A temporary database. Use as a context manager, in one thread."""

    def __init__(self, schema: str):
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {schema}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Rows changed by one statement."""
        return self._db.execute(statement, values).rowcount

    def run_all(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement for each row of values."""
        self._db.executemany(statement, rows)

    def one(self, query: str, values: Sequence[Any] = ()) -> tuple | None:
        """The first row of a query, or None."""
        return self._db.execute(query, values).fetchone()

    def all(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple]:
        """The rows of a query, streamed."""
        return self._db.execute(query, values)


class HashSet(Scratch):
    """A set of texts or byte strings, by their hashes."""

    def __init__(self) -> None:
        super().__init__("CREATE TABLE item(hash BLOB PRIMARY KEY) WITHOUT ROWID;")

    def add(self, value: bytes | str) -> bool:
        """Whether it is new."""
        return self.run("INSERT OR IGNORE INTO item(hash) VALUES(?)", (hash_of(value),)) == 1

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Take some away, by what stands for them (`hash_of`)."""
        self.run_all("DELETE FROM item WHERE hash = ?", ((one,) for one in hashes))

    def __contains__(self, value: bytes | str) -> bool:
        return self.one("SELECT 1 FROM item WHERE hash = ?", (hash_of(value),)) is not None

    def __len__(self) -> int:
        return self.one("SELECT count(*) FROM item")[0]

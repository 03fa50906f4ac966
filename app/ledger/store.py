"""The ledger's SQLite file: one connection, its transactions, and the rows, slots and tally in it.

Invariant: slots and tally change together or not at all. SQLite's errors leave this room as StorageError.
"""

import fcntl
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from app.errors import StorageError
from app.ledger.passes import StoredRow
from app.ledger.schema import PAGE_BYTES, PASS_SCHEMA, SCHEMA, TABLES, VERSION, Slot, State
from app.ledger.tally import Slots, facts, files_entered, merge

log = logging.getLogger(__name__)
Change = tuple[bytes, int, Slot]  #: packed row id, completion index, what is said of it
UNKNOWN: tuple[None, list[int]] = (None, [])  #: what `_rows_and_indices` would say of a row that is not registered

_BUSY_SECONDS = 30.0
_WAL_BYTES = 128 << 20  # keys are hashes: the rarer a checkpoint, the more often it finds a page changed twice
_CACHE_KIB = 8 << 10  # a larger one is no quicker: the kernel keeps the file's pages, too
_MOST_PARAMETERS = 500


class Store:
    """One connection. Use it in the thread that opened it, and never across a fork."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path):
                self._db = _open_or_replace(path)
                self._inode = path.stat().st_ino
            self._data_version = 0
        except (OSError, sqlite3.Error) as exc:
            raise StorageError(f"{path}: cannot open the ledger: {exc}") from exc

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_changed(self) -> bool:
        """Whether another connection committed since this was last asked. Cheap: no table is read."""
        before, (self._data_version,) = self._data_version, self._db.execute("PRAGMA data_version").fetchone()
        return self._data_version != before

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All or nothing. IMMEDIATE to write (waits for other writers), DEFERRED to read one state of things."""
        try:
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as exc:
            if exc.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                self._move_aside()
                raise StorageError(f"{self.path}: {exc}; start again: it is rebuilt from the files") from exc
            raise StorageError(f"{self.path}: {exc}; when this is mended, start again") from exc

    def _move_aside(self) -> None:
        with _alone(self.path):
            if self.path.exists() and self.path.stat().st_ino == self._inode:  # nobody was quicker
                _move_aside(self.path)

    # --- small things ---

    def _meta(self, name: str, default: int = 0) -> int:
        found = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if found is None else found[0]

    def _set_meta(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (name, value))

    def _find_dataset(self, name: str) -> int:
        """Its number; -1 for a dataset we never heard of, which nothing else has."""
        found = self._db.execute("SELECT id FROM dataset WHERE name = ?", (name,)).fetchone()
        return -1 if found is None else found[0]

    def _dataset_id(self, name: str) -> int:
        """Its number; makes the dataset known."""
        found = self._find_dataset(name)
        if found >= 0:
            return found
        values = (name, self._meta("samples", 1))
        return self._db.execute("INSERT INTO dataset VALUES(NULL, ?, ?, 0, 0)", values).lastrowid or 0

    def _offset(self, ds: int, name: str) -> int:
        """How far a file has been read."""
        found = self._db.execute("SELECT offset FROM file WHERE dataset = ? AND name = ?", (ds, name)).fetchone()
        return 0 if found is None else found[0]

    def _select(self, query: str, ds: int, keys: Sequence[bytes]) -> Iterator[tuple]:
        """Rows of a query that ends in `IN`, for any number of keys."""
        for start in range(0, len(keys), _MOST_PARAMETERS):
            some = keys[start : start + _MOST_PARAMETERS]
            yield from self._db.execute(f"{query}({','.join('?' * len(some))})", (ds, *some))

    # --- rows and slots ---

    def _rows(self, ds: int, keys: Sequence[bytes]) -> dict[bytes, StoredRow]:
        found = self._select("SELECT row_id, seq, file, number FROM row WHERE dataset = ? AND row_id IN", ds, keys)
        return {key: (seq, file, number) for key, seq, file, number in found}

    def _rows_and_indices(self, ds: int, keys: Sequence[bytes]) -> dict[bytes, tuple[StoredRow | None, list[int]]]:
        """Registered rows, each with the completion indices of which the files say something."""
        query = (
            "SELECT row_id, seq, file, number, idx FROM row LEFT JOIN completion USING (dataset, row_id)"
            " WHERE dataset = ? AND row_id IN"
        )
        found: dict[bytes, tuple[StoredRow | None, list[int]]] = {}
        for key, seq, file, number, index in self._select(query, ds, keys):
            if key in found:
                found[key][1].append(index)
            else:
                found[key] = (seq, file, number), [] if index is None else [index]
        return found

    def _slots(self, ds: int, keys: Sequence[bytes]) -> dict[bytes, Slots]:
        slots: dict[bytes, Slots] = {}
        query = "SELECT row_id, idx, state, reason, raw_offset FROM completion WHERE dataset = ? AND row_id IN"
        for key, index, state, reason, offset in self._select(query, ds, keys):
            slots.setdefault(key, {})[index] = Slot(_STATES[state], reason, offset)
        return slots

    def _apply(self, ds: int, changes: Sequence[Change]) -> Counter[str]:
        """Merge changes into what is known; returns how many completions are new to each of the files."""
        before = self._slots(ds, list({key for key, _, _ in changes}))
        after: dict[bytes, Slots] = {}
        written: dict[tuple[bytes, int], Slot] = {}
        new: Counter[str] = Counter()
        for key, index, slot in changes:
            slots = after.get(key)
            if slots is None:
                slots = after[key] = dict(before.get(key, ()))
            old = slots.get(index)
            merged = merge(old, slot)
            if merged != old:
                slots[index] = written[key, index] = merged
                new.update(files_entered(old, merged))
        if written:
            self._write(ds, written, before, after)
        return new

    def _write(
        self, ds: int, written: dict[tuple[bytes, int], Slot], before: dict[bytes, Slots], after: dict[bytes, Slots]
    ) -> None:
        self._db.executemany(
            "INSERT INTO completion VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET state = excluded.state, reason = excluded.reason, raw_offset = excluded.raw_offset",
            sorted((ds, *place, *slot) for place, slot in written.items()),
        )
        changed = list({key for key, _ in written})
        present = self._rows(ds, changed)
        tally: Counter[tuple] = Counter()
        for key in changed:
            here = int(key in present)
            for fact in facts(before.get(key, {})):
                tally[here, *fact] -= 1
            for fact in facts(after[key]):
                tally[here, *fact] += 1
        self._add_to_tally(ds, tally)

    # --- tally ---

    def _shift_tally(self, ds: int, rows: Iterable[Slots], *, present: int) -> None:
        """Rows came into the input (present 1) or left it (0)."""
        tally: Counter[tuple] = Counter()
        for slots in rows:
            for fact in facts(slots):
                tally[present, *fact] += 1
                tally[1 - present, *fact] -= 1
        self._add_to_tally(ds, tally)

    def _add_to_tally(self, ds: int, tally: Counter[tuple]) -> None:
        self._db.executemany(
            "INSERT INTO tally VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
            [(ds, *place, n) for place, n in tally.items() if n],
        )

    def _tally(self) -> dict[int, list[tuple]]:
        """(present, index, state, reason, n) of each dataset."""
        tally: dict[int, list[tuple]] = {}
        for ds, *entry in self._db.execute("SELECT dataset, present, idx, state, reason, n FROM tally WHERE n"):
            tally.setdefault(ds, []).append(tuple(entry))
        return tally


_STATES = {int(state): state for state in State}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two processes that find a damaged ledger must not both replace it."""
    with path.with_suffix(".opening").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def _open_or_replace(path: Path) -> sqlite3.Connection:
    connection = _open(path)
    if connection is None:
        log.warning("ledger_moved_aside: %s is damaged or another version's; it is rebuilt from the files", path)
        _move_aside(path)
        connection = _open(path)
    if connection is None:
        raise sqlite3.DatabaseError("a new one cannot be read either")
    return connection


def _move_aside(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.replace(path.with_name(f"{path.stem}.unusable{path.suffix}{suffix}"))


def _open(path: Path) -> sqlite3.Connection | None:
    """A connection, with our tables in it; None if the file is damaged or another version's."""
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # the files are synced; what is lost here is read again
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_BYTES // PAGE_BYTES}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.executescript(PASS_SCHEMA)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not tables and version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
            return connection
        if tables >= TABLES and version == VERSION:
            return connection
    except sqlite3.OperationalError:  # locked, full, no permission: the file may be good
        connection.close()
        raise
    except sqlite3.DatabaseError:
        pass
    connection.close()
    return None

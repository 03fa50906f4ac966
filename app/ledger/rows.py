"""The producer's part of the ledger: which rows the input has, where they stand, and up to where it was read."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from app.ledger.passes import Pass
from app.ledger.schema import VERDICT, Bookmark, Seen, unpack_row_id
from app.ledger.store import UNKNOWN, Store

_NOTHING: frozenset[int] = frozenset()
_THE_ONE = frozenset({0})


class InputLedger(Store):
    """Rows of the input. One pass at a time, by one process."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._pass: Pass | None = None

    def begin_pass(self, samples: int | None = None, datasets: Iterable[str] | None = None) -> int:
        """Start reading the input from its beginning; returns the number of the pass.

        samples: completions wanted per row from now on; None: as before, at first 1. datasets: all that the input has;
        they are known from now on, and rows of others are forgotten; None: those known stay. Nothing is final until its
        `end_pass`.
        """
        with self._transaction():
            number = self._meta("pass") + 1
            self._set_meta("pass", number)
            if samples is not None:
                self._set_meta("samples", samples)
                self._db.execute("UPDATE dataset SET samples_wanted = ?", (samples,))
            named = None if datasets is None else set(datasets)
            for name in sorted(named or ()):
                self._dataset_id(name)  # one that waits for its first row is not complete
            self._db.execute("UPDATE dataset SET rows_final = 0")
            self._db.execute("DELETE FROM temp.repeat")
            self._db.execute("DELETE FROM bookmark")  # rows may come to stand elsewhere
            if named is not None:
                self._forget_others(named)
            seq = self._meta("seq")
        self._pass = Pass(number, seq)
        return number

    def bookmarks(self, dataset: str) -> list[Bookmark]:
        """Up to where the input was read, in its order; read them before a pass begins."""
        query = "SELECT file, number, offset, rows, whole, digest, stamp FROM bookmark WHERE dataset = ? ORDER BY 1, 2"
        with self._transaction("DEFERRED"):
            return [Bookmark(*found) for found in self._db.execute(query, (self._find_dataset(dataset),))]

    def set_bookmark(self, dataset: str, mark: Bookmark) -> None:
        """All rows up to there have been registered in this pass, or stand before where it began."""
        with self._transaction():
            self._put_bookmarks(self._dataset_id(dataset), [mark])

    def begin_behind(self, dataset: str, bookmarks: Sequence[Bookmark]) -> list[Bookmark]:
        """Take the rows before the last of these bookmarks for seen, in the pass that has begun; before `see_rows`.

        Returns the bookmarks; none if the ledger does not have just the rows that they speak of.
        """
        with self._transaction():
            ds = self._dataset_id(dataset)
            good = bool(bookmarks) and self._rows_up_to(ds, bookmarks[-1]) == bookmarks[-1].rows
            kept = list(bookmarks) if good else []
            self._put_bookmarks(ds, kept)
        if kept:
            self._current_pass.begin_behind(ds, kept[-1][:2], kept[-1].rows)
        else:
            self._current_pass.begin_behind(ds)
        return kept

    def see_rows(self, dataset: str, rows: Sequence[tuple[str, int, int]]) -> list[Seen]:
        """Register rows (digest, file, number) of the input, in its order; says what each has already.

        Equal rows are told apart by their occurrence in this pass. A row that stands where it stood costs no write.
        """
        with self._transaction():
            ds = self._dataset_id(dataset)
            batch = self._current_pass.batch(ds, self._meta("seq"))
            digests = [bytes.fromhex(digest) for digest, _, _ in rows]
            known = self._rows_and_indices(ds, digests)
            for digest, (_, file, number) in zip(digests, rows, strict=True):
                key = digest
                row, _ = known.get(key, UNKNOWN)
                while batch.has_seen(key, row):
                    key = self._next_occurrence(ds, digest)
                    known |= self._rows_and_indices(ds, [key])
                    row, _ = known.get(key, UNKNOWN)
                batch.see(key, row, file, number)
            if batch.moved:
                self._write_rows(ds, batch.moved, batch.seq, len(batch.new))
            if batch.new:  # rows that come back, or whose lines are all that is left of the ledger
                slots = self._slots(ds, batch.new)
                self._shift_tally(ds, slots.values(), present=1)
                known |= {key: (None, list(indices)) for key, indices in slots.items()}
        self._current_pass.accept(batch)
        return [_seen(key, known.get(key, UNKNOWN)[1]) for key in batch.seen]

    def end_pass(self, dataset: str) -> None:
        """The input of a dataset has been read to its end: rows that were not seen are gone, the number is final."""
        current = self._current_pass
        with self._transaction():
            ds = self._dataset_id(dataset)
            (rows,) = self._db.execute("SELECT rows FROM dataset WHERE id = ?", (ds,)).fetchone()
            if rows != current.rows_seen(ds):
                everything = self._db.execute("SELECT row_id, seq, file, number FROM row WHERE dataset = ?", (ds,))
                self._forget_rows(ds, [key for key, *row in everything if not current.has_seen(ds, tuple(row))])
            self._db.execute("UPDATE dataset SET rows_final = 1 WHERE id = ?", (ds,))

    @property
    def _current_pass(self) -> Pass:
        if self._pass is None:
            raise RuntimeError("begin_pass comes first")
        return self._pass

    def _put_bookmarks(self, ds: int, bookmarks: Iterable[Bookmark]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO bookmark VALUES(?, ?, ?, ?, ?, ?, ?, ?)", [(ds, *mark) for mark in bookmarks]
        )

    def _rows_up_to(self, ds: int, mark: Bookmark) -> int:
        """How many rows are registered up to a bookmark. They are counted only where there are others."""
        (rows,) = self._db.execute("SELECT rows FROM dataset WHERE id = ?", (ds,)).fetchone()
        if rows != mark.rows:
            query = "SELECT count(*) FROM row WHERE dataset = ? AND (file, number) <= (?, ?)"
            (rows,) = self._db.execute(query, (ds, *mark[:2])).fetchone()
        return rows

    def _next_occurrence(self, ds: int, key: bytes) -> bytes:
        """The key of one more row equal to one that was seen in this pass."""
        (n,) = self._db.execute(
            "INSERT INTO temp.repeat VALUES(?, ?, 2) ON CONFLICT DO UPDATE SET n = n + 1 RETURNING n", (ds, key)
        ).fetchone()
        return key + n.to_bytes(4, "big")

    def _write_rows(self, ds: int, moved: list[tuple[bytes, int, int, int]], seq: int, new: int) -> None:
        self._db.executemany(
            "INSERT INTO row VALUES(?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET seq = excluded.seq, file = excluded.file, number = excluded.number",
            sorted((ds, *row) for row in moved),
        )
        self._set_meta("seq", seq)
        self._db.execute("UPDATE dataset SET rows = rows + ? WHERE id = ?", (new, ds))

    def _forget_others(self, named: set[str]) -> None:
        for ds, name in self._db.execute("SELECT id, name FROM dataset").fetchall():
            if name not in named:
                keys = self._db.execute("SELECT row_id FROM row WHERE dataset = ?", (ds,))
                self._forget_rows(ds, [key for (key,) in keys])
                self._db.execute("UPDATE dataset SET rows_final = 1 WHERE id = ?", (ds,))

    def _forget_rows(self, ds: int, gone: list[bytes]) -> None:
        self._shift_tally(ds, self._slots(ds, gone).values(), present=0)
        self._db.executemany("DELETE FROM row WHERE dataset = ? AND row_id = ?", [(ds, key) for key in gone])
        self._db.execute("UPDATE dataset SET rows = rows - ? WHERE id = ?", (len(gone), ds))


def _seen(key: bytes, indices: list[int]) -> Seen:
    if not indices:
        return Seen(unpack_row_id(key), _NOTHING, False)
    if indices == [0]:
        return Seen(unpack_row_id(key), _THE_ONE, False)
    return Seen(unpack_row_id(key), frozenset(indices) - {VERDICT}, VERDICT in indices)

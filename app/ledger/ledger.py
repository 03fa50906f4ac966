"""What producer, collector and onlookers ask of the ledger."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Self

from app.ledger.files import FILES, Chunk, LineFact, chunks, count_lines, mark_of, size_of, time_of
from app.ledger.rows import InputLedger
from app.ledger.schema import (
    HAS_RAW,
    VERDICT,
    Committed,
    DatasetCounts,
    Missing,
    Slot,
    State,
    Torn,
    pack_row_id,
    unpack_row_id,
)
from app.ledger.store import Change
from app.ledger.tally import Slots, counts_of, facts
from app.rundir import RAW, TOKENIZED, RunDir

# The rows that lack one are few and told by a count of what each has, which is one look instead of one an index.
_MISSING = """
WITH RECURSIVE of(samples) AS (SELECT samples_wanted FROM dataset WHERE id = ?1),
wanted(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM wanted WHERE i + 1 < (SELECT samples FROM of)),
lacking AS NOT MATERIALIZED (
    SELECT row_id, file, number FROM row WHERE dataset = ?1 AND row_id >= ?2 AND (SELECT samples FROM of) > (
        SELECT count(*) FROM completion c
        WHERE c.dataset = ?1 AND c.row_id = row.row_id AND c.idx >= 0 AND c.idx < (SELECT samples FROM of)))
SELECT row_id, i, file, number FROM lacking CROSS JOIN wanted
WHERE (row_id, i) > (?2, ?3) AND NOT EXISTS (
    SELECT 1 FROM completion c WHERE c.dataset = ?1 AND c.row_id = lacking.row_id AND c.idx IN (i, -1))
ORDER BY row_id, i LIMIT ?4
"""


class Ledger(InputLedger):
    """A run's ledger. Call `catch_up` before believing it."""

    def __init__(self, rundir: RunDir, path: Path):
        super().__init__(path)
        self._rundir = rundir
        self._begun: LineFact | None = None  #: of the dataset that is being read

    @classmethod
    def open(cls, rundir: RunDir, path: Path | None = None) -> Self:
        """The ledger of a run, made if it is missing; a damaged or another version's is moved aside and made anew.

        path: where it lies, if not in the run's own directory.
        """
        return cls(rundir, path or rundir.ledger)

    # --- the collector: completions ---

    def commit(self, changes: Iterable[Committed], ends: Mapping[tuple[str, str], int] | None = None) -> None:
        """Record completions whose lines are on the disk, and how far the files go now. Repeating it is harmless.

        ends: (dataset, file name) → size of the file after the append.
        """
        by_dataset: dict[str, list[Change]] = defaultdict(list)
        for dataset, row_id, index, *slot in changes:
            by_dataset[dataset].append((pack_row_id(row_id), index, Slot(*slot)))
        with self._transaction():
            new = {dataset: self._apply(self._dataset_id(dataset), some) for dataset, some in by_dataset.items()}
            for (dataset, name), end in (ends or {}).items():
                self._advance(dataset, name, end, new.get(dataset, Counter())[name])

    def known(self, slots: Iterable[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Those of these completions (dataset, row_id, completion_index) of which the files say something already."""
        found = []
        with self._transaction("DEFERRED"):
            for dataset, some in groupby(sorted(slots), key=lambda slot: slot[0]):
                wanted = [(pack_row_id(slot[1]), slot) for slot in some]
                have = self._slots(self._find_dataset(dataset), [key for key, _ in wanted])
                found += [slot for key, slot in wanted if not {slot[2], VERDICT}.isdisjoint(have.get(key, ()))]
        return found

    def underived(self) -> Iterator[tuple[str, int]]:
        """(dataset, offset) of raw lines with neither sample nor rejection; of several turns, the first line's."""
        with self._transaction("DEFERRED"):
            places, tally = [], self._tally()
            for ds, name in self._db.execute("SELECT id, name FROM dataset").fetchall():
                if any(state == State.GENERATED for _, _, state, _, _ in tally.get(ds, ())):
                    places += [(name, offset) for (offset,) in self._db.execute(
                        "SELECT raw_offset FROM completion WHERE dataset = ? AND state = ? ORDER BY raw_offset",
                        (ds, State.GENERATED),
                    )]  # fmt: skip
        return iter(places)

    def torn(self, dataset: str) -> Torn:
        """Completions of several turns whose lines are not what was written; they count as if nothing was there."""
        query = "SELECT row_id, idx FROM torn WHERE dataset = ? AND sample = ?"
        with self._transaction("DEFERRED"):
            ds = self._find_dataset(dataset)
            return Torn(*(self._db.execute(query, (ds, sample)).fetchall() for sample in (0, 1)))

    # --- reading the files ---

    def catch_up(self, rundir: RunDir | None = None) -> None:
        """Index what the files have beyond the ledger; a dataset from its beginning if a file is not the one it was.

        Any process may call it at any time: what two of them read at once is counted once.
        """
        self._rundir = rundir or self._rundir
        with self._transaction("DEFERRED"):
            known = {name for (name,) in self._db.execute("SELECT name FROM dataset")}
        for dataset in sorted(known.union(self._rundir.datasets_on_disk())):
            self._forget_changed_files(dataset)
            # A raw line is written before its sample, so the end of the samples is taken first.
            stops = {name: size_of(self._rundir.file(dataset, name)) for name in reversed(FILES)}
            self._begun = None
            for name in FILES:
                while not self._index(dataset, name, stops[name]):
                    pass  # another process indexed a part meanwhile: go on behind it

    def read_anew(self, datasets: Iterable[str]) -> None:
        """Forget what the files of these datasets said, because they were replaced; the rows of the input stay."""
        with self._transaction():
            for dataset in datasets:
                self._forget_files(self._find_dataset(dataset))

    def _forget_changed_files(self, dataset: str) -> None:
        """A file that has other bytes before the place read to, or was changed without growing, is another file."""
        with self._transaction():
            ds = self._find_dataset(dataset)
            query = "SELECT name, offset, mark, time FROM file WHERE dataset = ?"
            for name, offset, mark, before in self._db.execute(query, (ds,)).fetchall():
                path = self._rundir.file(dataset, name)
                now = time_of(path, offset)
                if mark_of(path, offset) != mark or (before and now and now != before):
                    self._forget_files(ds)
                    return
                if now != before:  # it grew, perhaps by what will be cut
                    self._db.execute("UPDATE file SET time = ? WHERE dataset = ? AND name = ?", (now, ds, name))

    def _forget_files(self, ds: int) -> None:
        for table in ("completion", "torn", "file", "tally"):
            self._db.execute(f"DELETE FROM {table} WHERE dataset = ?", (ds,))

    def _index(self, dataset: str, name: str, stop: int) -> bool:
        with self._transaction("DEFERRED"):
            start = self._offset(self._find_dataset(dataset), name)
        for chunk in chunks(self._rundir.file(dataset, name), dataset, name, start, stop):
            with self._transaction():
                ds = self._dataset_id(dataset)
                if self._offset(ds, name) != chunk.start:
                    return False
                self._take(ds, dataset, name, chunk)
        return True

    def _advance(self, dataset: str, name: str, end: int, new: int) -> None:
        """Note that a file was appended to. Its lines are read if they are not just the `new` ones of this commit."""
        ds = self._dataset_id(dataset)
        start = self._offset(ds, name)
        if end <= start:
            return
        path = self._rundir.file(dataset, name)
        if count_lines(path, start, end) == new:
            self._set_file(ds, dataset, name, end, new, 0)
            return
        for chunk in chunks(path, dataset, name, start, end):
            self._take(ds, dataset, name, chunk)

    def _take(self, ds: int, dataset: str, name: str, chunk: Chunk) -> None:
        """Record what a chunk of lines says, and that it was read."""
        if name == RAW:
            self._begun = chunk.begun
        torn = [(ds, one.row_id, one.completion_index, int(name == TOKENIZED)) for one in chunk.torn]
        torn += [(ds, one.row_id, one.completion_index, 0) for one in chunk.facts if self._lost_its_end(name, one)]
        self._db.executemany("INSERT OR IGNORE INTO torn VALUES(?, ?, ?, ?)", torn)
        whole = chunk.facts
        if self._db.execute("SELECT 1 FROM torn WHERE dataset = ? LIMIT 1", (ds,)).fetchone() is not None:
            whole = [one for one in whole if not self._is_torn(ds, one)]
        self._apply(ds, [(one.row_id, one.completion_index, one.slot) for one in whole])
        self._set_file(ds, dataset, name, chunk.end, chunk.lines, chunk.unreadable)

    def _lost_its_end(self, name: str, fact: LineFact) -> bool:
        """Raw lines are written first: where samples are whole and raw lines are not, somebody took some away."""
        return name == TOKENIZED and self._begun is not None and fact[:2] == self._begun[:2]

    def _is_torn(self, ds: int, fact: LineFact) -> bool:
        query = "SELECT 1 FROM torn WHERE dataset = ? AND row_id = ? AND idx = ? AND sample = 0"
        return self._db.execute(query, (ds, fact.row_id, fact.completion_index)).fetchone() is not None

    def _set_file(self, ds: int, dataset: str, name: str, end: int, lines: int, unreadable: int) -> None:
        path = self._rundir.file(dataset, name)
        self._db.execute(
            "INSERT INTO file VALUES(?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET offset = excluded.offset,"
            " lines = lines + excluded.lines, unreadable = unreadable + excluded.unreadable, mark = excluded.mark,"
            " time = excluded.time",
            (ds, name, end, lines, unreadable, mark_of(path, end), time_of(path, end)),
        )

    # --- counting ---

    def counts(self) -> list[DatasetCounts]:
        """Exact counts of every dataset, by name; costs the same for any number of rows."""
        with self._transaction("DEFERRED"):
            tally, files = self._tally(), defaultdict(dict)
            for ds, name, lines, unreadable in self._db.execute("SELECT dataset, name, lines, unreadable FROM file"):
                files[ds][name] = lines, unreadable
            datasets = self._db.execute(
                "SELECT id, name, rows, rows_final, samples_wanted FROM dataset ORDER BY name"
            ).fetchall()
        return [
            counts_of(name, rows, bool(final), wanted, tally.get(ds, ()), files[ds])
            for ds, name, rows, final, wanted in datasets
        ]

    def pending_total(self) -> int:
        """Completions wanted, of the rows registered so far, that have neither sample nor rejection."""
        return sum(counts.pending for counts in self.counts())

    def is_complete(self) -> bool:
        """Whether the input was read to its end, when it was last read, and nothing of it is pending."""
        counts = self.counts()
        return bool(counts) and all(one.rows_final and not one.pending for one in counts)

    def missing(self, dataset: str, limit: int, after: tuple[str, int] | None = None) -> list[Missing]:
        """Completions wanted of which the files say nothing, by row id; `after`: the last one of the page before."""
        key, index = (pack_row_id(after[0]), after[1]) if after else (b"", -1)
        with self._transaction("DEFERRED"):
            found = self._db.execute(_MISSING, (self._find_dataset(dataset), key, index, limit)).fetchall()
        return [Missing(unpack_row_id(row), i, file, number) for row, i, file, number in found]

    def on_file(self, dataset: str) -> dict[str, int]:
        """Completions (and verdicts) that the files hold, wanted or not: responses, samples, rejections."""
        with self._transaction("DEFERRED"):
            tally = self._tally().get(self._find_dataset(dataset), ())
        kinds = {"responses": HAS_RAW, "samples": State.TOKENIZED, "rejections": State.REJECTED}
        return {name: sum(n for _, _, state, _, n in tally if state == kind) for name, kind in kinds.items()}

    def indexed_bytes(self, dataset: str, name: str) -> int:
        """How far a file has been read."""
        with self._transaction("DEFERRED"):
            return self._offset(self._find_dataset(dataset), name)

    def discrepancies(self) -> list[str]:
        """What the ledger's own counters get wrong, one sentence each; [] if all add up. Scans it all."""
        with self._transaction("DEFERRED"):
            tally, wrong = self._tally(), []
            for ds, name, rows in self._db.execute("SELECT id, name, rows FROM dataset").fetchall():
                (found,) = self._db.execute("SELECT count(*) FROM row WHERE dataset = ?", (ds,)).fetchone()
                if found != rows:
                    wrong.append(f"dataset {name}: {rows:,} rows counted, {found:,} registered")
                counted = Counter({entry[:4]: entry[4] for entry in tally.get(ds, ())})
                if counted != (true := self._recount(ds)):
                    differing = sum(counted[key] != true[key] for key in counted.keys() | true.keys())
                    wrong.append(f"dataset {name}: {differing} counters of completions differ from what they count")
        return wrong

    def _recount(self, ds: int) -> Counter[tuple]:
        scan = self._db.execute(
            "SELECT c.row_id, idx, state, reason, raw_offset, row.seq IS NOT NULL FROM completion c"
            " LEFT JOIN row USING (dataset, row_id) WHERE c.dataset = ? ORDER BY c.row_id",
            (ds,),
        )
        tally: Counter[tuple] = Counter()
        for _, some in groupby(scan, key=lambda entry: entry[0]):
            entries = list(some)
            slots: Slots = {index: Slot(*slot) for _, index, *slot, _ in entries}
            tally.update((entries[0][5], *fact) for fact in facts(slots))
        return tally

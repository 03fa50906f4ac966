"""Which rows were seen while the input is read once, kept in the memory of the one process that reads it.

A row that stands where it stood needs no write: its number `seq` is noted as seen, and since an unchanged input comes
in the order of its seqs, that is one range. A row that moved or is new gets a fresh seq, higher than all before the
pass, which says the same.
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

StoredRow = tuple[int, int, int]  #: seq, file, number
_NOWHERE = (-1, -1)


@dataclass(slots=True)
class _Ranges:
    """Ascending numbers, as ranges."""

    starts: array = field(default_factory=lambda: array("q"))
    ends: array = field(default_factory=lambda: array("q"))

    @property
    def last(self) -> int:
        return self.ends[-1] if self.ends else -1

    def add(self, number: int) -> None:
        if self.ends and number == self.ends[-1] + 1:
            self.ends[-1] = number
        else:
            self.starts.append(number)
            self.ends.append(number)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number <= self.ends[at]


class Pass:
    """One reading of the input. `first_seq`: the highest seq given before it."""

    def __init__(self, number: int, first_seq: int):
        self.number = number
        self._first_seq = first_seq
        self._unmoved: dict[int, _Ranges] = {}
        self._count: dict[int, int] = {}
        self._behind: dict[int, tuple[int, int]] = {}  # dataset → (file, number) where this reading began

    def begin_behind(self, ds: int, place: tuple[int, int] = _NOWHERE, rows: int = 0) -> None:
        """The rows up to there are known: they count as seen. Before the first row of the dataset."""
        self._behind[ds], self._count[ds] = place, rows

    def rows_seen(self, ds: int) -> int:
        """How many rows of a dataset were seen."""
        return self._count.get(ds, 0)

    def has_seen(self, ds: int, row: StoredRow) -> bool:
        """Whether this row was seen."""
        seq, *place = row
        if seq > self._first_seq or tuple(place) <= self._behind.get(ds, _NOWHERE):
            return True
        return seq in self._unmoved.setdefault(ds, _Ranges())

    def batch(self, ds: int, seq: int) -> "Batch":
        """Some rows of a dataset; `seq` is the highest one given."""
        return Batch(self, ds, seq, self._unmoved.setdefault(ds, _Ranges()).last)

    def accept(self, batch: "Batch") -> None:
        """Remember a batch whose transaction is through."""
        ranges = self._unmoved.setdefault(batch.ds, _Ranges())
        for seq in batch.unmoved:
            ranges.add(seq)
        self._count[batch.ds] = self.rows_seen(batch.ds) + len(batch.seen)


class Batch:
    """Rows seen in one transaction; nothing of the pass changes before `Pass.accept`."""

    def __init__(self, of: Pass, ds: int, seq: int, last_unmoved: int):
        self.ds, self.seq = ds, seq
        self._pass, self._last_unmoved = of, last_unmoved
        self.seen: dict[bytes, None] = {}  #: keys, in order
        self.unmoved: list[int] = []
        self.moved: list[tuple[bytes, int, int, int]] = []  #: key, new seq, file, number
        self.new: list[bytes] = []  #: keys that the ledger did not have

    def has_seen(self, key: bytes, row: StoredRow | None) -> bool:
        """Whether this very row was seen in this pass."""
        return key in self.seen or (row is not None and self._pass.has_seen(self.ds, row))

    def see(self, key: bytes, row: StoredRow | None, file: int, number: int) -> None:
        """Note a row, given what the ledger has of it."""
        self.seen[key] = None
        if row is not None and row[1:] == (file, number) and row[0] > self._last_unmoved:
            self._last_unmoved = row[0]
            self.unmoved.append(row[0])
            return
        self.seq += 1
        self.moved.append((key, self.seq, file, number))
        if row is None:
            self.new.append(key)

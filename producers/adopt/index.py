"""The rows of the input with the prompts that this run would send for them, on temporary disk.

Disk: the prompts' ids, compressed, about 2 KB for a thousand of them.
"""

from array import array
from dataclasses import dataclass

from app.offline.scratch import Scratch, hash_of
from app.packing import compress, decompress
from app.reasons import Rejected
from app.tokenization import Renderer
from producers.catalog import InputRow

_SCHEMA = """
CREATE TABLE row(seq INTEGER PRIMARY KEY, dataset TEXT, row_id TEXT, source_id TEXT, number INTEGER,
    prompt BLOB,      -- hash of its ids; NULL: it has no prompt
    ids BLOB, refusal TEXT);
CREATE TABLE taken(seq INTEGER, idx INTEGER, before INTEGER NOT NULL, PRIMARY KEY(seq, idx)) WITHOUT ROWID;
"""
_INDICES = """
CREATE INDEX by_id ON row(dataset, row_id);
CREATE INDEX by_source ON row(dataset, source_id);
CREATE INDEX by_prompt ON row(dataset, prompt);
"""
_COLUMNS = "seq, dataset, row_id, source_id, number, prompt, refusal"


@dataclass(frozen=True, slots=True)
class IndexedRow:
    """A row of the input. prompt None: it gets no prompt, and `refusal` says why."""

    seq: int
    dataset: str
    row_id: str
    source_id: str
    number: int
    prompt: bytes | None
    refusal: str


class Index(Scratch):
    """All rows of the input. Fill it, `finish` it, then ask."""

    def __init__(self, samples: int):
        super().__init__(_SCHEMA)
        self._samples = samples
        self.rows = 0

    def add(self, row: InputRow, renderer: Renderer) -> None:
        """Render and register a row, with the completions that the run has of it already."""
        ids, refusal = _rendered(row, renderer)
        self.rows += 1
        self.run(
            "INSERT INTO row VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (self.rows, row.dataset, row.row_id, row.source_id, row.number, ids and hash_of(ids),
             ids and compress(ids), refusal),
        )  # fmt: skip
        for index in row.final:
            self.take(self.rows, index, before=True)

    def finish(self) -> None:
        """All rows are in."""
        for statement in filter(str.strip, _INDICES.split(";")):
            self.run(statement)

    def named(self, dataset: str, row_id: str = "", source_id: str = "") -> list[IndexedRow]:
        """Rows by their id, or by their own id."""
        column, value = ("row_id", row_id) if row_id else ("source_id", source_id)
        query = f"SELECT {_COLUMNS} FROM row WHERE dataset = ? AND {column} = ? ORDER BY seq LIMIT 100"
        return [IndexedRow(*found) for found in self.all(query, (dataset, value))]

    def with_prompt(self, dataset: str, ids: list[int]) -> list[IndexedRow]:
        """Rows that this run would send these ids for, those with a completion to get first."""
        query = (
            f"SELECT {_COLUMNS} FROM row WHERE dataset = ? AND prompt = ?"
            " ORDER BY (SELECT count(*) FROM taken WHERE taken.seq = row.seq) >= ?, seq LIMIT 100"
        )
        return [IndexedRow(*found) for found in self.all(query, (dataset, hash_of(packed(ids)), self._samples))]

    def prompt_ids(self, row: IndexedRow) -> list[int]:
        """The ids of a row's prompt."""
        ids = array("I")
        ids.frombytes(decompress(self.one("SELECT ids FROM row WHERE seq = ?", (row.seq,))[0]))
        return ids.tolist()

    def take(self, seq: int, index: int, *, before: bool = False) -> bool:
        """Note that a completion is there; False if it was. before: the run had it before the first line."""
        return self.run("INSERT OR IGNORE INTO taken VALUES(?, ?, ?)", (seq, index, before)) == 1

    def was_there(self, row: IndexedRow) -> bool:
        """Whether the run had a completion of the row before; said of one line for each."""
        one = "SELECT seq, idx FROM taken WHERE seq = ? AND before LIMIT 1"
        return self.run(f"UPDATE taken SET before = 0 WHERE (seq, idx) IN ({one})", (row.seq,)) == 1

    def free(self, row: IndexedRow) -> int | None:
        """The first completion of a row that is not there; None if all are."""
        taken = {index for (index,) in self.all("SELECT idx FROM taken WHERE seq = ?", (row.seq,))}
        return next((index for index in range(self._samples) if index not in taken), None)

    def counts(self) -> dict[str, int]:
        """rows, completions wanted that can be asked for, and those of them that are there."""
        (askable,) = self.one("SELECT count(*) FROM row WHERE prompt IS NOT NULL")
        (there,) = self.one("SELECT count(*) FROM taken WHERE idx < ?", (self._samples,))
        return {"rows": self.rows, "wanted": askable * self._samples, "there": there}


def packed(ids: list[int]) -> bytes:
    """Ids as 4-byte integers."""
    return array("I", ids).tobytes()


def _rendered(row: InputRow, renderer: Renderer) -> tuple[bytes | None, str]:
    if isinstance(row.result, Rejected):
        return None, str(row.result)
    try:
        return packed(renderer.render(row.result)), ""
    except Rejected as verdict:
        return None, str(verdict)

"""A directory through the proof and into the run: index the input, prove line after line, append what is trusted.

Trusted lines are written as the collector writes responses: raw line, sample or rejection, ledger, each safe before
the next. Cut short, it is done again: what the run has already is not taken twice.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from app.jsonl import Appender
from app.ledger import Committed, Ledger, State
from app.records import ResponseRecord, Sample, line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, sample_of
from app.settings import RunSettings
from app.tokenization import Renderer
from producers.adopt.foreign import ForeignFile, count_by_hand, lines_of
from producers.adopt.index import Index
from producers.adopt.proof import Doubt, Proof, Terms, Verdict
from producers.adopt.taken import Taker
from producers.catalog import rows_of
from producers.inputs import Dataset

TRUSTED, THERE = "trusted", "already_there"
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Claim:
    """What is to be proven: these files hold answers to this input under this recipe."""

    files: list[ForeignFile]
    names: Mapping[str, tuple[str, ...]]
    datasets: list[Dataset]
    settings: RunSettings
    terms: Terms
    taker: Taker
    model: str


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    files: list[ForeignFile]
    verdicts: Counter[str] = field(default_factory=Counter)  #: lines by verdict: trusted, already_there, or the doubt
    rows: int = 0
    wanted: int = 0
    there: int = 0  #: completions that need no generation now
    model: str = ""

    @property
    def doubtful(self) -> int:
        """Lines that are not trusted."""
        return sum(n for verdict, n in self.verdicts.items() if verdict not in (TRUSTED, THERE))

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        files = [
            {"file": str(one.path), "dataset": one.dataset, "read": one.is_read, "lines": one.lines,
             "blank": one.blank, "bytes": one.bytes, "verdicts": one.verdicts}
            for one in self.files
        ]  # fmt: skip
        return {
            "files": files, "verdicts": dict(sorted(self.verdicts.items())), "rows": self.rows, "wanted": self.wanted,
            "there": self.there, "to_generate": self.wanted - self.there, "model": self.model,
        }  # fmt: skip


def take_in(claim: Claim, renderer: Renderer, ledger: Ledger, report: Path | None, sink: "Sink | None") -> Outcome:
    """Prove every line; write trusted ones into `sink` (None: only look) and a line for each into `report`."""
    outcome = Outcome(claim.files)
    with ExitStack() as stack:
        index = stack.enter_context(Index(claim.settings.samples))
        for row in rows_of(claim.datasets, claim.settings, ledger):
            index.add(row, renderer)
        index.finish()
        said = stack.enter_context(report.open("wb")) if report else None
        names = [one.name for one in claim.datasets]
        proof = Proof(index, renderer, claim.terms, claim.taker, names, claim.model, claim.settings.samples)
        for file, number, verdict in _verdicts(claim, proof):
            word = _word(verdict, index)
            outcome.verdicts[word] += 1
            file.verdicts[word] = file.verdicts.get(word, 0) + 1
            if said is not None:
                said.write(_reported(file, number, verdict, word))
            if sink is not None and word == TRUSTED:
                sink.add(verdict.record)
        if sink is not None:
            sink.flush()
        outcome.rows, outcome.wanted, outcome.there = index.counts().values()
        outcome.model = proof.model
    return outcome


def _verdicts(claim: Claim, proof: Proof) -> Iterator[tuple[ForeignFile, int, Verdict]]:
    for file in claim.files:
        count_by_hand(file)
        for line in lines_of(file, claim.names) if file.is_read else ():
            if isinstance(line, int):
                yield file, line, Verdict(None, Doubt.NOT_JSON, "no whole JSON object")
            else:
                yield file, line.number, proof.of(line)


def _word(verdict: Verdict, index: Index) -> str:
    if verdict.doubt is Doubt.DUPLICATE and index.was_there(verdict.row):
        return THERE
    return verdict.doubt or TRUSTED


def _reported(file: ForeignFile, number: int, verdict: Verdict, word: str) -> bytes:
    row = verdict.row
    said = {
        "file": str(file.path), "line": number, "verdict": word, "detail": verdict.detail,
        "dataset": row.dataset if row else "", "row_id": row.row_id if row else "",
        "source_id": row.source_id if row else "", "row_number": row.number if row else 0,
    }  # fmt: skip
    return orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)


class Sink:
    """Trusted lines on their way into the run's files. before_first: called before anything of them is written."""

    def __init__(
        self, rundir: RunDir, ledger: Ledger, filters: SampleFilters, at: str, before_first: Callable[[], None]
    ):
        self._rundir, self._ledger, self._filters, self._at = rundir, ledger, filters, at
        self._before_first: Callable[[], None] | None = before_first
        self._waiting: list[ResponseRecord] = []

    def add(self, record: ResponseRecord) -> None:
        """Take a trusted line."""
        self._waiting.append(record)
        if len(self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what waits: raw lines, then what is derived from them, then the ledger."""
        if self._waiting and self._before_first is not None:
            self._before_first()
            self._before_first = None
        by_dataset: dict[str, list[ResponseRecord]] = {}
        for record in self._waiting:
            by_dataset.setdefault(record.dataset, []).append(record)
        for dataset, records in by_dataset.items():
            offsets = self._append(dataset, RAW, records)
            derived = [sample_of(record, self._filters, self._at) for record in records]
            self._append(dataset, TOKENIZED, [one for one in derived if isinstance(one, Sample)])
            self._append(dataset, REJECTED, [one for one in derived if not isinstance(one, Sample)])
            self._ledger.commit(
                Committed(
                    dataset, record.row_id, record.completion_index,
                    *((State.TOKENIZED, "") if isinstance(one, Sample) else (State.REJECTED, one.reason)), offset,
                )
                for record, one, offset in zip(records, derived, offsets, strict=True)
            )  # fmt: skip
        self._waiting.clear()

    def _append(self, dataset: str, name: str, records: list) -> list[int]:
        if not records:
            return []
        with Appender(self._rundir.file(dataset, name)) as file:
            offsets = file.append([line_of(record) for record in records])
            file.sync()
        return offsets

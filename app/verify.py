"""`headrace verify`: read every line of every file and prove the promises, believing no index and no counter.

Every violation has a kind; of each kind the first place is named and all are counted. What must be unique or must match
a line of another file goes, as 16-byte hashes, into a temporary SQLite file: memory stays flat for any number of rows.
Verify a run that nobody writes to: a response that waits for its sample is a violation here.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from app.groups import Group, Groups, Order, Place, slot_of_id, turns_of
from app.jsonl import Line, has_nul, is_blank, iterate, parse
from app.ledger import Ledger
from app.ledger.files import size_of
from app.lock import holder
from app.reasons import Stage
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.verify_lines import (
    SCHEMAS,
    field_problem,
    hash_of_sample,
    hash_of_text,
    rejection_problem,
    response_identity_problem,
    response_problem,
    sample_problem,
)
from app.verify_report import Report

_TABLES = """
CREATE TABLE raw(id BLOB PRIMARY KEY, sample BLOB NOT NULL, line INTEGER NOT NULL, answers INTEGER NOT NULL DEFAULT 0)
    WITHOUT ROWID;
CREATE TABLE key(key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE sample(id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE rejected(id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE turn(slot BLOB, turn INTEGER, turns INTEGER, line INTEGER, id BLOB, PRIMARY KEY(slot, turn)) WITHOUT ROWID;
CREATE TABLE apart(file TEXT, slot BLOB, turns INTEGER, line INTEGER, lines INTEGER, PRIMARY KEY(file, slot))
    WITHOUT ROWID;
"""
_APART = "INSERT INTO apart VALUES(?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET lines = lines + excluded.lines"


def verify(rundir: RunDir) -> Report:
    """Read a run's files and check them against each other, run.json and the ledger."""
    started = time.monotonic()
    report = Report(str(rundir.out))
    facts = _RunFacts.read(rundir, report)
    with TemporaryDirectory(prefix="headrace-verify-") as folder, _ledger(rundir, Path(folder)) as ledger:
        for dataset in sorted({*rundir.datasets_on_disk(), *facts.datasets, *(c.dataset for c in ledger.counts())}):
            _Dataset(rundir, dataset, report, facts).check(ledger)
        for sentence in ledger.discrepancies():
            report.add("ledger_disagrees", ".headrace/ledger.sqlite", 0, sentence)
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def _ledger(rundir: RunDir, scratch: Path) -> Iterator[Ledger]:
    """The run's ledger as it stands, or one made for the occasion: a run without one stays without."""
    with Ledger.open(rundir, None if rundir.ledger.exists() else scratch / "ledger.sqlite") as ledger:
        yield ledger


@dataclass(slots=True)
class _RunFacts:
    """What all lines of a run have in common: from run.json, else from the first line that says it."""

    recipe: str = ""
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)  #: fingerprint → what the server said of itself
    models: set[str] = field(default_factory=set)
    datasets: set[str] = field(default_factory=set)
    told: bool = False  #: run.json lists the servers

    @classmethod
    def read(cls, rundir: RunDir, report: Report) -> "_RunFacts":
        facts = cls()
        if not rundir.run_json.exists():
            return facts
        try:
            run = parse(rundir.run_json.read_bytes())
        except ValueError as exc:
            report.add("not_json", "run.json", 0, str(exc))
            return facts
        recipe = run.get("recipe_fingerprint") or run.get("recipe")
        facts.recipe = recipe.get("fingerprint", "") if isinstance(recipe, dict) else recipe or ""
        facts.servers = dict(run.get("servers") or {})
        facts.told = bool(facts.servers)
        inputs = run.get("datasets") or ()
        facts.datasets = {one["dataset"] for one in inputs if isinstance(one, dict) and "dataset" in one}
        return facts

    def strangeness(self, record: dict[str, Any]) -> tuple[str, str] | None:
        """How a raw line does not belong to this run: kind and detail."""
        self.recipe = self.recipe or record["recipe"]
        if record["recipe"] != self.recipe:
            return "foreign_recipe", f"recipe {record['recipe']}, and the run has {self.recipe}"
        if not self.servers:
            self.servers[record["server"]] = {}
        if record["server"] not in self.servers:
            return "foreign_server", f"server {record['server']}, and the run has {', '.join(sorted(self.servers))}"
        weights, answered = self.servers[record["server"]].get("weight_version"), _weights_of(record)
        if None not in (weights, answered) and answered != weights:
            return "foreign_weights", f"answered with weights {answered!r}, and its server has {weights!r}"
        if not self.told and not self.models:
            self.models.add(record["model"])
        if not self.told and record["model"] not in self.models:
            return "foreign_model", f"model {record['model']!r}, and the run has {', '.join(sorted(self.models))}"
        return None


def _weights_of(record: dict[str, Any]) -> Any:
    try:
        meta = orjson.loads(record["meta_info"])
    except orjson.JSONDecodeError:
        return None
    return meta.get("weight_version") if isinstance(meta, dict) else None


class _Dataset:
    """The check of one dataset's three files, in the order raw, tokenized, rejected."""

    def __init__(self, rundir: RunDir, name: str, report: Report, facts: _RunFacts):
        self._rundir, self._name, self._report, self._facts = rundir, name, report, facts
        self._index = sqlite3.connect("", isolation_level=None)  # a temporary file, gone with the connection
        self._index.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {_TABLES}")
        self._rejections = 0
        self._file = ""

    def check(self, ledger: Ledger) -> None:
        """All of it."""
        for name, check in ((RAW, self._raw), (TOKENIZED, self._sample), (REJECTED, self._rejection)):
            self._read(name, check, ledger)
        self._check_answers()
        self._check_turns()
        self._compare(ledger)
        self._index.close()

    def _found(self, kind: str, line: int, detail: str) -> None:
        self._report.add(kind, self._file, line, detail)

    def _note(self, problem: tuple[str, str] | None, line: int) -> None:
        if problem is not None:
            self._found(problem[0], line, problem[1])

    # --- lines ---

    def _read(self, name: str, check: Callable[[dict[str, Any], int], None], ledger: Ledger) -> None:
        path = self._rundir.file(self._name, name)
        self._file = f"{self._name}/{name}"
        if not path.exists():
            if ledger.indexed_bytes(self._name, name):
                self._found("missing_file", 0, "the ledger has read lines of it, and it is not there")
            return
        end, number, groups = 0, 0, Groups[tuple[int, Place]]()
        for number, line in enumerate(iterate(path), start=1):
            end = line.end
            record = self._record(name, line, number)
            if record is not None:
                check(record, number)
            if name != REJECTED:
                place = record and Place(slot_of_id(record["id"]), record["turn"], turns_of(record))
                self._note_apart(groups.add((number, place), place))
        self._note_apart(groups.end())
        self._report.lines[self._file] = number
        if (size := size_of(path)) > end:
            self._found("torn_tail", number + 1, f"{size - end:,} bytes at the end lack their newline")

    def _record(self, name: str, line: Line, number: int) -> dict[str, Any] | None:
        """The record of a line if its form is right."""
        try:
            record = parse(line.raw)
        except ValueError as exc:
            self._found(*_damage(line.raw, number, exc))
            return None
        problem = field_problem(record, SCHEMAS[name])
        if problem is None and record["dataset"] != self._name:
            problem = "wrong_dataset", f"dataset is {record['dataset']!r}"
        self._note(problem, number)
        return record if problem is None else None

    def _is_first(self, table: str, value: str) -> bool:
        statement = f"INSERT OR IGNORE INTO {table} VALUES(?)"
        return self._index.execute(statement, (hash_of_text(value),)).rowcount == 1

    # --- raw responses ---

    def _raw(self, record: dict[str, Any], number: int) -> None:
        for problem in (response_identity_problem(record), response_problem(record), self._facts.strangeness(record)):
            self._note(problem, number)
        if not self._is_first("key", record["key"]):
            self._found("duplicate_key", number, f"key {record['key']} was there before")
        sample = hash_of_sample(record["prompt_token_ids"], record["output_ids"], record["finish_reason"])
        row = (hash_of_text(record["id"]), sample, number)
        if not self._index.execute("INSERT OR IGNORE INTO raw VALUES(?, ?, ?, 0)", row).rowcount:
            self._found("duplicate_id", number, f"id {record['id']} was there before")
        if record["turns"] > 1:
            slot = hash_of_text(slot_of_id(record["id"]))
            turn = (slot, record["turn"], record["turns"], number, row[0])
            self._index.execute("INSERT OR IGNORE INTO turn VALUES(?, ?, ?, ?, ?)", turn)

    # --- samples ---

    def _sample(self, record: dict[str, Any], number: int) -> None:
        problem = sample_problem(record)
        self._note(problem, number)
        if not self._is_first("sample", record["id"]):
            self._found("duplicate_id", number, f"id {record['id']} was there before")
            return
        key = hash_of_text(record["id"])
        raw = self._index.execute("SELECT sample, line FROM raw WHERE id = ?", (key,)).fetchone()
        if raw is None:
            self._found("sample_without_response", number, f"{RAW} has no line with id {record['id']}")
            return
        cut = record["num_prompt_tokens"]
        ids = record["input_ids"]
        if problem is None and hash_of_sample(ids[:cut], ids[cut:], record["finish_reason"]) != raw[0]:
            self._found("sample_differs", number, f"not the ids, counts or finish reason of {RAW}, line {raw[1]}")
        self._index.execute("UPDATE raw SET answers = answers + 1 WHERE id = ?", (key,))

    # --- rejections ---

    def _rejection(self, record: dict[str, Any], number: int) -> None:
        self._note(rejection_problem(record, self._facts.recipe), number)
        if not self._is_first("rejected", record["id"]):
            self._found("duplicate_id", number, f"id {record['id']} was there before")
            return
        self._rejections += 1
        after_generation = record["stage"] == Stage.SAMPLE
        ids = {hash_of_text(record["id"])}  # one rejection stands for all turns of its row
        slot = hash_of_text(slot_of_id(record["id"]))
        ids.update(key for (key,) in self._index.execute("SELECT id FROM turn WHERE slot = ?", (slot,)))
        statement = "UPDATE raw SET answers = answers + ? WHERE id = ?"
        found = sum(self._index.execute(statement, (after_generation, key)).rowcount for key in ids)
        if after_generation and not found:
            self._found("rejection_without_response", number, f"{RAW} has no line with id {record['id']}")
        if found and not after_generation:
            self._found("rejected_and_generated", number, f"rejected before generation, and {RAW} has {record['id']}")

    # --- across lines and files ---

    def _check_answers(self) -> None:
        self._file = f"{self._name}/{RAW}"
        for line, answers in self._index.execute("SELECT line, answers FROM raw WHERE answers <> 1 ORDER BY line"):
            if answers:
                self._found("two_verdicts", line, "this response has both a sample and a rejection")
            else:
                self._found("response_without_sample", line, "neither sample nor rejection; running again derives it")

    def _note_apart(self, groups: Iterable[Group[tuple[int, Place]]]) -> None:
        """Remember lines of this file whose completion is not whole where they stand."""
        for lines, order in groups:
            if order is not Order.WHOLE:
                number, place = lines[0]
                slot = hash_of_text(place.completion)
                self._index.execute(_APART, (self._file, slot, place.turns, number, len(lines)))

    def _check_turns(self) -> None:
        query = "SELECT min(line), count(*) n, max(turns) m FROM turn GROUP BY slot HAVING n <> m ORDER BY 1"
        for line, have, turns in self._index.execute(query):
            self._found("incomplete_turns", line, f"{have} of {turns} turns")
        query = "SELECT file, line, turns FROM apart WHERE lines >= turns ORDER BY file, line"
        for file, line, turns in self._index.execute(query):
            detail = f"its {turns} turns do not stand together, in their order; the next run puts them right"
            self._report.add("turns_apart", file, line, detail)

    def _compare(self, ledger: Ledger) -> None:
        """What the files hold, against what the ledger counts once it has read what is new to it."""
        self._file = ".headrace/ledger.sqlite"
        ledger.catch_up()
        if self._index.execute("SELECT 1 FROM turn LIMIT 1").fetchone() is not None:
            return  # several turns: the ledger counts completions, not lines
        counted = ledger.on_file(self._name)
        (samples,) = self._index.execute("SELECT count(*) FROM sample").fetchone()
        (responses,) = self._index.execute("SELECT count(*) FROM raw").fetchone()
        truth = {"responses": responses, "samples": samples, "rejections": self._rejections}
        wrong = {what: n for what, n in truth.items() if counted[what] != n}
        for what, n in wrong.items():
            detail = f"dataset {self._name}: {counted[what]:,} {what} in the ledger, {n:,} in the files"
            self._found("ledger_disagrees", 0, f"{detail}; it is a cache: the next start reads the files anew")
        if wrong and holder(self._rundir.lock) is None and holder(self._rundir.writer_lock) is None:
            ledger.read_anew([self._name])


def _damage(raw: bytes, number: int, exc: ValueError) -> tuple[str, int, str]:
    """What is wrong with a line that cannot be parsed: kind, line number, detail."""
    if is_blank(raw):
        return "blank_line", number, "nothing in it"
    if has_nul(raw):
        return "nul_bytes", number, f"{raw.count(0):,} NUL bytes: a torn write on a network filesystem"
    return "not_json", number, str(exc)

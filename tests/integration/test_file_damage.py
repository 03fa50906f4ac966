"""Damage done by hand to the files of a run: what verify says, and what the next run makes of it.

Both must be what docs/operating/files.md tells people: its first table is the list of cases.
"""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable

import orjson
import pytest

from app.cli.prepare import refuse_foreign_lines
from app.errors import UsageError
from app.ledger import Ledger
from app.manifest import read_run_file
from app.packing import compress
from app.reasons import Reason
from app.records import RejectedRecord, line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters
from app.store import scripts
from app.store.keys import DEATHS, EndpointKeys, RunKeys
from app.verify import verify
from tests.belt import ROOT
from tests.run_on_disk import RECIPE, a_row, digest, rejection, response, write, write_completed
from workers.collector import Collector

KEYS, NOWHERE = RunKeys("run1"), EndpointKeys("none")
ROWS, REFUSED, IN_FLIGHT = 7, 5, 6  #: rows of the input; the one rejected before generation; the one not finished
REDONE = {"nothing that was finished is redone": set(), "that row is redone": {1}, "all rows are redone": set(range(5))}
NEXT = line_of(response(a_row(IN_FLIGHT)))


def table() -> dict[str, tuple[set[str], str, set[str]]]:
    """The documented damage → what verify says, what the next run does, what verify says after it."""
    lines = (ROOT / "docs" / "operating" / "files.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {
        row[0]: (set(re.findall("`([a-z_]+)`", row[1])), row[2], set(re.findall("`([a-z_]+)`", row[3])))
        for row in rows if len(row) == 4 and row[0] != "damage"
    }  # fmt: skip


def add(name: str, data: bytes) -> Callable[[RunDir], None]:
    """Bytes at the end of a file."""

    def do(rundir: RunDir) -> None:
        with rundir.file("chat", name).open("ab") as file:
            file.write(data)

    return do


def spoil(*names: str, nul: bool = False) -> Callable[[RunDir], None]:
    """The second line of files becomes garbage or NULs of the same length."""

    def do(rundir: RunDir) -> None:
        for name in names:
            path = rundir.file("chat", name)
            lines = path.read_bytes().splitlines(keepends=True)
            lines[1] = (b"\0" if nul else b"x") * (len(lines[1]) - 1) + b"\n"
            path.write_bytes(b"".join(lines))

    return do


def unread(rundir: RunDir) -> None:
    raw, samples = (rundir.file("chat", name) for name in (RAW, TOKENIZED))
    lines = raw.read_bytes().splitlines(keepends=True)
    lines[1] = re.sub(rb'"output_ids":\[[0-9,]*\]', b'"output_ids":"7"', lines[1])
    raw.write_bytes(b"".join(lines))
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join([lines[0], *lines[2:]]))


def delete(name: str) -> Callable[[RunDir], None]:
    """A file is gone."""
    return lambda rundir: rundir.file("chat", name).unlink()


def tear_sample(rundir: RunDir) -> None:
    write_completed(rundir, response(a_row(IN_FLIGHT)))
    path = rundir.file("chat", TOKENIZED)
    path.write_bytes(path.read_bytes()[:-30])


def double(rundir: RunDir) -> None:
    path = rundir.file("chat", RAW)
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])


def rewrite(**how: bool) -> Callable[[RunDir], None]:
    """Every line as a script of somebody's would write it."""

    def do(rundir: RunDir) -> None:
        for name in (RAW, TOKENIZED, REJECTED):
            path = rundir.file("chat", name)
            path.write_text("".join(f"{json.dumps(json.loads(line), **how)}\n" for line in path.open()))

    return do


def newer_ledger(rundir: RunDir) -> None:
    with sqlite3.connect(rundir.ledger) as db:
        db.execute("PRAGMA user_version = 99")


def foreign(rundir: RunDir) -> None:
    rundir.file("chat", RAW).write_bytes(b"".join(line_of(response(a_row(n), recipe="f" * 16)) for n in range(5)))


DAMAGE: dict[str, Callable[[RunDir], object]] = {
    "the last raw line is torn in the middle of a character": add(RAW, NEXT[:-20] + "é".encode()[:1]),
    "a torn raw line, then a blank one": add(RAW, NEXT[:-20] + b"\n\n"),
    "a good raw line glued to a torn one": add(RAW, NEXT[:-20] + NEXT),
    "NULs at the end of the raw file": add(RAW, b"\0" * 4096),
    "the last sample is torn, its raw line is whole": tear_sample,
    "a sample in the middle is garbage": spoil(TOKENIZED),
    "a raw line in the middle is garbage": spoil(RAW),
    "a raw line and its sample are NULs": spoil(RAW, TOKENIZED, nul=True),
    "a raw line whose sample is gone has text for token ids": unread,
    "raw_responses.jsonl is deleted": delete(RAW),
    "tokenized_data.jsonl is deleted": delete(TOKENIZED),
    "rejected.jsonl is deleted": delete(REJECTED),
    "the dataset's folder is deleted": lambda rundir: shutil.rmtree(rundir.out / "chat"),
    "a raw line stands twice": double,
    "another program wrote the files anew, with spaces": rewrite(),
    "another program wrote the files anew, with the keys sorted": rewrite(sort_keys=True),
    "the ledger is deleted": lambda rundir: rundir.ledger.unlink(),
    "the ledger is garbage": lambda rundir: rundir.ledger.write_bytes(b"garbage" * 1000),
    "the ledger is a newer version's": newer_ledger,
    "the file of another run lies there": foreign,
}


@pytest.fixture
def rundir(tmp_path):
    """Seven rows: five samples, one rejected before generation, one not finished."""
    rundir = RunDir(tmp_path / "out")
    write_completed(rundir, *[response(a_row(n)) for n in range(5)])
    write(rundir, [rejection(a_row(REFUSED), Reason.TOO_LONG)])
    run = {
        "run_id": "run1", "created_at": "2026-01-01", "headrace": "0", "recipe_fingerprint": RECIPE,
        "recipe": {"tokenizer": {}, "rendering": {}, "sampling": {}}, "servers": {"srv1": {}},
        "datasets": [{"dataset": "chat", "path": "/x", "size_bytes": 1}],
    }  # fmt: skip
    rundir.run_json.write_bytes(orjson.dumps(run))
    missing_rows(rundir)
    return rundir


def missing_rows(rundir: RunDir) -> list[int]:
    """What a producer finds missing: it reads the input once."""
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        ledger.begin_pass()
        seen = ledger.see_rows("chat", [(digest(n), 0, n + 1) for n in range(ROWS)])
        ledger.end_pass("chat")
    return [n for n, row in enumerate(seen) if not row.final and not row.row_verdict]


def collect(rundir: RunDir, client) -> None:
    """A collector starts, writes what has arrived, and stops."""
    collector = Collector(rundir, client, "run1", SampleFilters())
    collector.stopping.set()
    collector.run()


def run_again(rundir: RunDir, client) -> set[int]:
    """Collector, producer, workers, collector; returns the rows that were generated, the unfinished one left out."""
    refuse_foreign_lines(rundir, read_run_file(rundir.run_json))
    collect(rundir, client)
    generated = set()
    for n in missing_rows(rundir):
        record = rejection(a_row(n), Reason.TOO_LONG) if n == REFUSED else response(a_row(n))
        kind = "rejected" if isinstance(record, RejectedRecord) else "response"
        generated |= {n} if kind == "response" else set()
        keys = [KEYS.responses, KEYS.payload("chat"), KEYS.claims("chat"), KEYS.holders("chat"), KEYS.published("chat"),
                NOWHERE.leases, NOWHERE.lease_info, DEATHS]  # fmt: skip
        scripts.call(client, "publish", keys, [record.key, "chat", kind, compress(line_of(record)), "", ""])
    collect(rundir, client)
    return generated - {IN_FLIGHT}


def test_every_damage_is_documented_and_every_documented_damage_is_tested():
    """The table and the cases are the same."""
    assert table().keys() == DAMAGE.keys()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_has_its_documented_outcome(damage, rundir, redis_client):
    """As the table says; whatever it is, no row is lost and none stands twice."""
    said, does, said_after = table()[damage]
    DAMAGE[damage](rundir)
    report = verify(rundir)
    assert set(report.findings) == said, report.render()
    if "refuses to start" in does:
        with pytest.raises(UsageError, match=r"chat/raw_responses.jsonl"):
            run_again(rundir, redis_client)
        return
    assert run_again(rundir, redis_client) == next(rows for words, rows in REDONE.items() if words in does)
    report = verify(rundir)
    assert set(report.findings) == said_after, report.render()
    assert missing_rows(rundir) == []
    if damage != "a raw line stands twice":
        for name in (RAW, TOKENIZED, REJECTED):
            lines = [line for line in rundir.file("chat", name).read_bytes().splitlines() if line.startswith(b"{")]
            found = [orjson.loads(line)["id"] for line in lines]
            assert len(found) == len(set(found))

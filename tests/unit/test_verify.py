"""app.verify: every damage that a hand can do is found, with its file and line."""

import sqlite3
from collections.abc import Callable

import orjson
import pytest

from app.cli.inspect import verify_command
from app.errors import VerificationFailed
from app.ledger import Ledger
from app.lock import hold
from app.reasons import Reason
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.verify import Report, verify
from tests.run_on_disk import RECIPE, a_row, digest, rejection, response, write, write_completed


@pytest.fixture
def rundir(tmp_path):
    """A complete run of six rows: four samples, one rejected after generation, one before."""
    rundir = RunDir(tmp_path / "out")
    write_completed(rundir, *[response(a_row(n)) for n in range(4)], response(a_row(4), output_ids=[2]))
    write(rundir, [rejection(a_row(5), Reason.TOO_LONG)])
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        ledger.begin_pass()
        ledger.see_rows("chat", [(digest(n), 0, n + 1) for n in range(6)])
        ledger.end_pass("chat")
    return rundir


def change(rundir: RunDir, name: str, edit: Callable[[list[bytes]], object]) -> None:
    """Edit the lines of a file by hand; `edit` changes the list, or returns a new one."""
    path = rundir.file("chat", name)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(edit(lines) or lines))


def set_fields(rundir: RunDir, name: str, line: int, **fields: object) -> None:
    """Change fields of the line with this number."""

    def edit(lines: list[bytes]) -> None:
        lines[line - 1] = orjson.dumps(orjson.loads(lines[line - 1]) | fields) + b"\n"

    change(rundir, name, edit)


def place(report: Report, kind: str) -> tuple[str, int]:
    """File and line of the first violation of a kind."""
    assert kind in report.findings, report.render()
    return report.findings[kind].file, report.findings[kind].line


def test_a_good_run_is_good(rundir):
    """Nothing found, all lines read, the report says so in both forms."""
    report = verify(rundir)
    assert report.ok, report.render()
    assert report.lines == {f"chat/{RAW}": 5, f"chat/{TOKENIZED}": 4, f"chat/{REJECTED}": 2}
    assert report.to_json()["ok"]
    assert "11 lines in 3 files: every promise holds" in report.render()


def test_a_run_without_a_ledger_is_good_and_stays_without(rundir):
    """The ledger is a cache; verifying does not need it, and leaves no trace."""
    for file in rundir.private.iterdir():
        file.unlink()
    assert verify(rundir).ok
    assert not list(rundir.private.iterdir())


def test_who_could_write_meanwhile_is_named(rundir, monkeypatch):
    """What a collector is about to finish looks like damage: the sentence says so, and only while there is one."""
    monkeypatch.setattr("app.cli.inspect.existing_run", lambda _: (rundir, None))
    change(rundir, TOKENIZED, lambda lines: lines[:-1])
    with hold(rundir.writer_lock, "writing its files"), pytest.raises(VerificationFailed, match="writing its files"):
        verify_command(rundir.out, as_json=True)
    with pytest.raises(VerificationFailed, match="breaks a promise"):
        verify_command(rundir.out, as_json=True)


def test_a_torn_tail_is_found(rundir):
    """Bytes after the last newline."""
    change(rundir, RAW, lambda lines: lines.append(b'{"key":'))
    assert place(verify(rundir), "torn_tail") == (f"chat/{RAW}", 6)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"\0\0\0\n", "nul_bytes"), (b"garbage\n", "not_json"), (b"\n", "blank_line"), (b'{"x":NaN}\n', "not_json"),
        (b'{"x":"\xff"}\n', "not_json"), (b"[]\n", "not_json"), (b'{"x":1}\n', "wrong_keys"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [RAW, TOKENIZED, REJECTED])
def test_a_line_that_is_no_record_is_found(rundir, name, line, kind):
    """NULs, garbage, blank lines, NaN, bad UTF-8, other objects: in any file, at their line."""
    change(rundir, name, lambda lines: lines.insert(1, line))
    assert place(verify(rundir), kind) == (f"chat/{name}", 2)


@pytest.mark.parametrize("name", [RAW, TOKENIZED, REJECTED])
def test_a_duplicated_line_is_found(rundir, name):
    """An id stands once in each file."""
    change(rundir, name, lambda lines: lines.append(lines[0]))
    report = verify(rundir)
    assert place(report, "duplicate_id")[0] == f"chat/{name}"
    assert ("duplicate_key" in report.findings) == (name == RAW)


@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        (RAW, "sample_without_response", (f"chat/{TOKENIZED}", 1)),
        (TOKENIZED, "response_without_sample", (f"chat/{RAW}", 1)),
        (REJECTED, "response_without_sample", (f"chat/{RAW}", 5)),
    ],
)
def test_a_deleted_line_is_found(rundir, name, kind, where):
    """Every response has its sample or rejection, and these have their response."""
    change(rundir, name, lambda lines: lines[1:])
    assert place(verify(rundir), kind) == where


def test_a_rejection_after_generation_needs_its_response(rundir):
    """The raw line of a rejected completion is evidence: it must be there."""
    change(rundir, RAW, lambda lines: lines[:4])
    assert place(verify(rundir), "rejection_without_response") == (f"chat/{REJECTED}", 1)


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        (TOKENIZED, {"input_ids": [5, 6, 7, 8, 99, 2]}, "sample_differs"),
        (TOKENIZED, {"num_prompt_tokens": 2, "num_output_tokens": 4, "loss_mask": [0, 0] + [1] * 4}, "sample_differs"),
        (TOKENIZED, {"finish_reason": "length"}, "sample_differs"),
        (TOKENIZED, {"loss_mask": [0, 0, 1, 1, 1, 1]}, "wrong_mask"),
        (TOKENIZED, {"loss_mask": [0, 0, 0, 1, 1, 1, 1]}, "wrong_mask"),
        (TOKENIZED, {"num_output_tokens": 4}, "wrong_count"),
        (TOKENIZED, {"loss_mask": [0, 0, 0, True, 1, 1]}, "wrong_type"),
        (TOKENIZED, {"metadata": "no json"}, "wrong_type"),
        (TOKENIZED, {"dataset": "other"}, "wrong_dataset"),
        (TOKENIZED, {"primary_id": "chat:0"}, "wrong_id"),
        (RAW, {"output_ids": [8, 9, 3]}, "sample_differs"),
        (RAW, {"output_ids": [8, -9, 2]}, "wrong_type"),
        (RAW, {"num_output_tokens": 4}, "wrong_count"),
        (RAW, {"finish_reason": "abort"}, "bad_finish_reason"),
        (RAW, {"finish_reason": "length"}, "bad_finish_reason"),  # and matched is still "2"
        (RAW, {"source_id": None}, "wrong_type"),
        (RAW, {"latency_seconds": 1}, "wrong_type"),
        (RAW, {"extra": 1}, "wrong_keys"),
        (RAW, {"dataset": "other"}, "wrong_dataset"),
        (RAW, {"row_id": a_row(9)}, "wrong_id"),
        (RAW, {"key": "0" * 32}, "wrong_key"),
        (RAW, {"server": "srv2"}, "foreign_server"),
        (RAW, {"model": "another"}, "foreign_model"),
        (REJECTED, {"reason": "mood"}, "bad_reason"),
        (REJECTED, {"stage": "read"}, "bad_reason"),
        (REJECTED, {"key": "0" * 32}, "wrong_key"),
        (REJECTED, {"row_id": a_row(9)}, "wrong_id"),
        (REJECTED, {"row_number": "1"}, "wrong_type"),
    ],
)
def test_an_edited_field_is_found(rundir, name, fields, kind):
    """Tokens, masks, counts, types, names, keys: at the line that was edited (or whose sample differs)."""
    set_fields(rundir, name, 2, **fields)
    file, line = place(verify(rundir), kind)
    assert (file, line) == (f"chat/{TOKENIZED if kind == 'sample_differs' else name}", 2)


def test_a_line_of_another_run_is_found(rundir):
    """One recipe per run: a line that is right by itself, and another run's."""
    write_completed(rundir, response(a_row(7), recipe="f" * 16))
    assert place(verify(rundir), "foreign_recipe") == (f"chat/{RAW}", 6)


def test_run_json_says_which_recipe_and_servers_are_the_runs(rundir):
    """With it, the first line is no longer believed, and several servers may be the run's."""
    set_fields(rundir, RAW, 2, server="srv2", model="teacher-b")
    run = {"recipe_fingerprint": RECIPE, "servers": {"srv1": {}, "srv2": {}}, "datasets": [{"dataset": "chat"}]}
    rundir.run_json.write_bytes(orjson.dumps(run))
    assert verify(rundir).ok
    rundir.run_json.write_bytes(orjson.dumps(run | {"recipe_fingerprint": "another"}))
    assert verify(rundir).findings["foreign_recipe"].count == 5


def test_an_answer_of_other_weights_is_found(rundir):
    """Each answer says which weights made it: those of its server, as run.json lists it."""
    set_fields(rundir, RAW, 2, meta_info='{"weight_version": "v2"}')
    run = {"recipe_fingerprint": RECIPE, "servers": {"srv1": {"weight_version": "v1"}}, "datasets": []}
    rundir.run_json.write_bytes(orjson.dumps(run))
    assert place(verify(rundir), "foreign_weights") == (f"chat/{RAW}", 2)


def test_two_verdicts_on_one_response_are_found(rundir):
    """A response has a sample or a rejection, not both; and what was generated was not rejected before."""
    write(rundir, [rejection(a_row(0), Reason.TRUNCATED, index=0), rejection(a_row(1), Reason.REFUSED, index=0)])
    report = verify(rundir)
    assert place(report, "two_verdicts") == (f"chat/{RAW}", 1)
    assert place(report, "rejected_and_generated") == (f"chat/{REJECTED}", 4)


def test_a_missing_file_is_found(rundir):
    """A file of which lines were indexed is gone."""
    rundir.file("chat", TOKENIZED).unlink()
    assert place(verify(rundir), "missing_file") == (f"chat/{TOKENIZED}", 0)


def test_turns_that_are_not_all_there_are_found(rundir):
    """All or nothing, by completion."""
    write_completed(rundir, *[response(a_row(8), turn=turn, turns=2) for turn in range(2)])
    assert verify(rundir).ok
    write_completed(rundir, response(a_row(9), turn=0, turns=2))
    assert place(verify(rundir), "incomplete_turns") == (f"chat/{RAW}", 8)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE tally SET n = n + 1 WHERE state = 3",
        "DELETE FROM completion WHERE idx = -1",
        "UPDATE dataset SET rows = 7",
        "INSERT INTO completion VALUES(1, x'000000000000000000000000', 0, 3, '', 5)",
        "DELETE FROM tally; DELETE FROM completion",
    ],
)
def test_a_ledger_that_disagrees_is_found(rundir, damage):
    """Its counters against its entries, and both against the files."""
    with sqlite3.connect(rundir.ledger) as db:
        db.executescript(damage)
    assert place(verify(rundir), "ledger_disagrees") == (".headrace/ledger.sqlite", 0)


def test_each_kind_is_reported_once_with_its_count_and_first_place(rundir):
    """A million damaged lines are one line of the report."""
    for line in (2, 3, 4):
        set_fields(rundir, TOKENIZED, line, loss_mask=[1] * 6)
    report = verify(rundir)
    assert [(one.kind, one.count, one.line) for one in report.findings.values()] == [("wrong_mask", 3, 2)]
    assert report.to_json()["violations"][0]["detail"] == "loss_mask is not 3 times 0 and 3 times 1"
    assert "wrong_mask × 3; first in chat/tokenized_data.jsonl, line 2" in report.render()

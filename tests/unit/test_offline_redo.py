"""app.offline: samples derived again, rows made pending again, files replaced as one."""

import json
import os
import signal
import subprocess
import sys

import orjson
import pytest

from app.allowances import Allowances
from app.errors import UsageError
from app.ledger import Ledger
from app.lock import hold
from app.manifest import Recipe, RunFile, read_run_file, write_run_file
from app.offline.redo import redo
from app.offline.retry import Retry, retry
from app.offline.switch import alone, finish_switch
from app.packing import unpack_task
from app.reasons import Reason
from app.records import Conversation
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED, RunDir
from app.samples import SampleFilters
from app.tokenization import Renderer, RenderOptions
from app.verify import verify
from producers.rendering import Row, render
from tests.belt import ROOT, manifest
from tests.run_on_disk import AT, RECIPE, a_row, digest, rejection, response, write, write_completed

CUT = {"finish_reason": "length", "matched": ""}
KILL_POINTS = ("staged", "journal", "renamed 1", "renamed 2", "renamed 3", "ledger")


@pytest.fixture
def rundir(tmp_path):
    """A complete run of eight rows: five good answers, one cut, one empty, one rejected before generation."""
    rundir = RunDir(tmp_path / "out")
    write_completed(
        rundir, *[response(a_row(n)) for n in range(5)], response(a_row(5), **CUT), response(a_row(6), output_ids=[2])
    )
    write(rundir, [rejection(a_row(7), Reason.TOO_LONG)])
    recipe = Recipe(tokenizer={}, rendering={}, sampling={"max_new_tokens": 64, "min_new_tokens": 0})
    filters = SampleFilters(think_open_ids=(100,), think_close_ids=(101,))
    write_run_file(rundir.run_json, RunFile(
        run_id="r", created_at=AT, headrace="0", recipe=recipe, recipe_fingerprint=RECIPE, filters=filters.to_json(),
    ))  # fmt: skip
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        ledger.begin_pass()
        ledger.see_rows("chat", [(digest(n), 0, n + 1) for n in range(8)])
        ledger.end_pass("chat")
    return rundir


def lines(rundir: RunDir, name: str) -> list[dict]:
    """The records of a file."""
    path = rundir.file("chat", name)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def counts(rundir: RunDir):
    """What the ledger counts."""
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        return ledger.counts()[0]


def redone(rundir: RunDir, **filters) -> None:
    """Derive samples again with these filters."""
    with alone(rundir, "testing"):
        redo(rundir, read_run_file(rundir.run_json), SampleFilters(**filters))


def retried(rundir: RunDir, reason: Reason, max_new_tokens: int | None = None) -> dict[str, int]:
    """Make rows pending again."""
    with alone(rundir, "testing"):
        return retry(rundir, read_run_file(rundir.run_json), Retry(reason, max_new_tokens))


def headrace(*arguments: object, kill_at: str = "") -> subprocess.CompletedProcess:
    """A real command, killed at a named point."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HEADRACE_TEST_KILL_AT": kill_at}, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_samples_are_derived_again_with_other_filters(rundir):
    """What a filter drops has a rejection with its reason; verdicts from before generation stay; verify holds."""
    raw = rundir.file("chat", RAW).read_bytes()
    redone(rundir, truncated="drop")
    assert [one["reason"] for one in lines(rundir, REJECTED)] == ["too_long", "truncated", "empty_output"]
    assert len(lines(rundir, TOKENIZED)) == 5
    assert rundir.file("chat", RAW).read_bytes() == raw
    assert verify(rundir).ok, verify(rundir).render()


def test_redoing_with_the_old_filters_gives_the_old_samples(rundir):
    """Derived is derived: there and back is the same bytes."""
    before = rundir.file("chat", TOKENIZED).read_bytes()
    redone(rundir, max_sample_tokens=1)
    assert rundir.file("chat", TOKENIZED).read_bytes() == b""
    redone(rundir)
    assert rundir.file("chat", TOKENIZED).read_bytes() == before


def test_the_filters_stand_in_run_json(rundir):
    """Whoever reads the samples knows what they have passed."""
    redone(rundir, truncated="drop", max_repeat=64)
    said = SampleFilters.from_json(read_run_file(rundir.run_json).filters)
    assert said == SampleFilters(truncated="drop", max_repeat=64)


def test_redoing_keeps_the_rows_of_the_input(rundir):
    """The ledger reads the files anew, not the input: a complete run stays complete."""
    redone(rundir, truncated="drop")
    now = counts(rundir)
    assert (now.rows, now.rows_final, now.tokenized, now.rejected, now.pending) == (8, True, 5, 3, 0)


def test_redoing_derives_what_a_crash_left_underived_and_cuts_its_torn_end(rundir):
    """A raw line without sample gets one; half a line goes."""
    write(rundir, [response(a_row(8))])
    with rundir.file("chat", RAW).open("ab") as file:
        file.write(b'{"key":"torn')
    redone(rundir)
    assert len(lines(rundir, TOKENIZED)) == 7
    assert verify(rundir).ok, verify(rundir).render()


def test_a_raw_line_that_stands_twice_gives_one_sample(rundir):
    """Nothing reaches the trainer twice, and the doubled line is counted."""
    write(rundir, [response(a_row(0))])
    done = json.loads(headrace("tokenize", rundir.out, "--json").stdout)["datasets"][0]
    assert (done["responses"], done["samples"], done["doubled"], done["gone"]) == (8, 6, 1, 0)
    assert len({one["id"] for one in lines(rundir, TOKENIZED)}) == len(lines(rundir, TOKENIZED)) == 6


def test_samples_that_go_because_their_raw_line_is_gone_are_told(rundir):
    """They cannot be derived again: whoever lost the raw file by mistake hears of it."""
    path = rundir.file("chat", RAW)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))
    done = headrace("tokenize", rundir.out)
    assert "2 samples had no raw line" in done.stdout


@pytest.mark.parametrize(
    "change", [{"output_ids": "12"}, {"output_ids": [1.5]}, {"finish_reason": "abort"}, {"text": 7}]
)
def test_a_raw_line_that_says_what_none_may_is_left_out_and_counted(rundir, change):
    """No sample is made of it, and nothing stops at it."""
    write(rundir, [response(a_row(8), **change)])
    done = headrace("tokenize", rundir.out, "--json")
    assert json.loads(done.stdout)["datasets"][0]["unreadable"] == 1, done.stderr
    assert len(lines(rundir, TOKENIZED)) == 6


def test_files_that_another_program_wrote_anew_are_redone_and_asked_again_as_ever(rundir):
    """Spaces after commas and colons hide no rejection and no cut answer."""
    redone(rundir, truncated="drop")
    for name in (RAW, TOKENIZED, REJECTED):
        path = rundir.file("chat", name)
        path.write_text("".join(f"{json.dumps(json.loads(line))}\n" for line in path.open()))
    redone(rundir)
    assert [one["reason"] for one in lines(rundir, REJECTED)] == ["too_long", "empty_output"]
    assert retried(rundir, Reason.TRUNCATED) == {"chat": 1}
    assert verify(rundir).ok, verify(rundir).render()


def test_a_run_that_somebody_works_on_is_refused(rundir):
    """Both locks: a running `run`, and a collector alone."""
    for lock in (rundir.lock, rundir.writer_lock):
        with hold(lock, "writing its files"), pytest.raises(UsageError, match="in use by"):
            redone(rundir)


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_while_redoing_leaves_the_old_state_or_the_new_one(rundir, point):
    """Killed before the journal: all is as before. After it: the next command finishes it."""
    before = {name: rundir.file("chat", name).read_bytes() for name in (TOKENIZED, REJECTED)}
    killed = headrace("tokenize", rundir.out, "--truncated", "drop", kill_at=point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finish_switch(rundir)
    if point == "staged":
        assert {name: rundir.file("chat", name).read_bytes() for name in before} == before
        assert read_run_file(rundir.run_json).filters["truncated"] == "keep"
        assert counts(rundir).tokenized == 6
    else:
        assert len(lines(rundir, TOKENIZED)) == 5
        assert read_run_file(rundir.run_json).filters["truncated"] == "drop"
        assert counts(rundir).tokenized == 5
    with alone(rundir, "looking"):
        pass
    assert not list(rundir.out.rglob("*.new"))
    assert verify(rundir).ok, verify(rundir).render()


def test_what_was_cut_is_asked_again_and_its_raw_line_is_kept_aside(rundir):
    """Exactly the cut one is pending; its line is in superseded.jsonl and nowhere else."""
    cut = lines(rundir, RAW)[5]
    assert retried(rundir, Reason.TRUNCATED, 256) == {"chat": 1}
    assert lines(rundir, SUPERSEDED) == [cut]
    assert cut["id"] not in [one["id"] for name in (RAW, TOKENIZED, REJECTED) for one in lines(rundir, name)]
    now = counts(rundir)
    assert (now.rows, now.pending, now.tokenized, now.rejected) == (8, 1, 5, 2)
    assert verify(rundir).ok, verify(rundir).render()


def test_what_was_cut_and_rejected_for_it_is_asked_again_once(rundir):
    """It stands in both files, as a rejection and as a raw line: one completion."""
    redone(rundir, truncated="drop")
    assert retried(rundir, Reason.TRUNCATED) == {"chat": 1}
    assert read_run_file(rundir.run_json).retries[0]["completions"] == 1
    assert verify(rundir).ok, verify(rundir).render()


def test_the_allowance_stands_beside_the_row_and_in_run_json(rundir):
    """Only the rows asked again have it; run.json says how many were, when and why."""
    retried(rundir, Reason.TRUNCATED, 256)
    allowances = Allowances(rundir.out)
    assert allowances.of("chat", a_row(5)) == {0: 256}
    assert allowances.of("chat", a_row(1)) == {}
    (entry,) = read_run_file(rundir.run_json).retries
    assert (entry["reason"], entry["max_new_tokens"], entry["completions"]) == ("truncated", 256, 1)


def test_a_retry_without_an_allowance_leaves_the_one_before(rundir):
    """Asked for more once, then lost for another reason: it is asked for as much again."""
    retried(rundir, Reason.TRUNCATED, 256)
    write(rundir, [rejection(a_row(5), Reason.ATTEMPTS_EXHAUSTED, index=0)])
    assert retried(rundir, Reason.ATTEMPTS_EXHAUSTED) == {"chat": 1}
    assert Allowances(rundir.out).of("chat", a_row(5)) == {0: 256}


@pytest.mark.parametrize(
    ("reason", "left"), [(Reason.TOO_LONG, ["empty_output"]), (Reason.EMPTY_OUTPUT, ["too_long"])], ids=str
)
def test_a_reason_of_any_stage_can_be_asked_again(rundir, reason, left):
    """The verdict goes, and the raw line with it where there is one; other verdicts stay."""
    assert retried(rundir, reason) == {"chat": 1}
    assert [one["reason"] for one in lines(rundir, REJECTED)] == left
    assert counts(rundir).pending == 1
    assert verify(rundir).ok, verify(rundir).render()


def test_a_row_of_several_turns_is_asked_again_as_a_whole(tmp_path):
    """One of its turns was cut: all its turns go."""
    rundir = RunDir(tmp_path / "out")
    write_completed(rundir, response(a_row(1), turn=0, turns=2), response(a_row(1), turn=1, turns=2, **CUT))
    write_completed(rundir, response(a_row(2), turn=0, turns=2), response(a_row(2), turn=1, turns=2))
    recipe = Recipe(tokenizer={}, rendering={}, sampling={"max_new_tokens": 64})
    write_run_file(rundir.run_json, RunFile(
        run_id="r", created_at=AT, headrace="0", recipe=recipe, recipe_fingerprint=RECIPE))
    assert retried(rundir, Reason.TRUNCATED) == {"chat": 1}
    assert [one["row_id"] for one in lines(rundir, RAW)] == [a_row(2)] * 2
    assert len(lines(rundir, SUPERSEDED)) == 2
    assert verify(rundir).ok, verify(rundir).render()


def test_nothing_to_retry_changes_nothing(rundir):
    """No file is written, and the command says so."""
    before = {path: path.stat().st_mtime_ns for path in rundir.out.glob("*/*.jsonl")}
    done = headrace("retry", rundir.out, "--reason", "repetition")
    assert done.returncode == 0
    assert "nothing in it is repetition" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in rundir.out.glob("*/*.jsonl")} == before
    assert not (rundir.out / SUPERSEDED).exists()


@pytest.mark.parametrize("point", [*KILL_POINTS, "renamed 4", "renamed 5", "renamed 6"])
def test_a_kill_while_retrying_is_finished_by_the_same_command(rundir, point):
    """Whatever the point: afterwards exactly the cut one is pending, its line once in superseded.jsonl."""
    command = ("retry", rundir.out, "--reason", "truncated", "--max-new-tokens", 256)
    assert headrace(*command, kill_at=point).returncode == -signal.SIGKILL
    done = headrace(*command)
    assert done.returncode == 0, done.stderr
    assert len(lines(rundir, SUPERSEDED)) == 1
    assert counts(rundir).pending == 1
    assert len(read_run_file(rundir.run_json).retries) == 1
    assert verify(rundir).ok, verify(rundir).render()


def test_status_finishes_what_a_killed_command_left(rundir):
    """Whoever looks sees the new state, not the half of it."""
    headrace("retry", rundir.out, "--reason", "truncated", kill_at="renamed 2")
    shown = json.loads(headrace("status", rundir.out, "--json").stdout)
    assert (shown["totals"]["pending"], shown["totals"]["tokenized"]) == (1, 5)


def test_an_allowance_below_what_an_answer_has_at_least_is_refused(rundir):
    """One sentence, exit 2, nothing changed."""
    done = headrace("retry", rundir.out, "--reason", "truncated", "--max-new-tokens", 0)
    assert done.returncode == 2
    assert "--max-new-tokens 0 is below 1" in done.stderr
    assert counts(rundir).pending == 0


def test_a_disk_that_refuses_leaves_everything_as_it_was(rundir):
    """No room for the new files: one sentence, exit 4, the old files untouched and none left beside them."""
    before = {path: path.read_bytes() for path in rundir.out.glob("*/*.jsonl")}
    command = [sys.executable, "-m", "app.cli.main", "tokenize", str(rundir.out)]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "-", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "nothing is lost" in done.stderr
    assert {path: path.read_bytes() for path in rundir.out.glob("*/*.jsonl")} == before
    assert not list(rundir.out.rglob("*.new"))


def test_the_ledger_reads_replaced_files_anew_even_where_they_look_the_same(rundir):
    """Same size, same end, same time: only being told helps."""
    write(rundir, [rejection(a_row(n), Reason.TOO_LARGE) for n in (20, 21, 22)])
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        ledger.begin_pass()
        ledger.see_rows("chat", [(digest(n), 0, n) for n in (20, 21, 22)])
        path = rundir.file("chat", REJECTED)
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(b'"too_large"', b'"truncated"', 1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        ledger.catch_up()
        assert ledger.counts()[0].rejected_by_reason["too_large"] == 3
        ledger.read_anew(["chat"])
        ledger.catch_up()
        assert ledger.counts()[0].rejected_by_reason["too_large"] == 2


def test_a_settings_file_changes_no_files(rundir, tmp_path):
    """What it says for `run` is no order to redo the samples, or to ask for more."""
    (tmp_path / "headrace.toml").write_text('truncated = "drop"\nmax_new_tokens = 999\n')
    settings = ("--settings", tmp_path / "headrace.toml")
    assert headrace(*settings, "tokenize", rundir.out).returncode == 0
    assert headrace(*settings, "retry", rundir.out, "--reason", "truncated").returncode == 0
    assert read_run_file(rundir.run_json).filters["truncated"] == "keep"
    assert Allowances(rundir.out).of("chat", a_row(5)) == {}


def test_a_row_asked_again_is_sent_with_its_own_allowance(demo_tokenizer):
    """Completion by completion; -1 stands for all of a row; others have the run's."""
    renderer = Renderer(RenderOptions(str(demo_tokenizer)))
    conversation = Conversation([{"role": "user", "content": "x"}])
    run = manifest("http://127.0.0.1:1", max_new_tokens=64)
    for allowances, expected in (({}, [64, 64]), ({1: 256}, [64, 256]), ({-1: 32, 1: 256}, [32, 256])):
        parcels = render([Row("chat", a_row(1), "", 1, conversation, (0, 1), allowances)], renderer, run, False)
        assert [unpack_task(parcel.blob).max_new_tokens for parcel in parcels] == expected

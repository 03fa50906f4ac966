"""app.ledger: an index of the files that is never believed more than they are."""

import os
import sqlite3
import threading

import pytest

from app.errors import StorageError
from app.jsonl import Appender
from app.ledger import Committed, Ledger, Missing, State
from app.ledger.schema import Slot
from app.ledger.tally import merge
from app.reasons import Reason
from app.records import line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, sample_of
from tests.run_on_disk import AT, a_row, digest, rejection, response, write, write_completed

DIGESTS = [digest(n) for n in range(6)]


@pytest.fixture
def rundir(tmp_path):
    return RunDir(tmp_path / "out")


@pytest.fixture
def ledger(rundir):
    with Ledger.open(rundir) as opened:
        yield opened


def read(ledger: Ledger, digests, dataset="chat", samples=None, end=True):
    """One pass over rows with these digests."""
    ledger.begin_pass(samples)
    seen = ledger.see_rows(dataset, [(one, 0, number) for number, one in enumerate(digests, start=1)])
    if end:
        ledger.end_pass(dataset)
    return seen


def only(ledger: Ledger):
    """The counts of the one dataset, after the check that its counters add up."""
    assert ledger.discrepancies() == []
    (counts,) = ledger.counts()
    assert counts.rows == counts.tokenized + counts.rejected + counts.pending
    return counts


def done(n: int, state=State.TOKENIZED, reason="", index=0, offset=0) -> Committed:
    return Committed("chat", a_row(n), index, state, reason, offset)


def test_a_glance_tells_that_somebody_else_wrote_and_when_nothing_is_left(ledger, rundir):
    """Once each time, and without a read of any table; complete is what was read to its end and is on file."""
    with Ledger.open(rundir) as watching:
        watching.has_changed()
        assert not watching.has_changed()
        assert not watching.is_complete()
        read(ledger, DIGESTS[:2], end=False)
        ledger.commit([done(0), done(1)])
        assert watching.has_changed()
        assert not watching.is_complete()  # there may be more rows
        ledger.end_pass("chat")
        assert watching.is_complete()
        assert watching.has_changed()
        assert not watching.has_changed()


# --- passes over the input ---


def test_rows_are_final_only_once_the_input_was_read_to_its_end(ledger):
    """Until end_pass the number of rows may grow; a new pass makes it open again."""
    read(ledger, DIGESTS, end=False)
    assert (only(ledger).rows, only(ledger).rows_final) == (6, False)
    ledger.end_pass("chat")
    assert only(ledger).rows_final
    ledger.begin_pass()
    assert not only(ledger).rows_final


def test_equal_rows_get_occurrence_numbers_that_stay_over_passes(ledger):
    """The second equal row is `-2`, whether in one batch or another, and again in the next pass."""
    d = DIGESTS[0]
    for _ in range(2):
        seen = read(ledger, [d, DIGESTS[1], d], end=False)
        seen += ledger.see_rows("chat", [(d, 0, 4), (DIGESTS[1], 0, 5)])
        ledger.end_pass("chat")
        assert [one.row_id for one in seen] == [d, DIGESTS[1], f"{d}-2", f"{d}-3", f"{DIGESTS[1]}-2"]
        assert only(ledger).rows == 5


def test_an_unchanged_input_is_read_again_without_a_write(ledger, rundir):
    """Resuming a run of millions of rows does not rewrite the ledger."""
    read(ledger, DIGESTS)
    written = rundir.ledger.with_name("ledger.sqlite-wal").stat().st_size
    read(ledger, DIGESTS, end=False)
    begun = rundir.ledger.with_name("ledger.sqlite-wal").stat().st_size
    ledger.see_rows("other", [])
    with sqlite3.connect(rundir.ledger) as db:
        seqs = [seq for (seq,) in db.execute("SELECT seq FROM row ORDER BY number")]
    assert seqs == [1, 2, 3, 4, 5, 6]
    assert begun - written < 4 * 5000  # the pass itself


@pytest.mark.parametrize(
    ("second", "rows", "tokenized", "orphans"),
    [
        ([5, 4, 3, 2, 1, 0], 6, 3, 0),  # shuffled
        ([9, 8, 0, 1, 2, 3, 4, 5], 8, 3, 0),  # rows before
        ([0, 9, 2, 3, 4, 5], 6, 2, 1),  # one edited
        ([3, 4], 2, 0, 3),  # shrunk
        ([], 0, 0, 3),
    ],
)
def test_the_input_may_change_between_passes(ledger, second, rows, tokenized, orphans):
    """Rows are known by content: unchanged ones stay done, gone ones are orphans, new ones are pending."""
    read(ledger, DIGESTS)
    ledger.commit([done(0), done(1), done(2)])
    read(ledger, [digest(n) for n in second])
    counts = only(ledger)
    assert (counts.rows, counts.tokenized, counts.orphans) == (rows, tokenized, orphans)
    assert counts.pending == rows - tokenized
    read(ledger, DIGESTS)
    assert (only(ledger).tokenized, only(ledger).orphans) == (3, 0)


def test_a_row_that_moved_is_remembered_where_it_stands_now(ledger):
    """File and number of the newest pass, for whoever has to find the row again."""
    read(ledger, DIGESTS[:2])
    read(ledger, [DIGESTS[5], *DIGESTS[:2]])
    assert {one.row_id: one.number for one in ledger.missing("chat", 9)} == {
        DIGESTS[5]: 1, DIGESTS[0]: 2, DIGESTS[1]: 3,
    }  # fmt: skip


def test_a_pass_that_was_broken_off_leaves_nothing_behind(ledger, rundir):
    """The next process starts a pass anew: the same row ids, and rows of the broken pass are gone if unseen."""
    read(ledger, [*DIGESTS, DIGESTS[0]], end=False)
    with Ledger.open(rundir) as another:
        seen = read(another, DIGESTS[:2])
        assert [one.row_id for one in seen] == DIGESTS[:2]
        assert only(another).rows == 2


def test_a_failed_registration_is_not_counted_as_seen(ledger, rundir):
    """When the transaction fails, the same rows can be given again and are no repetitions."""
    ledger.begin_pass()
    with pytest.raises(ValueError, match="non-hexadecimal"):
        ledger.see_rows("chat", [(DIGESTS[0], 0, 1), (DIGESTS[0], 0, 2), ("not a digest", 0, 3)])
    seen = ledger.see_rows("chat", [(DIGESTS[0], 0, 1), (DIGESTS[0], 0, 2)])
    assert [one.row_id for one in seen] == [DIGESTS[0], f"{DIGESTS[0]}-2"]


def test_rows_of_datasets_that_the_input_no_longer_has_are_forgotten(ledger):
    """Named datasets are the whole input: what others left on file are orphans, and nobody waits for their rows."""
    read(ledger, DIGESTS)
    read(ledger, DIGESTS, dataset="other")
    ledger.commit([done(0)])
    ledger.begin_pass(datasets=["other"])
    ledger.see_rows("other", [(one, 0, n) for n, one in enumerate(DIGESTS, start=1)])
    ledger.end_pass("other")
    chat, other = ledger.counts()
    assert (chat.rows, chat.rows_final, chat.orphans, other.rows) == (0, True, 1, 6)
    assert ledger.pending_total() == 6


def test_a_dataset_is_open_before_its_first_row_was_read(ledger):
    """Or a run to which a dataset was added would pass for complete until then."""
    read(ledger, DIGESTS[:1])
    ledger.commit([done(0)])
    ledger.begin_pass(datasets=["chat", "new"])
    ledger.see_rows("chat", [(DIGESTS[0], 0, 1)])
    ledger.end_pass("chat")
    chat, new = ledger.counts()
    assert (chat.rows, chat.rows_final, new.dataset, new.rows, new.rows_final) == (1, True, "new", 0, False)


def test_a_row_says_what_it_has_already(ledger):
    """Generated, tokenized and rejected completions need no generation; a verdict on the row is told apart."""
    ledger.commit([
        done(0), done(0, State.GENERATED, index=2), done(1, State.REJECTED, "refused", offset=-1),
        done(2, State.REJECTED, "too_long", index=-1, offset=-1),
    ])  # fmt: skip
    seen = read(ledger, DIGESTS[:4], samples=3)
    assert [one.final for one in seen] == [{0, 2}, {0}, set(), set()]
    assert [one.row_verdict for one in seen] == [False, False, True, False]


# --- completions ---


def test_counts_follow_the_number_of_samples_wanted(ledger):
    """Raising --samples makes the new completions pending, and a verdict on a row counts for all of them."""
    read(ledger, DIGESTS, samples=1)
    ledger.commit([done(0), done(1, State.REJECTED, "empty_output"), done(2, State.REJECTED, "too_long", -1, -1)])
    assert (only(ledger).tokenized, only(ledger).rejected, only(ledger).pending) == (1, 2, 3)
    read(ledger, DIGESTS, samples=4)
    counts = only(ledger)
    assert (counts.rows, counts.tokenized, counts.pending) == (24, 1, 18)
    assert counts.rejected_by_reason == {"empty_output": 1, "too_long": 4}
    assert counts.generated == 2
    ledger.commit([done(2, index=3, offset=9)])
    assert only(ledger).rejected_by_reason == {"empty_output": 1, "too_long": 3}
    read(ledger, DIGESTS, samples=1)
    assert (only(ledger).tokenized, only(ledger).pending, only(ledger).orphans) == (1, 3, 1)


def test_a_raw_line_without_a_sample_is_pending_and_underived(ledger):
    """GENERATED is nothing final: the collector derives it."""
    read(ledger, DIGESTS)
    ledger.commit([done(0, State.GENERATED, offset=77), done(1, offset=5)])
    assert (only(ledger).generated, only(ledger).tokenized, only(ledger).pending) == (2, 1, 5)
    assert list(ledger.underived()) == [("chat", 77)]
    ledger.commit([done(0, offset=77)])
    assert list(ledger.underived()) == []


def test_known_is_what_the_files_have(ledger):
    """A verdict on the row covers all its completions."""
    ledger.commit([done(0), done(1, State.GENERATED), done(2, State.REJECTED, "too_long", -1, -1)])
    slots = [("chat", a_row(n), index) for n in range(4) for index in (0, 1)] + [("unheard-of", a_row(0), 0)]
    known = {("chat", a_row(0), 0), ("chat", a_row(1), 0), ("chat", a_row(2), 0), ("chat", a_row(2), 1)}
    assert set(ledger.known(slots)) == known


def test_missing_lists_the_completions_of_which_nothing_is_known_page_by_page(ledger):
    """By row id, with the place where the row stood; neither generated nor rejected ones."""
    read(ledger, [*DIGESTS[:3], DIGESTS[0]], samples=2)
    ledger.commit([done(0, State.GENERATED), done(1, State.REJECTED, "too_long", -1, -1)])
    expected = sorted([
        (DIGESTS[0], 1, 0, 1), (DIGESTS[2], 0, 0, 3), (DIGESTS[2], 1, 0, 3),
        (f"{DIGESTS[0]}-2", 0, 0, 4), (f"{DIGESTS[0]}-2", 1, 0, 4),
    ])  # fmt: skip
    pages, after = [], None
    while page := ledger.missing("chat", 2, after):
        assert len(page) <= 2
        pages += page
        after = page[-1][:2]
    assert pages == [Missing(*one) for one in expected]


# --- the files are the truth ---


def fill(rundir: RunDir) -> None:
    """Three samples, one rejection after generation, one before, one raw line without either."""
    write_completed(rundir, response(a_row(0)), response(a_row(1)), response(a_row(2)))
    write_completed(rundir, response(a_row(3), output_ids=[2]))
    write(rundir, [rejection(a_row(4), Reason.TOO_LONG), response(a_row(5))])


def check_filled(ledger: Ledger) -> None:
    read(ledger, DIGESTS)
    counts = only(ledger)
    assert (counts.generated, counts.tokenized, counts.pending) == (5, 3, 1)
    assert counts.rejected_by_reason == {"empty_output": 1, "too_long": 1}
    assert (counts.responses, counts.samples, counts.unreadable) == (5, 3, 0)
    assert len(list(ledger.underived())) == 1


def test_catching_up_reads_the_files_and_repeating_it_changes_nothing(ledger, rundir):
    """Whole state from the files alone; the second time there is nothing to do."""
    fill(rundir)
    ledger.catch_up(rundir)
    check_filled(ledger)
    ledger.catch_up()
    check_filled(ledger)


def test_commits_with_the_sizes_of_the_files_leave_nothing_to_catch_up(ledger, rundir):
    """What the collector commits is what reading would find; the lines are counted, not read."""
    for n in range(3):
        record = response(a_row(n))
        ends = write(rundir, [record, sample_of(record, SampleFilters(), AT)])
        ledger.commit([done(n, offset=ends["chat", RAW] - len(line_of(record)))], ends)
    counts = only(ledger)
    assert (counts.responses, counts.samples) == (3, 3)
    assert ledger.indexed_bytes("chat", RAW) == rundir.file("chat", RAW).stat().st_size
    ledger.catch_up()
    assert only(ledger) == counts


def test_a_commit_that_tells_less_than_the_file_has_is_completed_from_the_file(ledger, rundir):
    """Lines that nobody committed (a kill between the two) are not skipped over."""
    fill(rundir)
    record = response(a_row(9))
    ends = write(rundir, [record])
    ledger.commit([Committed("chat", a_row(9), 0, State.GENERATED, "", 0)], ends)
    assert only(ledger).responses == 6
    assert ledger.known([("chat", a_row(0), 0)])


@pytest.mark.parametrize("damage", ["missing", "garbage", "newer", "older", "truncated", "scribbled"])
def test_an_unusable_ledger_is_made_anew_from_the_files(rundir, damage):
    """Missing, no database, another version's, cut in half: the files say it all."""
    fill(rundir)
    with Ledger.open(rundir) as first:
        first.catch_up()
        read(first, [digest(n) for n in range(3000)])
    if damage == "missing":
        rundir.ledger.unlink()
    elif damage == "garbage":
        rundir.ledger.write_bytes(b"no database at all" * 1000)
    elif damage == "truncated":
        os.truncate(rundir.ledger, 8192)
    elif damage == "scribbled":
        with rundir.ledger.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (rundir.ledger.stat().st_size - 4096))
    else:
        with sqlite3.connect(rundir.ledger) as db:
            db.execute(f"PRAGMA user_version = {99 if damage == 'newer' else 0}")
    if damage == "scribbled":  # found out while it is used: set aside, and the next start is a good one
        with Ledger.open(rundir) as broken, pytest.raises(StorageError, match="start again"):
            read(broken, [digest(n) for n in range(3000)])
    with Ledger.open(rundir) as again:
        again.catch_up()
        check_filled(again)
    assert (rundir.private / "ledger.unusable.sqlite").exists() == (damage != "missing")


@pytest.mark.parametrize("change", ["shrunk", "gone", "replaced"])
def test_a_file_that_is_not_the_one_it_was_is_read_from_its_beginning(ledger, rundir, change):
    """Shrunk, removed, or other bytes before the place read to: the dataset is indexed anew."""
    fill(rundir)
    ledger.catch_up()
    raw = rundir.file("chat", RAW)
    lines = raw.read_bytes().splitlines(keepends=True)
    if change == "shrunk":
        raw.write_bytes(b"".join(lines[:-1]))
    elif change == "gone":
        raw.unlink()
    else:
        raw.write_bytes(b"".join(reversed(lines)) + lines[0].replace(a_row(0).encode(), a_row(8).encode()))
    ledger.catch_up()
    read(ledger, DIGESTS)
    counts = only(ledger)
    assert counts.responses == {"shrunk": 4, "gone": 0, "replaced": 6}[change]
    assert counts.tokenized == 3


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage\n", b"\0\0\0\n", b"\n", b"[]\n", b'{"id":1}\n',
        lambda line: line[:200] + b"\n",
        lambda line: line[:-40] + b"\n",
        lambda line: line[:400] + line,  # two records on one line
        lambda line: line.replace(b'"an answer"', b'"an \0\0\0wer"'),
        lambda line: line.replace(b'"chat:', b'"foreign:'),
    ],
)  # fmt: skip
def test_a_bad_line_in_the_middle_is_skipped_and_counted(ledger, rundir, bad):
    """Only its row is missing; the rows after it count."""
    write(rundir, [response(a_row(0)), response(a_row(1)), response(a_row(2))])
    raw = rundir.file("chat", RAW)
    lines = raw.read_bytes().splitlines(keepends=True)
    lines[1] = bad(lines[1]) if callable(bad) else bad
    raw.write_bytes(b"".join(lines))
    ledger.catch_up()
    read(ledger, DIGESTS[:3])
    assert (only(ledger).responses, only(ledger).unreadable) == (2, 1)
    assert [one.row_id for one in ledger.missing("chat", 9)] == [a_row(1)]


def test_unreadable_lines_at_the_end_are_left_to_the_writer(ledger, rundir):
    """They may be about to be cut: what follows later is read as if they had never been there."""
    fill(rundir)
    raw = rundir.file("chat", RAW)
    with raw.open("ab") as file:
        file.write(b"\0\0\0\n\n{\n")
    ledger.catch_up()
    write(rundir, [response(a_row(6))])  # the appender cuts first
    ledger.catch_up()
    assert (only(ledger).responses, only(ledger).unreadable) == (6, 0)


def test_a_completion_of_several_turns_counts_when_all_its_turns_are_there(ledger, rundir):
    """Raw lines and samples of a group are one completion, whole or nothing."""
    turns = [response(a_row(0), turn=turn, turns=3) for turn in range(3)]
    write(rundir, turns[:2])
    ledger.catch_up()
    read(ledger, DIGESTS[:1])
    assert (only(ledger).generated, only(ledger).responses) == (0, 0)  # half of one may be about to be cut
    write(rundir, turns[2:])
    ledger.catch_up()
    assert (only(ledger).generated, only(ledger).responses, list(ledger.underived())) == (1, 3, [("chat", 0)])
    samples = [sample_of(turn, SampleFilters(), AT) for turn in turns]
    write(rundir, samples[:2])
    ledger.catch_up()
    assert only(ledger).tokenized == 0
    write(rundir, samples[2:])
    ledger.catch_up()
    assert (only(ledger).tokenized, only(ledger).samples, only(ledger).pending) == (1, 3, 0)


def test_a_completion_whose_turns_were_exchanged_counts_as_nothing(ledger, rundir):
    """Its samples are whole, and no proof of it: the row is pending, and known to be torn."""
    for row in range(2):
        turns = [response(a_row(row), turn=turn, turns=2) for turn in range(2)]
        write(rundir, [*turns, *[sample_of(turn, SampleFilters(), AT) for turn in turns]])
    ledger.catch_up()
    read(ledger, DIGESTS[:2])
    assert only(ledger).tokenized == 2
    path = rundir.file("chat", RAW)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    ledger.catch_up()
    assert (only(ledger).tokenized, only(ledger).pending, len(ledger.torn("chat").responses)) == (1, 1, 1)


def test_a_cut_is_no_edit_and_costs_no_reading(ledger, rundir):
    """What was seen unfinished and is cut leaves the file at the size it was read to, with another time. (An edit that
    left no trace stands for what a second reading would find.)"""
    fill(rundir)
    ledger.catch_up()
    read(ledger, DIGESTS)
    path = rundir.file("chat", REJECTED)
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"empty_output"', b'"output_empty"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with path.open("ab") as file:
        file.write(b'{"half": ')
    ledger.catch_up()
    Appender(path).close()
    ledger.catch_up()
    assert only(ledger).rejected_by_reason == {"empty_output": 1, "too_long": 1}


def test_two_ledgers_may_read_the_same_files_at_once(rundir, monkeypatch):
    """What both read is counted once."""
    monkeypatch.setattr("app.ledger.files.CHUNK_LINES", 3)  # many short transactions, to meet each other
    write_completed(rundir, *[response(a_row(n)) for n in range(60)])
    ready = threading.Barrier(4)

    def catch_up() -> None:
        with Ledger.open(rundir) as one:
            ready.wait()
            one.catch_up()

    threads = [threading.Thread(target=catch_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Ledger.open(rundir) as ledger:
        assert (only(ledger).responses, only(ledger).samples) == (60, 60)


def test_the_ledger_may_lie_elsewhere(rundir, tmp_path):
    """For outputs on a network filesystem: the index on a local disk, nothing in the run's own directory."""
    fill(rundir)
    with Ledger.open(rundir, tmp_path / "local" / "ledger.sqlite") as ledger:
        ledger.catch_up()
        check_filled(ledger)
    assert not rundir.ledger.exists()


def test_names_of_the_files_are_those_of_the_run_directory(rundir):
    """The three files that are indexed."""
    from app.ledger.files import FILES

    assert FILES == (RAW, TOKENIZED, REJECTED)


SLOTS = [Slot(state, reason, offset) for state, reason in (
    (State.GENERATED, ""), (State.REJECTED, "empty_output"), (State.TOKENIZED, ""),
) for offset in (-1, 7)]  # fmt: skip


@pytest.mark.parametrize("one", SLOTS)
@pytest.mark.parametrize("other", SLOTS)
def test_what_two_lines_say_of_a_completion_merges_the_same_in_any_order(one, other):
    """The further state wins and a raw line once known stays known, so that files can be read again in any order."""
    merged = merge(merge(None, one), other)
    assert merged == merge(other, one) == merge(merged, one)
    assert merged == (max(one.state, other.state), merged.reason, max(one.raw_offset, other.raw_offset))

"""What a resumed run lacks is found by its place in the input, before the input is read."""

import gzip

import pytest

from app.identity import task_key
from app.ledger import Bookmark, Committed, Ledger, Missing, State
from app.rundir import RunDir
from app.settings import RunSettings
from producers.catalog import interleave
from producers.inputs import Dataset, parse_inputs
from producers.readers import read_lines_at, read_records
from producers.remaining import Remaining

ROWS = [b'{"prompt":"row %d"}\n' % n for n in range(200)]
MISSING = (3, 77, 150, 199)


@pytest.fixture
def gaps(tmp_path):
    """Ask what is known to be missing of a run of 200 rows, read once, of which four were not done."""
    data = tmp_path / "d.jsonl"
    data.write_bytes(b"".join(ROWS))
    settings = RunSettings(inputs=[str(data)], out=tmp_path / "out", endpoints=["http://e"], tokenizer="t")
    ledger = Ledger.open(RunDir(settings.out))
    remaining = Remaining(settings, "recipe", ledger)
    ledger.begin_pass(1, ["d"])
    rows = [
        row for name, chunk in interleave(parse_inputs([str(data)]), settings) if chunk
        for row in remaining.missing_of(name, chunk, set())
    ]  # fmt: skip
    ledger.commit([
        Committed("d", row.row_id, 0, State.TOKENIZED, "", 0) for n, row in enumerate(rows) if n not in MISSING
    ])  # fmt: skip

    def ask(path=data, outstanding: frozenset[str] = frozenset(), more=(), marks=()) -> list[tuple[int, str]]:
        missing = [*ledger.missing("d", 1000), *more]
        found = remaining.known_gaps(Dataset("d", (path,)), missing, outstanding, settings.max_row_bytes, marks)
        return [(row.number - 1, row.row_id) for row in found]

    ask.data, ask.ids = data, [row.row_id for row in rows]
    yield ask
    ledger.close()


def test_they_are_found_with_their_ids(gaps):
    """Exactly those, each with the id that a pass would give it; also in a compressed file."""
    assert gaps() == [(n, gaps.ids[n]) for n in MISSING]
    gaps.data.write_bytes(gzip.compress(gaps.data.read_bytes()))
    assert gaps() == [(n, gaps.ids[n]) for n in MISSING]


def test_what_redis_knows_is_left_alone(gaps):
    """It is on its way already."""
    key = task_key("recipe", "d", gaps.ids[77], 0, 0)
    assert [n for n, _ in gaps(outstanding={key})] == [3, 150, 199]


def test_a_row_that_no_longer_stands_there_is_left_to_the_pass(gaps):
    """Edited, moved, or cut off: no other row's text under its id."""
    lines = list(ROWS)
    lines[3] = b'{"prompt":"edited"}\n'
    lines.insert(100, b'{"prompt":"inserted"}\n')
    gaps.data.write_bytes(b"".join(lines[:180]))
    assert [n for n, _ in gaps()] == [77]


def test_a_row_at_its_place_is_what_a_pass_reads_there(gaps):
    """Also one that will be refused, which a pass behind bookmarks would never see again: too large, or unreadable."""
    lines = [ROWS[0], b'{"prompt":"%s"}\n' % (b"x" * 2000), b"\n", b"{bad\n", ROWS[1].replace(b"\n", b"\r\n")]
    gaps.data.write_bytes(b"".join(lines))
    read = [(row.number, row.raw, str(row.error)) for row in read_records(gaps.data, max_row_bytes=1024)]
    assert [number for number, _, _ in read] == [1, 2, 4, 5]
    found = read_lines_at(gaps.data, {1, 2, 3, 4, 5}, 1024)
    assert [(row.number, row.raw, str(row.error)) for row in found] == read


def test_a_repeat_that_may_be_gone_is_left_to_the_pass(gaps):
    """Where one of two equal rows went, the text at its place says nothing of the second; behind a bookmark it does."""
    repeat = Missing(f"{gaps.ids[5]}-2", 0, 0, 6)
    assert gaps(more=[repeat]) == gaps()
    mark = Bookmark(0, 6, 1, 6, whole=True, digest=b"", stamp="")
    assert (5, repeat.row_id) in gaps(more=[repeat], marks=[mark])


def test_other_formats_wait_for_the_pass(gaps):
    """A JSON array has no lines to count."""
    gaps.data.write_bytes(b"[" + b",".join(line.strip() for line in ROWS) + b"]")
    assert gaps() == []

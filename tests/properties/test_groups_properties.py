"""app.groups: whatever a crash leaves of a file, what is kept are whole completions, and none that was whole goes."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.groups import Order, end_of_groups, group_at, grouped, place_of
from app.jsonl import Appender, iterate, parse
from app.records import ResponseRecord, line_of
from app.samples import SampleFilters, samples_of
from tests.run_on_disk import AT, a_row, response


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.floats(0, 1), st.booleans())
def test_what_is_kept_of_a_torn_file_are_its_whole_groups(sizes, part, of_samples):
    """Cut anywhere, raw lines or samples: opened for appending, it ends behind the last completion that was whole."""
    groups = [[response(a_row(n), turn=t, turns=size) for t in range(size)] for n, size in enumerate(sizes)]
    if of_samples:
        groups = [samples_of(group, SampleFilters(), AT) for group in groups]
    written = [b"".join(map(line_of, group)) for group in groups]
    data = b"".join(written)
    cut = round(part * len(data))
    expected = 0
    for group in written:
        if expected + len(group) > cut:
            break
        expected += len(group)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_bytes(data[:cut])
        with Appender(path, end_of_groups) as file:
            assert file.end == expected
        assert path.read_bytes() == data[:expected]


def test_a_whole_line_before_half_a_group_stays(tmp_path):
    """Somebody took the first turn of the last row away: what stands before it is another's."""
    path = tmp_path / "lines.jsonl"
    lines = [line_of(response(a_row(1))), line_of(response(a_row(2), turn=1, turns=3))]
    path.write_bytes(b"".join(lines))
    Appender(path, end_of_groups).close()
    assert path.read_bytes() == lines[0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_a_completion_that_lacks_a_line_is_none(sizes, data):
    """One line taken out of the middle: the others are read, each found at its place."""
    groups = [[response(a_row(n), turn=t, turns=size) for t in range(size)] for n, size in enumerate(sizes)]
    records = [record for group in groups for record in group]
    gone = data.draw(st.integers(0, len(records) - 1))
    left = records[:gone] + records[gone + 1 :]
    whole = [group for group in groups if records[gone] not in group]
    found = [(order, lines) for lines, order in grouped(left, place_of)]
    assert [lines for order, lines in found if order is Order.WHOLE] == whole
    assert [record for _, lines in found for record in lines] == left
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_bytes(b"".join(map(line_of, left)))
        places = {parse(line.raw)["id"]: line.offset for line in iterate(path)}
        for group in whole:
            assert group_at(path, places[group[0].id]) == [ResponseRecord(**parse(line_of(one))) for one in group]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_a_completion_is_whole_only_where_its_turns_stand_together_in_their_order(sizes, data):
    """Two lines exchanged, whichever: those that they belong to are whole no more, and no line is lost sight of."""
    records = [response(a_row(n), turn=t, turns=size) for n, size in enumerate(sizes) for t in range(size)]
    one, other = (data.draw(st.integers(0, len(records) - 1)) for _ in range(2))
    swapped = list(records)
    swapped[one], swapped[other] = records[other], records[one]
    moved = {records[n].row_id for n in (one, other) if one != other and records[n].turns > 1}
    found = list(grouped(swapped, place_of))
    whole = {lines[0].row_id for lines, order in found if order is Order.WHOLE}
    assert not whole & moved
    assert [record for lines, _ in found for record in lines] == swapped
    for lines, order in found:
        if order is Order.WHOLE:
            assert [(record.row_id, record.turn) for record in lines] == \
                [(lines[0].row_id, turn) for turn in range(lines[0].turns)]  # fmt: skip


def test_a_line_that_cannot_be_read_ends_what_stands_before_it():
    """It may have been any turn of any completion."""
    first, second = (response(turn=turn, turns=2) for turn in range(2))
    found = list(grouped([first, None, second], place_of))
    assert found == [([first], Order.BROKEN), ([second], Order.BROKEN)]

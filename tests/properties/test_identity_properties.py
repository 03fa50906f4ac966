"""Identity belongs to what a row says, never to where it stands."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.identity import row_digest, row_id
from producers.readers import read_records
from producers.shapes import conversation_of

texts = st.text(st.characters(codec="utf-8"), max_size=8).map(lambda text: text + "?")
ids = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from(["", "1", "2", "a"]))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), texts)
parameters = st.dictionaries(texts, st.one_of(scalars, st.dictionaries(texts, scalars, max_size=3)), max_size=3)
tools = st.lists(st.fixed_dictionaries({"name": texts, "parameters": parameters}), max_size=2)
chats = st.lists(texts, min_size=1, max_size=3).map(
    lambda said: [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]
)
rows = st.one_of(
    st.fixed_dictionaries({"prompt": texts}, optional={"id": ids, "tools": tools}),
    st.fixed_dictionaries({"messages": chats}, optional={"id": ids, "tools": tools}),
)
files = st.lists(rows, min_size=1, max_size=8)


def row_ids(*files: list[dict]) -> list[str]:
    """Ids of a dataset's rows as a producer gives them: each digest counts its occurrences over all files."""
    counts: Counter[str] = Counter()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, rows in enumerate(files):
            path = Path(folder) / f"{number}.jsonl"
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
            for row in read_records(path):
                digest = row_digest(conversation_of(row.value))
                counts[digest] += 1
                found.append(row_id(digest, counts[digest]))
    return found


def shuffled_keys(value: Any, random) -> Any:
    """The same JSON value with its keys in another order at every level."""
    if isinstance(value, dict):
        keys = random.sample(list(value), len(value))
        return {key: shuffled_keys(value[key], random) for key in keys}
    return [shuffled_keys(inner, random) for inner in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(files, st.randoms(use_true_random=False))
def test_order_of_rows_changes_no_id(rows, random):
    """The set of ids is the same in any order; every id stands once."""
    ids = row_ids(rows)
    assert len(set(ids)) == len(rows)
    assert sorted(row_ids(random.sample(rows, len(rows)))) == sorted(ids)


@settings(max_examples=60, deadline=None)
@given(files, files, st.data())
def test_inserted_and_appended_rows_change_no_other_id(rows, more, data):
    """All the ids from before are there, and as many new ones as there are new rows."""
    grown = list(rows)
    for row in more:
        grown.insert(data.draw(st.integers(0, len(grown))), row)
    assert set(row_ids(rows)) < set(row_ids(grown))
    assert len(set(row_ids(grown))) == len(rows) + len(more)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=2, max_size=8), st.data())
def test_splitting_a_file_changes_no_id(rows, data):
    """One file or several of the same dataset: the same ids."""
    cut = data.draw(st.integers(1, len(rows) - 1))
    assert row_ids(rows[:cut], rows[cut:]) == row_ids(rows)


@settings(max_examples=100, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_key_order_changes_no_id(row, random):
    """At no level: not in the row, a message, a tool or its parameters."""
    assert row_ids([shuffled_keys(row, random)]) == row_ids([row])


@settings(max_examples=100, deadline=None)
@given(rows, rows)
def test_rows_that_say_something_else_have_other_ids(one, other):
    """Equal digests mean equal conversations, own ids and tools, types included."""
    first, second = conversation_of(one), conversation_of(other)
    same = json.dumps([first.source_id, first.messages, first.tools], sort_keys=True) == json.dumps(
        [second.source_id, second.messages, second.tools], sort_keys=True
    )
    assert (row_digest(first) == row_digest(second)) is same

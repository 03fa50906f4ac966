"""app.inventory: counts that add up, and -1 for what nobody knows."""

import pytest

from app.inventory import Live, RunFacts, eta_words, inventory, render_table
from app.ledger import DatasetCounts

RUN = RunFacts(out="out", id="run1", recipe="abc")


def counts(name="chat", rows=10_000, tokenized=6_000, rejected=None, final=True, **changes) -> DatasetCounts:
    fields = {
        "dataset": name, "rows": rows, "rows_final": final, "generated": tokenized, "tokenized": tokenized,
        "rejected_by_reason": {"too_long": 2, "empty_output": 1} if rejected is None else rejected,
        "responses": tokenized, "samples": tokenized, "orphans": 0, "unreadable": 0,
    }  # fmt: skip
    return DatasetCounts(**fields | changes)


def test_the_object_has_exactly_the_agreed_keys():
    """Scripts read it: no key more, none less, counts of the totals the same as of a dataset."""
    shown = inventory(RUN, [counts()], Live({"chat": 5}, {"chat": 7}))
    numbers = {"rows", "generated", "tokenized", "rejected", "rejected_by_reason", "pending", "queued", "in_flight", "responses", "samples", "orphans"}  # noqa: E501
    assert list(shown) == ["run", "datasets", "totals", "eta_seconds", "complete"]
    assert list(shown["run"]) == ["out", "id", "recipe", "state"]
    assert shown["datasets"][0].keys() == numbers | {"dataset", "rows_final"}
    assert shown["totals"].keys() == numbers


def test_the_numbers_add_up_in_each_dataset_and_in_the_totals():
    """rows = tokenized + rejected + pending; totals are sums, reasons included."""
    shown = inventory(RUN, [counts(), counts("code", 20, 5, {"too_long": 3})], Live({"chat": 5}, {"code": 2}))
    for one in [*shown["datasets"], shown["totals"]]:
        assert one["rows"] == one["tokenized"] + one["rejected"] + one["pending"]
        assert one["rejected"] == sum(one["rejected_by_reason"].values())
    assert shown["totals"]["rejected_by_reason"] == {"empty_output": 1, "too_long": 5}
    assert (shown["totals"]["queued"], shown["totals"]["in_flight"]) == (5, 2)


def test_what_nobody_knows_is_minus_one():
    """Without Redis there is no queue length, no speed, no estimate; sums of unknown numbers are unknown."""
    shown = inventory(RUN, [counts(), counts("code")])
    assert {shown["totals"][name] for name in ("queued", "in_flight")} == {-1}
    assert shown["datasets"][0]["queued"] == -1
    assert shown["eta_seconds"] == -1


@pytest.mark.parametrize(
    ("state", "datasets", "expected", "complete"),
    [
        (None, [counts()], "stopped", False),
        ("running", [counts()], "running", False),
        ("enqueueing", [counts(tokenized=9_997, final=False)], "enqueueing", False),
        ("running", [counts(tokenized=9_997)], "complete", True),
        (None, [counts(tokenized=9_997), counts("code", final=False)], "stopped", False),
        (None, [], "stopped", False),
    ],
)
def test_complete_is_read_to_the_end_and_nothing_pending(state, datasets, expected, complete):
    """Otherwise the state is what the processes say, and stopped if there are none."""
    shown = inventory(RunFacts("out", "run1", "abc", state), datasets)
    assert (shown["run"]["state"], shown["complete"]) == (expected, complete)
    assert shown["eta_seconds"] == (0 if complete else -1)


def test_the_table_fits_a_terminal_and_names_every_reason():
    """80 columns, thousands separated, a line per reason, a ? for the unknown."""
    long = counts("a-dataset-with-a-very-long-name", rows=12_345_678, tokenized=11_000_000, final=False, orphans=4)
    text = render_table(inventory(RUN, [counts(), long]))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("12,345,678", "too_long", "empty_output", "total", "?", "orphans", "not been read to its end"):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "no estimate yet"), (0, "nothing left to do"), (3, "less than a minute left"), (61, "about 2 min left"),
     (7260, "about 2 h 01 min left")],
)  # fmt: skip
def test_time_left_is_said_in_words(seconds, words):
    assert eta_words(seconds) == words

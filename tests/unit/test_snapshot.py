"""app.snapshot: an ETA from tokens, one sentence about what is waited for, a line for machines without a null."""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from app.capacity.lengths import Curve, bin_of, later, learn
from app.capacity.share import Share
from app.cli.watching import is_worked_on
from app.inventory import RunFacts
from app.ledger import DatasetCounts
from app.snapshot import COLLECTOR_SECONDS, snapshot, waiting_for
from app.store.live import EndpointNow, Kind, Request, RunNow, WorkerNow
from app.store.report import Rate, Report, figure, parse_figures

FACTS = RunFacts("out", "run1", "recipe", "running")


def exactly(tokens: int) -> Curve:
    """All answers have this length."""
    return Curve((0, tokens, tokens + 1), (1.0, 1.0, 0.0))


WORKER = WorkerNow("w1.short-long@gpu7", 1000, ("short", "long"), 5, 3, 2, False, 1.0)


def counts(name="chat", rows=100, tokenized=40, final=True, **rejected) -> DatasetCounts:
    return DatasetCounts(name, rows, final, tokenized, tokenized, rejected, tokenized, tokenized, 0, 0)


def endpoint(url="http://gpu1:30000", leases=10, kind="short-kind", **fields) -> EndpointNow:
    """Whose requests make 50 tokens a second each, and have all just begun."""
    shares = tuple(Share("short", 20, 4096, 1_000_000, kind) for _ in range(leases))
    return EndpointNow(**{"url": url, "open_since": None, "evidence": "", "state": "closed", "why": "",
                          "requests": leases, "tokens": 20 * leases, "kv_tokens": 1000, "f": 0.9, "pace": 0.05,
                          "shares": shares, **fields})  # fmt: skip


def now(**fields) -> RunNow:
    report = Report(999.0, 500.0, "out", "recipe", True, [counts()], {"chat": Rate(2.0, 500.0)})
    return RunNow(**{"queued": {"chat": 50}, "in_flight": {"chat": 10}, "lanes": {"short": 50, "long": 0},
                     "unwritten": 0, "endpoints": [endpoint()], "halt": None, "at": 1000.0, "report": report,
                     "workers": [WORKER], "kinds": {"chat": [Kind("short-kind", 40, exactly(1000))]}}
                  | fields)  # fmt: skip


def eta(*, of=None, **fields) -> int:
    return snapshot(FACTS, of or [counts()], now(**fields)).inventory["eta_seconds"]


def test_the_estimate_is_tokens_left_over_tokens_a_second():
    """60 pending completions of 1,000 tokens at 10 requests × 50 tokens/s: 120 s, whatever the rate in rows was."""
    assert eta() == 120


def test_answers_twice_as_long_take_twice_as_long_at_the_same_rate_of_rows():
    """Two datasets with the same rows and pace differ in the estimate by their lengths alone."""
    long = {"kinds": {"chat": [Kind("short-kind", 40, exactly(2000))]}}
    assert eta(**long) == 2 * eta()


def test_the_lanes_of_a_dataset_weigh_as_many_answers_as_ended_in_them():
    """Nine short answers of ten: what waits is expected to be 0.9 × 1,000 + 0.1 × 10,000 tokens long."""
    kinds = {"chat": [Kind("short-kind", 90, exactly(1000)), Kind("long-kind", 10, exactly(10_000))]}
    assert eta(kinds=kinds) == round((10 * 1000 + 50 * 1900) / 500)


def test_what_is_nearly_done_counts_for_what_is_left_of_it():
    """Requests under way are expected by the curve at what they have made, not as whole answers."""
    same = {"kinds": {"chat": [Kind("short-kind", 40, exactly(1100))]}}
    late = {"at": 1000.0 + 20, "endpoints": [endpoint()]}  # 20 s at 50 tokens/s
    assert eta(**same, **late) == round((10 * 100 + 50 * 1100) / 500)


def test_the_last_answers_take_as_long_as_the_longest_alone():
    """One that has just begun beside one that is nearly done: 1,200 tokens at 100 tokens/s, and yet 22 s."""
    same = {"kinds": {"chat": [Kind("short-kind", 40, exactly(1100))]}}
    shares = tuple(Share("short", 20, 4096, 1_000_000 - seconds * 1000, "short-kind") for seconds in (0, 20))
    assert eta(of=[counts(tokenized=98)], endpoints=[endpoint(leases=2, shares=shares)], **same) == 22


@pytest.mark.parametrize("done", [0.5, 0.8, 0.9, 0.95])
def test_the_end_of_a_short_run_is_estimated_neither_short_nor_long(done):
    """300 answers of unequal length, 40 at once, 50 tokens/s each: the mean over 30 such runs is within a quarter."""
    ratios = []
    for seed in range(30):
        chance = random.Random(seed)
        lengths = [max(2, round(chance.lognormvariate(6, 0.6))) for _ in range(300)]
        slots = [0.0] * 40
        spans = []  # (start, end) in seconds of each answer, in the order in which they start
        for length in lengths:
            start = min(slots)
            slots[slots.index(start)] = start + length / 50
            spans.append((start, start + length / 50))
        at = sorted(end for _, end in spans)[int(done * len(spans))]
        finished, going = [end <= at for _, end in spans], [start <= at < end for start, end in spans]
        bins = Counter(bin_of(length) for length, over in zip(lengths, finished, strict=True) if over)
        made = [round((at - start) * 50) for (start, _), on in zip(spans, going, strict=True) if on]
        shares = tuple(Share("short", 20, 4096, round(1e6 - one * 20), "short-kind") for one in made)
        told = eta(
            of=[counts(rows=300, tokenized=sum(finished))], endpoints=[endpoint(leases=len(made), shares=shares)],
            kinds={"chat": [Kind("short-kind", sum(finished), learn(bins, made, 4096))]},
        )  # fmt: skip
        ratios.append(told / (max(end for _, end in spans) - at))
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=1 / 4)


def test_the_stages_that_an_answer_still_needs_count():
    """A request in a first stage is a whole answer to make, one in a later stage what is left beyond the first."""
    stages = {"stage_tokens": 400, "max_new_tokens": 4096}
    tokens = (counts().rows - counts().tokenized) * 1000
    first = tuple(Share("short", 20, 400, 1_000_000, "short-kind") for _ in range(10))
    second = tuple(Share("short", 420, 400, 1_000_000, later("short-kind")) for _ in range(10))
    assert eta(endpoints=[endpoint(shares=first)], **stages) == round(tokens / 500)
    assert eta(endpoints=[endpoint(shares=second)], **stages) == round((tokens - 10 * 400) / 500)


def wasteful(**fields) -> EndpointNow:
    """A server that keeps a fifth of its pool empty while requests wait there."""
    shares = tuple(Share("short", 1150, 6000, 1_000_000, "short-kind") for _ in range(40))
    return endpoint(**{"kv_tokens": 120_000, "used_tokens": 96_000, "waiting": 4, "shares": shares} | fields)


EXPONENTIAL = Curve((0, *range(250, 6001, 250), 6001), (1.0, *(math.exp(-n / 1480) for n in range(250, 6001, 250)), 0))
WASTEFUL = {"kinds": {"chat": [Kind("short-kind", 5000, EXPONENTIAL)]}, "max_new_tokens": 6000, "can_be_staged": True}


def advice(**fields) -> str:
    """What the live view suggests."""
    return " ".join(snapshot(FACTS, [counts()], now(**{"endpoints": [wasteful()]} | WASTEFUL | fields)).advice)


def test_a_stage_is_suggested_where_a_careful_server_lets_requests_wait():
    """With a number, from the lengths learned, and not where it is refused, is there already, or nothing waits."""
    stage = int(re.search(r"--stage-tokens (\d+)", advice())[1])
    assert sum(EXPONENTIAL.alive(n) for n in range(6000)) / 1.3 < stage < 1.3 * 1480
    for fields in ({"can_be_staged": False}, {"stage_tokens": 1500}, {"kinds": {}}):
        assert "--stage-tokens" not in advice(**fields)
        assert "--schedule-conservativeness 0.3" in advice(**fields)
    for fields in ({"used_tokens": 115_000}, {"waiting": 0}, {"open_since": 1.0}, {"kv_tokens": None}):
        assert advice(endpoints=[wasteful(**fields)]) == ""
    assert advice(queued={"chat": 0}) == ""


def test_a_server_that_retracts_often_is_told_so():
    """One answer in ten was pushed out of the batch."""
    assert "conservativeness 1.3" in advice(endpoints=[wasteful(answered=100, retractions=10)])
    assert "conservativeness 0.3" in advice(endpoints=[wasteful(answered=100, retractions=2)])


def test_what_is_away_makes_no_tokens():
    """Requests at an endpoint that is away are still to be done, by the one that is there."""
    away = endpoint("http://gpu2:30000", open_since=1.0)
    assert eta(endpoints=[endpoint(), away]) == eta()


@pytest.mark.parametrize(
    "fields",
    [
        {"kinds": {"chat": [Kind("short-kind", 3, None)]}},
        {"endpoints": [endpoint(pace=0.0)]},
        {"endpoints": [endpoint(open_since=1.0)]},
        {"endpoints": [endpoint(kind="another run's")]},
        {"of": [counts(final=False)]},
    ],
    ids=["too few have finished", "no pace yet", "all away", "only others' requests", "rows are still counted"],
)
def test_nothing_is_promised_without_both(fields):
    """No estimate of tokens or no speed: -1."""
    assert eta(**fields) == -1


def test_an_input_still_being_read_is_taken_for_as_long_as_its_producer_expects():
    """40 of an expected 1,000 are done: 960 left."""
    assert eta(of=[counts(final=False)], expected_rows={"chat": 1000}) == pytest.approx(960 * 1000 / 500, abs=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"halt": {"exit_code": 2, "message": "stop token ids are refused"}}, "stop token ids are refused"),
        ({"endpoints": [endpoint(open_since=1.0, evidence="connection refused")]}, "gpu1:30000: connection refused"),
        ({"memory_bytes": 10, "memory_limit_bytes": 10}, "Redis is full"),
        ({"workers": []}, "no worker"),
        ({"report": replace(now().report, trouble="the disk is full")}, "the disk is full"),
        ({"unwritten": 7, "report": replace(now().report, at=999.0 - COLLECTOR_SECONDS)}, "7 answers wait"),
    ],
    ids=["halted", "endpoints", "memory", "workers", "disk", "collector"],
)
def test_what_is_waited_for_is_said_in_one_sentence(fields, words):
    """Each thing that can keep a run from going on, and nothing while it goes."""
    assert waiting_for(now()) == ""
    assert words in waiting_for(now(**fields))
    seen = snapshot(FACTS, [counts()], now(**fields))
    assert words in seen.waiting_for
    assert seen.inventory["run"]["state"] == "waiting"


def test_a_run_that_nobody_works_on_waits_for_nothing():
    """Stopped is a state, not a wait."""
    seen = snapshot(replace(FACTS, state=None), [counts()], None)
    assert (seen.waiting_for, seen.inventory["run"]["state"]) == ("", "stopped")


def test_the_oldest_request_is_the_oldest_of_all_workers_in_this_run():
    """Another run's older request is not ours."""
    old, older = Request("chat:a:0:0", "http://e1", 900.0), Request("chat:b:0:0", "http://e2", 800.0)
    workers = [replace(WORKER, oldest={"run1": old}), replace(WORKER, oldest={"run1": older, "run2": old})]
    seen = snapshot(FACTS, [counts()], now(workers=workers))
    assert (seen.oldest, seen.oldest_seconds) == (older, 200.0)


def test_extra_generations_are_summed_over_datasets():
    """Requests beyond the first."""
    figures = parse_figures({figure("extra", "chat").encode(): b"3", figure("extra", "code").encode(): b"4"})
    assert snapshot(FACTS, [counts()], now(figures=figures)).extra_generations == 7


def nulls(value) -> list:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [None] if value is None else [null for one in inner for null in nulls(one)]


@pytest.mark.parametrize("seen", [now(), None], ids=["all known", "Redis away"])
def test_a_line_for_machines_has_all_keys_and_no_null(seen):
    """Whatever is unknown is -1, so that a reader needs no second case."""
    keys = snapshot(FACTS, [counts()], now()).to_json().keys()
    said = snapshot(FACTS, [counts()], seen).to_json()
    assert said.keys() == keys
    assert nulls(json.loads(json.dumps(said))) == []


def test_a_run_whose_producer_left_is_worked_on_while_workers_hold_its_tasks():
    """`enqueue --no-wait` leaves; nobody holds the directory, and the run goes on."""
    assert is_worked_on(now())
    assert not is_worked_on(now(in_flight={"chat": 0}))
    assert not is_worked_on(None)

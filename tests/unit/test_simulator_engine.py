"""The simulated scheduler keeps SGLang's arithmetic; all without a clock."""

import json
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sglang.simulator.engine import CLIP_TOKENS, END_RATIO, Engine, EngineConfig, Request
from tests.belt import ROOT
from tests.real.timing import errors, fitted

DATA = ROOT / "tests" / "data" / "sglang"


def play(engine: Engine, now: float = 0.0) -> tuple[list[Request], float]:
    """Runs until nothing is left; who finished, in order, and when."""
    over: list[Request] = []
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        over += engine.advance(now)
        assert engine.used_tokens <= engine.config.kv_tokens
        assert engine.used_tokens == sum(r.prompt_tokens + engine.made(r) for r in engine.running)
    return over, now


def flood(admission: str, limit: int = 0, count: int = 400) -> tuple[float, Engine]:
    """Seconds for the study's load (prompts 500-1,800, outputs log-normal around 2,700) with `limit` in flight."""
    rnd = random.Random(5)
    jobs = [Request("", rnd.randint(500, 1800), 8192, min(8192, max(2, int(rnd.lognormvariate(7.9, 0.45)))))
            for _ in range(count)]  # fmt: skip
    config = EngineConfig(
        kv_tokens=231_120, max_running=4096, admission=admission, step_seconds=0.002, step_seconds_per_request=0.00001,
        step_seconds_per_token=0.0, prefill_tokens_per_second=60_000.0,
    )  # fmt: skip
    engine, now, todo = Engine(config), 0.0, iter(jobs)
    for _ in range(limit or count):
        engine.submit(0.0, next(todo))
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        for _ in engine.advance(now):
            if follower := next(todo, None):
                engine.submit(now, follower)
    return now, engine


def test_a_request_alone_takes_its_prefill_and_its_steps():
    """Prefill brings the first token, each further one a step of base + 1 request."""
    engine = Engine(EngineConfig(
        kv_tokens=10_000, step_seconds=0.01, step_seconds_per_request=0.001, step_seconds_per_token=0.0,
        prefill_tokens_per_second=60_000.0,
    ))  # fmt: skip
    engine.submit(5.0, Request("a", 600, 100, 11))
    (request,), now = play(engine, 5.0)
    assert now == pytest.approx(5.0 + 600 / 60_000 + 10 * 0.011)
    assert (request.made, request.outcome, request.prefilled) == (11, "done", pytest.approx(5.01))


def test_a_step_reads_every_token_in_the_pool():
    """So a step takes the longer the more is held: 100 + 1, 100 + 2 … tokens."""
    engine = Engine(EngineConfig(
        kv_tokens=10_000, step_seconds=0.0, step_seconds_per_token=0.001, prefill_tokens_per_second=1e9
    ))  # fmt: skip
    engine.submit(0.0, Request("a", 100, 100, 11))
    (_,), now = play(engine)
    assert now == pytest.approx(sum(100 + made for made in range(1, 11)) / 1000)


@pytest.mark.parametrize(
    ("conservativeness", "tokens_per_second", "running", "use"), [(1.0, 4870, 40, 0.80), (0.3, 5397, 46.5, 0.89)]
)
def test_its_throughput_is_that_of_an_h200(conservativeness, tokens_per_second, running, use):
    """300 prompts of 500-1,800 ids, 6,000 allowed, about exponential lengths of 1,480; measured on SGLang 0.5.17."""
    rnd = random.Random(3)
    engine = Engine(EngineConfig(kv_tokens=120_000, conservativeness=conservativeness))
    for number in range(300):
        length = min(6000, 1 + int(rnd.expovariate(1 / 1480)))
        engine.submit(0.0, Request(str(number), rnd.randint(500, 1800), 6000, length))
    now, crowded, area, used = 0.0, 0.0, 0.0, 0.0
    while (event := engine.next_event()) is not None:
        if engine.waiting:
            crowded += event - now
            area, used = area + len(engine.running) * (event - now), used + engine.used_tokens * (event - now)
        now = event
        engine.advance(now)
    assert engine.counters.generated_tokens / now == pytest.approx(tokens_per_second, rel=0.06)
    assert area / crowded == pytest.approx(running, rel=0.06)
    assert used / crowded / 120_000 == pytest.approx(use, rel=0.06)


def test_fitted_to_a_real_server_on_a_cpu_it_takes_as_long():
    """Steps and prefills of SGLang 0.5.23 (docs/evidence/real-sglang.md), and a crowd that it was not fitted to."""
    found = json.loads((DATA / "timing_cpu_0.5.23.json").read_text())
    times = fitted(found)
    assert times == pytest.approx(found["times"])
    off = {what: abs(simulated / real - 1) for what, real, simulated in errors(found, times)}
    assert max(off.values()) < 0.25
    assert statistics.mean(off.values()) < 0.08
    assert off["mix, 48 requests"] < 0.15


def test_idle_jumps_need_few_events():
    """A thousand steps without anything happening are one event, so that an engine costs nearly no CPU."""
    engine = Engine(EngineConfig(kv_tokens=100_000))
    engine.submit(0.0, Request("a", 10, 5000, 5000))
    events = 0
    while (event := engine.next_event()) is not None:
        engine.advance(event)
        events += 1
    assert events <= 3


def test_looking_often_changes_nothing():
    """The outcome does not depend on how often `advance` is called in between."""
    def finishes(tick: float) -> list[tuple[str, float]]:
        engine = Engine(EngineConfig(kv_tokens=3000))
        for n in range(12):
            engine.submit(0.0, Request(str(n), 100 + n, 900, 100 + 37 * n))
        over, now = [], 0.0
        while (event := engine.next_event()) is not None:
            now = min(max(event, now), now + tick) if event > now else event
            over += engine.advance(now)
        return [(r.rid, pytest.approx(r.finished)) for r in over]

    assert finishes(0.0007) == finishes(1e9)


def test_the_reserve_rule_keeps_room_for_what_runs():
    """tokens + min(left, 4096) must fit beside min(left, 4096) x ratio of each running request."""
    engine = Engine(EngineConfig(kv_tokens=10_000))
    for name in "ab":
        engine.submit(0.0, Request(name, 1000, 8000, 8000))
    engine.advance(0.0001)
    # free is 10,000 - 1,001 - 0.7 x 4,096 = 6,132 for a need of 1,001 + 4,096: the second fits, a third does not
    engine.submit(0.5, Request("c", 1000, 8000, 8000))
    engine.advance(0.6)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    assert CLIP_TOKENS == 4096


def test_the_reserve_decays_with_the_steps():
    """After 600 steps a running request is reserved only 0.098 of what it may yet make."""
    engine = Engine(EngineConfig(kv_tokens=100_000))
    engine.submit(0.0, Request("a", 10, 5000, 5000))
    engine.advance(700 * engine.step_time())
    assert engine.new_token_ratio == pytest.approx(END_RATIO)


def test_free_space_admission_looks_at_nothing_but_the_present():
    """Without the reserve all that fit now come in, whatever they may yet make."""
    engine = Engine(EngineConfig(kv_tokens=10_000, admission="free_space"))
    for n in range(9):
        engine.submit(0.0, Request(str(n), 1000, 8000, 8000))
    engine.advance(0.2)
    assert len(engine.running) == 9


@pytest.mark.parametrize(("policy", "victim"), [("length", "long prompt"), ("newest", "last")])
def test_a_full_pool_retracts_and_keeps_what_was_made(policy, victim):
    """The victim waits with its ids, is prefilled again with them, and ends with all its tokens.

    Two of the same output: SGLang takes the one with the longer prompt, the other policy the later one.
    """
    engine = Engine(EngineConfig(kv_tokens=1000, admission="free_space", retraction=policy))
    engine.submit(0.0, Request("first", 10, 1, 1))
    engine.submit(0.0, Request("long prompt", 300, 600, 500))
    engine.submit(0.0, Request("last", 100, 600, 500))
    over, _ = play(engine)
    assert {r.rid: r.num_retractions for r in over if r.num_retractions} == {victim: 1}
    assert [r.made for r in over] == [1, 500, 500]
    again = (300 if victim == "long prompt" else 100) + 300  # its prompt, and the 300 tokens made by then
    assert engine.counters.prefilled_tokens == 10 + 300 + 100 + again
    assert engine.counters.generated_tokens == 1001


def test_a_full_queue_refuses_newcomers_but_not_those_that_free_slots_will_take():
    """900 at once on 256 + 512 places: 768 are served, 132 refused, as a real server did."""
    engine = Engine(EngineConfig(kv_tokens=10_000_000, max_running=256, max_queued=512))
    taken = sum(engine.submit(0.0, Request(str(n), 10, 20, 20)) for n in range(900))
    over, _ = play(engine)
    assert taken == 768
    assert sorted(r.outcome for r in over).count("queue_full") == 132


def test_an_abort_gives_back_the_tokens_and_what_was_made():
    """By prefix; running ones keep a part, waiting ones never began."""
    engine = Engine(EngineConfig(kv_tokens=10_000, max_running=1))
    for rid in ("a-1", "a-10", "b"):
        engine.submit(0.0, Request(rid, 100, 500, 500))
    engine.abort(0.3, "a-1")
    over = {r.rid: r for r in engine.take()}
    assert {rid: r.outcome for rid, r in over.items()} == {"a-1": "aborted", "a-10": "aborted_waiting"}
    assert over["a-1"].made > 100
    assert engine.used_tokens == 0
    rest, _ = play(engine, 0.3)
    assert [r.rid for r in rest] == ["b"]


jobs = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.floats(0, 2)), max_size=25)


@settings(max_examples=60)
@given(jobs, st.sampled_from(["reserve", "free_space"]), st.sampled_from(["length", "newest"]), st.integers(1, 9))
def test_whatever_comes_ends_once_with_all_its_tokens(given_jobs, admission, retraction, slots):
    """No request is lost or doubled, none exceeds its allowance, and the pool never holds more than it has."""
    engine = Engine(EngineConfig(kv_tokens=700, max_running=slots, admission=admission, retraction=retraction))
    over, now = [], 0.0
    for n, (prompt, allowed, tokens, after) in enumerate(given_jobs):
        over += engine.advance(now)
        engine.submit(now, Request(str(n), prompt, allowed, min(tokens, allowed)))
        now += after / 10
    rest, _ = play(engine, now)
    over += rest
    assert sorted(int(r.rid) for r in over) == list(range(len(given_jobs)))
    assert all(r.made == r.tokens and r.outcome == "done" for r in over)
    assert engine.counters.peak_used_tokens <= 700
    assert engine.counters.peak_running <= slots
    assert engine.counters.generated_tokens == sum(r.tokens for r in over)


def test_flooding_a_server_without_a_reserve_is_slow():
    """The study's ordering: unbounded on free space < fixed 57 < fixed 80 = unbounded on the reserve rule."""
    unbounded, crowded = flood("free_space")
    reserve, calm = flood("reserve")
    assert crowded.counters.retractions > 10 * max(1, calm.counters.retractions)
    assert unbounded > flood("reserve", 57)[0] > flood("reserve", 80)[0]
    assert unbounded > flood("free_space", 57)[0]
    assert reserve < 0.87 * unbounded


def test_what_goes_on_with_a_request_pays_for_its_new_ids_alone_while_they_are_cached():
    """Prefill of the rest at once; of all again where what ran meanwhile pushed it out."""
    for between, prefilled in ((0, 100), (950, 100 + 950 + 110)):
        engine = Engine(EngineConfig(kv_tokens=1000, prefix_cache=True))
        engine.submit(0.0, Request("a", 100, 10, 10))
        _, now = play(engine)
        if between:
            engine.submit(now, Request("other", between, 2, 2))
            _, now = play(engine, now)
        engine.submit(now, Request("b", 110, 10, 10, after="a"))
        play(engine, now)
        assert engine.counters.prefilled_tokens == prefilled

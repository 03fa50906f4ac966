"""Learning f: up while there is room and work, down on harm, and never faster than the endpoint can show the effect."""

from dataclasses import replace

import orjson
import pytest

from app.capacity.controller import (
    F_LEAST,
    F_MOST,
    HEADROOM,
    QUEUE_AIM,
    SLOW_START_REQUESTS,
    USE_EMPTY,
    Ceilings,
    Observation,
    State,
    ceilings,
    observe,
    overflow_tokens,
    restored,
    to_recall,
)
from app.capacity.deaths import DEATH_SHARE

ROOM = Observation(leases=50, wanted=True, running=50, waiting=0, used_tokens=50_000, kv_tokens=100_000)


def after(seen: Observation, seconds: float = 100.0, state: State | None = None) -> State:
    """The state after looking at the same thing four times a second."""
    state = state or State()
    for look in range(int(seconds * 4)):
        state = observe(state, seen, 1000.0 + look / 4)
    return state


def test_f_rises_while_tasks_wait_and_the_pool_has_room():
    """And never beyond its bounds."""
    assert 1.2 < after(ROOM).f <= F_MOST
    assert after(ROOM, 500).f == F_MOST


@pytest.mark.parametrize(
    "change", [{"wanted": False}, {"waiting": QUEUE_AIM + 1}, {"stale_seconds": 60.0}, {"used_tokens": None}],
    ids=["nobody-waits-for-a-lease", "the-server-queues", "stale", "tells-nothing"],
)  # fmt: skip
def test_f_stands_still_without_evidence_for_room(change):
    """Nobody wants more, the server has a queue, or its figures mean nothing."""
    assert after(replace(ROOM, **change)).f == 1.0


@pytest.mark.parametrize(
    "harm", [{"retractions": 1}, {"used_tokens": 99_000}], ids=["retraction", "full"]
)
def test_f_falls_on_harm(harm):
    """Retractions and a pool nearly full; down to its least."""
    assert after(replace(ROOM, **harm), 10).f < 0.97
    assert after(replace(ROOM, **harm), 500).f == F_LEAST


def test_f_changes_at_most_once_in_the_time_that_a_change_needs_to_show():
    """Its effect comes when answers have grown: answers of 100 s allow one step in fifty."""
    seen = replace(ROOM, generation_seconds=100.0)
    assert after(seen, 45).f == 1.0
    once = after(seen, 55).f
    assert once > 1.0
    assert after(seen, 95).f == once
    assert after(seen, 105).f > once


def test_as_long_as_the_first_answers_run_the_pool_is_not_full_yet():
    """Neither does f rise, nor is anything usual."""
    state = State()
    for look in range(400):
        state = observe(state, replace(ROOM, eldest_seconds=look / 4), look / 4)
    assert state.f == 1.0
    assert ceilings(state, 100.0).requests == -1


def test_f_ends_at_a_pool_that_is_full_enough():
    """Where use follows f with a lag of an answer's time, f rises until the pool is not clearly empty, and stays."""
    state, lagged, last = State(), 0.6, []
    for look in range(4000):
        lagged += (0.65 * state.f - lagged) / 40
        state = observe(state, replace(ROOM, used_tokens=int(lagged * 100_000)), look / 4)
        last = [*last[-999:], 0.65 * state.f]
    assert all(USE_EMPTY - 0.01 < use < USE_EMPTY + 0.05 for use in last)


def test_a_lowered_f_returns_to_one_when_the_pool_is_less_than_full():
    """And not beyond while it is well filled."""
    harmed = after(replace(ROOM, retractions=1), 10)
    assert harmed.f < 0.95
    state = harmed
    for look in range(800):
        state = observe(state, replace(ROOM, used_tokens=88_000), 2000.0 + look / 4)
    assert 1.0 <= state.f < 1.02


def test_more_than_usual_is_let_in_slowly():
    """A third more than what was in flight for half of an answer's time: what is let in at once grows in lockstep."""
    state = after(ROOM, 100)
    assert ceilings(state, 1100.0).requests == int(50 * HEADROOM)
    raised = after(replace(ROOM, leases=65), 2, state)
    assert 65 < ceilings(raised, 1100.0).requests < 65 * HEADROOM
    idle = after(replace(ROOM, leases=2, wanted=False), 100, state)
    assert ceilings(idle, 1100.0).requests == int(50 * HEADROOM)


def test_what_was_usual_before_an_endpoint_went_is_usual_when_it_is_back():
    """Its first generation is young and small, so many more would fit; they would all grow together."""
    state = observe(after(ROOM, 100), Observation(open=True, died=False), 2000.0)
    for look in range(40):
        state = observe(state, replace(ROOM, leases=16, eldest_seconds=look / 4), 2010.0 + look / 4)
    assert ceilings(state, 2030.0).requests == int(50 * HEADROOM)


def test_a_collapse_of_throughput_lowers_f():
    """More run than before, and together they make less."""
    state = after(replace(ROOM, wanted=False, throughput=1000.0), 30)
    collapsed = replace(ROOM, running=80, leases=80, throughput=300.0)
    assert observe(state, collapsed, 1100.0).f < 1.0


def test_a_server_that_queues_gets_a_few_more_than_it_runs():
    """What stands in its queue is lost in a crash and feeds nothing."""
    state = after(replace(ROOM, waiting=30), 2)
    assert ceilings(state, 1002.0).requests == 50 + QUEUE_AIM
    assert ceilings(after(ROOM, 2), 1002.0).requests == int(50 * HEADROOM)


def test_after_a_return_it_starts_slowly():
    """A few requests at first, twice as many each second, without limit after ten."""
    state = observe(State(), Observation(open=True), 0.0)
    state = observe(state, Observation(), 10.0)
    assert ceilings(state, 10.0).requests == SLOW_START_REQUESTS
    assert ceilings(state, 14.0).requests == 16 * SLOW_START_REQUESTS
    assert ceilings(state, 21.0).requests == -1


def test_what_is_usual_and_little_is_given_at_once_after_a_return():
    """Two dozen need no slow start; two hundred do."""
    for usual, first in ((24, 24), (32, 32), (33, 16), (200, 16), (5, 16)):
        state = after(replace(ROOM, leases=usual, running=usual), 100)
        state = observe(state, Observation(open=True, died=False), 2000.0)
        assert ceilings(state, 2010.0).requests == first


def test_the_youngest_are_recalled_before_the_pool_overflows():
    """As many as free the tokens that will be missing in three looks, if only those end that surely do; the eldest
    always stays."""
    full = replace(ROOM, used_tokens=92_000, throughput=20_000.0)
    assert overflow_tokens(full) == 92_000 + 3 * 5_000 - 100_000
    assert overflow_tokens(replace(full, ending_tokens=5_000)) == 92_000 + 3 * 5_000 - 5_000 - 100_000
    assert overflow_tokens(replace(full, ending_tokens=7_000)) == 0
    assert overflow_tokens(replace(full, throughput=9_000.0)) == 0
    leases = [(1.0, 9000.0, "old"), (3.0, 1000.0, "new"), (2.0, 4000.0, "middle")]
    assert to_recall(leases, 500) == ["new"]
    assert to_recall(leases, 3000) == ["new", "middle"]
    assert to_recall(leases, 99_999) == ["new", "middle"]


def test_who_stands_in_the_servers_queue_frees_nothing_and_is_recalled_all_the_same():
    """Its prompt is not in the pool yet, and would take the room that others free."""
    leases = [(4.0, 9000.0, "queued"), (3.0, 1000.0, "new"), (2.0, 4000.0, "middle"), (1.0, 1.0, "old")]
    assert to_recall(leases, 500, waiting=1) == ["queued", "new"]
    assert to_recall(leases, 0, waiting=1) == []


def test_who_leaves_or_loads_is_not_remembered_as_dead():
    """The same level in flight, no death: no ceiling but that of the slow start."""
    full = after(replace(ROOM, leases=100, running=100), 10)
    away = observe(full, Observation(open=True, died=False), 2000.0)
    assert away.lessons.deaths == 0
    assert ceilings(away, 3000.0).requests == SLOW_START_REQUESTS


def test_while_an_endpoint_is_away_its_ceiling_is_that_of_its_return():
    """Whoever closes the breaker lets only a few in, before anybody has looked."""
    away = observe(State(), Observation(open=True), 0.0)
    assert ceilings(away, 3600.0).requests == SLOW_START_REQUESTS


def test_a_server_that_refuses_gets_what_it_took_and_slowly_more():
    """Twenty of fifty, though it tells of a thousand; one more after each settling time, while more is asked for."""
    state = after(replace(ROOM, leases=50, running=20, refusals=30), 1, after(ROOM, 100))
    assert ceilings(state, 1100.0).requests == 20
    state = observe(state, replace(ROOM, leases=18, running=18), 1200.0)
    assert ceilings(state, 1200.0).requests == 20
    for look in range(100):
        most = ceilings(state, 1300.0 + look / 4).requests
        seen = replace(ROOM, leases=most, running=min(most, 20), refusals=int(most > 20))
        state = observe(state, seen, 1300.0 + look / 4)
        assert 20 <= ceilings(state, 1300.0 + look / 4).requests <= 21
    free = state
    for look in range(2400):
        most = ceilings(free, 2000.0 + look / 4).requests
        free = observe(free, replace(ROOM, leases=most, running=most), 2000 + look / 4)
    assert ceilings(free, 2600.0).requests > 200
    assert state.f >= 1.0


def test_a_server_that_tells_nothing_and_refuses_gets_what_it_did_not_refuse():
    """And one at least, or nobody would hear that it takes some again."""
    silent = Observation(leases=50, wanted=True, refusals=30)
    assert ceilings(observe(after(replace(silent, refusals=0), 2), silent, 1002.0), 1002.0).requests == 20
    assert ceilings(observe(State(), replace(silent, refusals=70), 1002.0), 1002.0).requests == 1


def test_an_endpoint_that_died_of_a_full_pool_is_filled_less_from_then_on():
    """A pool at 0.9 raises nothing and lowers f there, and is fine elsewhere, and there after some hours."""
    died = observe(after(replace(ROOM, used_tokens=99_000), 10), Observation(open=True), 2000.0)
    assert died.lessons.fragility(2000.0) == 1.0
    state = observe(died, replace(ROOM, leases=0, running=0, used_tokens=0), 2010.0)
    for look in range(400):
        state = observe(state, replace(ROOM, used_tokens=90_000), 2010.0 + look / 4)
    assert state.f < 0.8
    assert after(replace(ROOM, used_tokens=90_000), 100).f == 1.0
    for look in range(2400):
        state = observe(state, replace(ROOM, used_tokens=90_000), 2010.0 + 6 * 3600 + look / 4)
    assert state.f > 0.95


def test_a_death_comes_into_the_ceilings():
    """Of requests and tokens, until the minute is over and the level regained."""
    state = observe(after(replace(ROOM, leases=100, running=100), 10), Observation(open=True), 2000.0)
    state = observe(state, replace(ROOM, leases=0, running=0, used_tokens=0), 2010.0)
    assert ceilings(state, 2050.0).requests == int(100 * DEATH_SHARE)
    assert ceilings(state, 2050.0).tokens == int(50_000 * DEATH_SHARE)
    assert ceilings(replace(state, usual_requests=0.0, f=1.0), 2200.0) == Ceilings(1.0, -1, -1)


def test_what_was_learned_is_read_back_as_it_was_written():
    """A worker that takes over goes on with it; what an older version wrote is no state."""
    state = observe(after(replace(ROOM, used_tokens=99_000), 10), Observation(open=True), 2000.0)
    assert restored(orjson.loads(orjson.dumps(state))) == state
    with pytest.raises(KeyError):
        restored({"f": 1.0, "death_requests": 0})

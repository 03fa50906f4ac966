"""Whatever number of requests kills an endpoint, it dies of it a few times and then seldom; where none does, it is fed
all the same."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from app.capacity.controller import LOOK_SECONDS, SLOW_START_REQUESTS, Observation, State, ceilings, observe

HALF_HOUR = 1800.0


@dataclass
class Life:
    """So many tasks want to be at an endpoint, as many are as the controller lets in; it dies above `deadly` of them,
    or after every so many answers."""

    demand: int
    answer_seconds: float
    deadly: float = float("inf")
    every: int = 0
    down_seconds: float = 10.0
    blamed: bool = True

    def play(self, seconds: float) -> tuple[list[float], float]:
        """When it died, and its requests in flight over those wanted, while it was up."""
        state, now, answers, since, deaths, there, looks = State(), 0.0, 0.0, 0.0, [], 0, 0
        while now < seconds:
            most = ceilings(state, now).requests
            leases = self.demand if most < 0 else min(most, self.demand)
            if leases > self.deadly or 0 < self.every <= since:
                deaths.append(now)
                state, since = observe(state, Observation(open=True, died=self.blamed, leases=leases), now), 0.0
                now += self.down_seconds
                state = observe(state, Observation(), now)
                continue
            made, before = leases * LOOK_SECONDS / self.answer_seconds, int(answers)
            now, answers, since = now + LOOK_SECONDS, answers + made, since + made
            there, looks = there + leases, looks + 1
            state = observe(state, Observation(
                leases=leases, running=leases, wanted=True, answers=int(answers) - before,
                generation_seconds=self.answer_seconds, eldest_seconds=min(now, self.answer_seconds),
            ), now)  # fmt: skip
        return deaths, there / max(1, looks) / self.demand


@settings(max_examples=6, deadline=None)
@given(st.integers(20, 400), st.floats(0.05, 1.2), st.sampled_from([0.3, 1.0, 5.0, 60.0]))
def test_a_deadly_number_of_requests_is_met_three_times_at_most_and_then_half_an_hour_apart(demand, share, seconds):
    """Once because nobody can know, where all began at once a second time, once to see whether it was that."""
    deadly = max(SLOW_START_REQUESTS, int(share * demand))
    deaths, level = Life(demand, seconds, deadly).play(HALF_HOUR)
    assert len(deaths) <= 3
    assert level >= 0.8 * min(1.0, deadly / demand)
    if deadly >= demand:
        assert deaths == []


@settings(max_examples=5, deadline=None)
@given(st.integers(1, SLOW_START_REQUESTS), st.sampled_from([1.0, 20.0]))
def test_what_dies_of_less_than_it_gets_at_first_is_found_by_halving(deadly, seconds):
    """Few, however few it bears."""
    deaths, _ = Life(200, seconds, deadly).play(600.0)
    assert len(deaths) <= 9


@settings(max_examples=5, deadline=None)
@given(st.integers(8, 200), st.sampled_from([0.5, 2.0, 20.0]), st.floats(4.0, 40.0))
def test_crashes_that_have_nothing_to_do_with_the_load_cost_no_capacity(demand, seconds, answers_each):
    """After every so many answers, four for each request in flight at least: what is lost is what any return costs."""
    life = Life(demand, seconds, every=int(answers_each * demand))
    deaths, level = life.play(8.0 * answers_each * (seconds + life.down_seconds))
    assert len(deaths) > 3
    assert level >= 0.97 * replace(life, blamed=False).play(8.0 * answers_each * (seconds + life.down_seconds))[1]

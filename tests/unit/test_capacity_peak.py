"""The forecast is the expectation of what a pool will hold, and a margin; many of a kind may be counted together."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.capacity.lengths import parse_curve
from app.capacity.peak import MARGIN, SLOTS, Forecast, Held

CURVE = parse_curve("0:1 500:0.9 1000:0.6 2000:0.3 4000:0.1 8000:0")
REQUESTS = st.lists(
    st.builds(
        lambda prompt, made, more, curve: Held(prompt + made, made, made + more, curve),
        st.integers(1, 5000), st.floats(0, 9000), st.integers(1, 9000), st.sampled_from([CURVE, None]),
    ), min_size=1, max_size=40,
)  # fmt: skip


def exact(requests: list[Held], steps: float) -> float:
    """What all are expected to hold after so many steps, each counted alone."""
    return sum((r.tokens + steps) * r.curve.alive(r.made + steps) / r.curve.alive(r.made) for r in requests)


def test_without_a_curve_the_peak_is_all_that_will_ever_be_held():
    """Two that end together add up, without a margin: nothing is left to luck where nothing is known."""
    assert Forecast([Held(100, 0, 50)]).peak == pytest.approx(150)
    assert Forecast([Held(100, 0, 50)] * 2).peak == pytest.approx(300)
    assert Forecast([Held(1000, 0, 64), Held(10, 0, 640)]).peak == pytest.approx(1010 + 2 * 70, abs=20)


def test_what_is_expected_is_what_each_is_expected_to_hold():
    """Counted together by age, within a few per cent of each alone, at each moment."""
    requests = [Held(800 + made, made, 8192, CURVE) for made in range(0, 6000, 37)]
    forecast = Forecast(requests)
    for slot in range(0, SLOTS, 8):
        assert forecast._mean[slot] == pytest.approx(exact(requests, slot * forecast.step), rel=0.03)


def test_the_margin_shrinks_with_the_number_of_requests():
    """The luck of many cancels out: a hundred may fill a pool further than four."""

    def excess(count: int) -> float:
        requests = [Held(800 + 60 * n % 4000, 60 * n % 4000, 8192, CURVE) for n in range(count)]
        forecast = Forecast(requests)
        return forecast.peak / max(exact(requests, slot * forecast.step) for slot in range(SLOTS))

    assert excess(4) > 1.3
    assert 1.05 < excess(100) < 1.25
    assert MARGIN == 3


def test_an_answer_beyond_everything_known_goes_on_for_a_while():
    """And one near its allowance ends there."""
    beyond = Forecast([Held(9100, 9000, 20_000, CURVE)])
    assert 9100 + 256 <= beyond.peak <= 9100 + 256 + beyond.step
    assert Forecast([Held(900, 400, 410, CURVE)]).peak <= 900 + Forecast([], [Held(0, 0, 1, CURVE)]).step


@given(REQUESTS, st.integers(1, 5000), st.integers(1, 9000), st.sampled_from([CURVE, None]))
def test_a_candidate_counts_as_if_it_had_been_there(requests, prompt, allowance, curve):
    """peak_with foretells what peak is after add, which is what a forecast from scratch says."""
    candidate = Held(prompt, 0, allowance, curve)
    forecast = Forecast(requests, [candidate])
    foretold = forecast.peak_with(candidate)
    forecast.add(candidate)
    fresh = Forecast([*requests, candidate]).peak
    assert math.isclose(foretold, forecast.peak, rel_tol=1e-9)
    assert fresh == pytest.approx(forecast.peak, rel=0.1)  # counted together with others about as young


@given(REQUESTS)
def test_no_forecast_is_below_what_is_held_now(requests):
    """The present counts as a moment."""
    assert Forecast(requests).peak >= sum(r.tokens for r in requests) * (1 - 1e-9)


def test_what_is_freed_soon_is_what_surely_ends_before_the_pool_is_at_its_fullest():
    """Those that end at their allowance end the growth then; of chance counts what the margin leaves; of none, 0."""
    certain = [Held(900, 900, 1000, None)] * 40
    assert Forecast(certain).freed_within(50) == 0
    assert Forecast([*certain, Held(5, 0, 4096)]).freed_within(200) == 41 * (200 - 2 * 64)
    assert Forecast([Held(100, 100, 8192, CURVE)] * 40).freed_within(20) == pytest.approx(0, abs=1)
    many, few = (Forecast([Held(1900, 1900, 8192, CURVE)] * n).freed_within(400) / n for n in (400, 4))
    assert many > few >= 0
    assert Forecast([]).freed_within(100) == 0

"""The rounded forecast never promises less than the exact peak, and little more."""

from hypothesis import given
from hypothesis import strategies as st

from app.capacity.peak import SLOTS, Forecast, exact_peak

REQUESTS = st.lists(st.tuples(st.floats(1, 5000), st.floats(1, 5000)), min_size=1, max_size=60)


def test_the_peak_of_one_request_is_all_it_will_ever_hold():
    """Two that end together add up; one that ends before the other grew does not count with its end."""
    assert exact_peak([(100, 50)]) == 150
    assert exact_peak([(100, 50), (100, 50)]) == 300
    assert exact_peak([(1000, 1), (10, 500)]) == 1012


@given(REQUESTS)
def test_the_forecast_lies_on_the_safe_side(requests):
    """At least the exact peak, at most a slot's growth of all above it."""
    forecast = Forecast(5000, requests)
    exact = exact_peak(requests)
    assert exact - 1e-6 <= forecast.peak <= exact + len(requests) * forecast.step + 1e-6


@given(REQUESTS, st.tuples(st.floats(1, 5000), st.floats(1, 5000)))
def test_a_candidate_counts_as_if_it_had_been_there(requests, candidate):
    """peak_with foretells what peak is after add, which is what a forecast from scratch says."""
    forecast = Forecast(5000, requests)
    foretold = forecast.peak_with(*candidate)
    forecast.add(*candidate)
    fresh = Forecast(5000, [*requests, candidate]).peak
    assert abs(foretold - forecast.peak) < 1e-6 * foretold
    assert abs(fresh - forecast.peak) < 1e-6 * fresh
    assert SLOTS == 128

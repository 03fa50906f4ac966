"""How long an endpoint may be silent, on a clock of our own."""

import pytest

from app.sglang.wire import Loads
from workers.patience import (
    LEAST_SECONDS,
    MOST_SECONDS,
    TIMES,
    UNTAUGHT_SECONDS,
    Patience,
    Verdict,
    is_overdue,
)


def loads(timestamp: float, running: int = 5, waiting: int = 0) -> Loads:
    """Figures as an endpoint gives them."""
    return Loads(running=running, waiting=waiting, used_tokens=1000, timestamp=timestamp)


def first_verdict(patience: Patience, *, start: float, seconds: int, **seen) -> tuple[float, Verdict] | None:
    """Look once a second at the same picture; after how long it is given up, and why."""
    for second in range(1, seconds + 1):
        if (verdict := patience.look(now=start + second, **seen)) is not None:
            return second, verdict
    return None


def busy(patience: Patience, *, start: float, seconds: int, gap: int, tells: bool = True) -> None:
    """An endpoint that works: a sign of life every `gap` seconds."""
    for second in range(seconds):
        told = loads(start + second // gap) if tells else None
        patience.look(5, 0 if tells else second // gap, told, start + second)


def test_a_hang_is_noticed_after_four_times_the_longest_silence_seen():
    """Figures that moved every 5 s stand still: 20 s."""
    patience = Patience()
    busy(patience, start=1000.0, seconds=61, gap=5)
    found = first_verdict(patience, start=1060.0, seconds=400, requests=5, done=0, loads=loads(1012))
    assert found is not None
    assert found[0] == pytest.approx(4 * 5, abs=2)
    assert found[1] is Verdict.STALLED


@pytest.mark.parametrize(("gap", "limit"), [(1, LEAST_SECONDS), (200, MOST_SECONDS)])
def test_there_is_a_soonest_and_a_latest(gap, limit):
    """A quick endpoint is not given up sooner, a slow one not later."""
    patience = Patience()
    busy(patience, start=1000.0, seconds=3 * gap + 1, gap=gap)
    assert patience.limit_seconds == pytest.approx(limit)


def test_an_endpoint_of_which_nothing_is_known_gets_two_minutes():
    """The first step may compile kernels."""
    patience = Patience()
    found = first_verdict(patience, start=1000.0, seconds=400, requests=1, done=0, loads=loads(7.0, running=1))
    assert found == (pytest.approx(UNTAUGHT_SECONDS, abs=3), Verdict.STALLED)


def test_without_figures_only_answers_count_and_before_the_first_nothing_does():
    """A router: never given up before it answered; later after four times its longest pause, however long that is."""
    patience = Patience()
    assert first_verdict(patience, start=1000.0, seconds=2000, requests=1, done=0, loads=None) is None
    patience = Patience()
    busy(patience, start=1000.0, seconds=401, gap=100, tells=False)
    assert patience.limit_seconds == pytest.approx(400, rel=0.2)


def test_figures_that_move_while_it_runs_are_life_and_so_is_an_answer():
    """A request of an hour on a server that steps; a server without figures that answers now and then."""
    patience = Patience()
    for second in range(3600):
        assert patience.look(1, 0, loads(float(second), running=1), 1000.0 + second) is None


def test_nothing_is_expected_of_an_endpoint_without_work():
    """Idle for an hour, then a request: its time begins with it."""
    patience = Patience(slowest_seconds=1.0)
    for second in range(3600):
        assert patience.look(0, 7, loads(1.0, running=0), 1000.0 + second) is None
    found = first_verdict(patience, start=4600.0, seconds=60, requests=1, done=7, loads=loads(1.0, running=1))
    assert found is not None
    assert found[0] >= LEAST_SECONDS - 1


def test_an_endpoint_that_has_nothing_to_do_and_owes_answers_has_lost_them():
    """Fresh figures that say 0 running and 0 waiting are no life."""
    patience = Patience(slowest_seconds=1.0)
    for second in range(60):
        verdict = patience.look(3, 0, loads(float(second), running=0), 1000.0 + second)
        if verdict is not None:
            break
    assert verdict is Verdict.LOST
    assert second <= LEAST_SECONDS + 3


def test_who_was_given_up_gets_twice_the_time_and_what_was_long_once_fades():
    """A mistake is not made for ever; nor is a long pause of yesterday remembered."""
    patience = Patience(slowest_seconds=1.0)
    for expected in (10, 20, 40, 80):
        start = patience._looked_at + 1
        found = first_verdict(patience, start=start, seconds=400, requests=1, done=0, loads=loads(1.0))
        assert found == (pytest.approx(expected, rel=0.1, abs=4), Verdict.STALLED)
    for second in range(0, 6 * 1800, 10):
        patience.look(0, 0, loads(1.0), 10_000.0 + second)
    assert patience.limit_seconds == LEAST_SECONDS
    assert TIMES * patience.slowest_seconds < LEAST_SECONDS


def test_a_single_request_is_overdue_after_ten_times_its_allowance():
    """4,096 tokens at 50 a second take 82 s: 819 s; never before a minute; never where the pace is unknown."""
    assert not is_overdue(800, 4096, 50.0)
    assert is_overdue(850, 4096, 50.0)
    assert not is_overdue(50, 10, 50.0)
    assert is_overdue(61, 10, 50.0)
    assert not is_overdue(1e6, 10, 0.0)

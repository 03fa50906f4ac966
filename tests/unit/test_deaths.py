"""What a death teaches: much where the level was new or the pool at its brim, nothing where it had been held."""

import pytest

from app.capacity.deaths import (
    DEATH_SHARE,
    DEATH_SHARE_AGAIN,
    DOUBT_SECONDS,
    FEAR_SECONDS,
    Lessons,
    came_up,
    died,
    looked,
)

NO_CEILING = (float("inf"), float("inf"))


def lived(lessons: Lessons, requests: int, answers_each: float, tokens: int = 0, brim: float = 0.5) -> Lessons:
    """After a life with so many in flight, in which that many answers were made for each; eight looks per answer."""
    tokens = tokens or 10 * requests
    for _ in range(int(8 * answers_each)):
        lessons = looked(lessons, requests, tokens, brim, requests // 8, alive=True)
    return lessons


def back(lessons: Lessons, at: float) -> Lessons:
    """It died and is up again."""
    return came_up(died(lessons, 0, at), 16)


def test_a_death_at_a_level_that_was_never_held_is_blamed_on_it():
    """Below it for a minute, slowly up to it for as long again, then free."""
    lessons = back(lived(Lessons(), 96, 0.5), 1000.0)
    assert lessons.ceilings(1000.0) == (96 * DEATH_SHARE, 960 * DEATH_SHARE)
    assert lessons.ceilings(1000.0 + DOUBT_SECONDS)[0] == 96 * DEATH_SHARE
    assert 96 < lessons.ceilings(1000.0 + 1.5 * DOUBT_SECONDS)[0] < 96 * 1.3
    assert lessons.ceilings(1000.0 + 3 * DOUBT_SECONDS) == NO_CEILING


def test_a_death_at_a_level_held_for_several_answers_time_teaches_nothing():
    """A crash by count, a poisoned prompt: again and again."""
    lessons = Lessons()
    for crash in range(20):
        lessons = back(lived(lessons, 96, 8), crash * 100.0)
        assert lessons.ceilings(crash * 100.0) == NO_CEILING


def test_a_second_death_at_about_the_same_level_is_feared_for_half_an_hour_and_a_third_for_an_hour():
    """It was let there again, and died: that is no chance."""
    lessons, now = Lessons(), 1000.0
    for fear in (DOUBT_SECONDS, FEAR_SECONDS, 2 * FEAR_SECONDS, 4 * FEAR_SECONDS):
        lessons = back(lived(lived(lessons, 64, 8), 96, 0.5), now)
        assert lessons.ceilings(now + fear - 1.0)[0] == 96 * DEATH_SHARE
        assert lessons.ceilings(now + fear + 3 * DOUBT_SECONDS) == NO_CEILING
        now += fear + DOUBT_SECONDS / 2


def test_a_death_on_the_way_up_while_kept_below_a_level_halves_it():
    """The level was too high, or was not what was seen: down in great steps."""
    lessons = back(lived(Lessons(), 96, 0.5), 1000.0)
    lessons = back(lived(lessons, 80, 0.25), 1010.0)
    assert lessons.ceilings(1020.0)[0] == 80 * DEATH_SHARE_AGAIN


def test_a_death_while_kept_below_a_level_and_after_an_answers_time_there_acquits_it():
    """Lowering was no cure: what it dies of is something else."""
    lessons = back(lived(Lessons(), 96, 0.5), 1000.0)
    lessons = back(lived(lessons, 80, 2), 1010.0)
    assert lessons.ceilings(1020.0) == NO_CEILING


def test_what_is_held_in_the_end_is_blamed_no_more():
    """It was a chance: the third death there counts as the first."""
    lessons = back(lived(Lessons(), 96, 0.5), 1000.0)
    lessons = lived(lessons, 96, 12)
    assert lessons.deaths == 0
    assert lessons.ceilings(1010.0) == NO_CEILING


def test_a_death_far_below_what_was_seen_alive_teaches_nothing_unless_it_comes_again_and_again():
    """A poisoned prompt that kills on arrival; or another server at the same address, with less room."""
    lessons = lived(Lessons(), 96, 8)
    for death in range(12):
        lessons = back(lived(lessons, 40, 0.25), death * 100.0)
        if death < 2:
            assert lessons.ceilings(death * 100.0) == NO_CEILING
    assert lessons.ceilings(death * 100.0)[0] == 40 * DEATH_SHARE


def test_a_death_with_the_pool_at_its_brim_is_blamed_on_the_tokens_however_long_they_were_held():
    """And on nothing else; how full a pool may get is the controller's to say."""
    lessons = back(lived(Lessons(), 96, 8, tokens=90_000, brim=0.98), 1000.0)
    assert lessons.ceilings(1010.0) == (float("inf"), 90_000 * DEATH_SHARE)
    assert lessons.fragility(1000.0 + FEAR_SECONDS) == pytest.approx(0.5)
    assert back(lived(Lessons(), 96, 8, tokens=90_000, brim=0.9), 1000.0).fragility(1000.0) == 0.0


def test_more_tokens_than_ever_are_blamed_though_the_requests_were_held():
    """Longer prompts, as many requests."""
    lessons = lived(lived(Lessons(), 96, 8, tokens=10_000), 96, 0.5, tokens=50_000)
    assert back(lessons, 1000.0).ceilings(1010.0) == (float("inf"), 50_000 * DEATH_SHARE)


def test_while_it_hangs_before_it_dies_nothing_counts_as_held():
    """All sockets open for a minute, no answer, no figures: it is not alive."""
    lessons = lived(Lessons(), 96, 0.5)
    for _ in range(240):
        lessons = looked(lessons, 96, None, 0.0, 0, alive=False)
    assert back(lessons, 1000.0).ceilings(1010.0) == (96 * DEATH_SHARE, 960 * DEATH_SHARE)


def test_the_death_of_one_request_teaches_nothing():
    """A poisoned row, quarantined."""
    assert back(lived(Lessons(), 1, 0.5), 1000.0).ceilings(1000.0) == NO_CEILING

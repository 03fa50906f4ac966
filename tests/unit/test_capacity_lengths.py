"""Expected lengths are those of the answers that will come, not of those that came first."""

import random

import pytest

from app.capacity.lengths import (
    ENOUGH_FINISHED,
    LEAST_REMAINING,
    MOST_KNOTS,
    Curve,
    bin_beyond,
    bin_of,
    learn,
    most_left,
    parse_curve,
    remaining,
)

RANDOM = random.Random(1)
LENGTHS = [min(8192, int(RANDOM.lognormvariate(7.9, 0.45))) for _ in range(4000)]


def histogram(lengths) -> dict[int, int]:
    counts: dict[int, int] = {}
    for length in lengths:
        counts[bin_of(length)] = counts.get(bin_of(length), 0) + 1
    return counts


def mean(curve) -> float:
    """Of the lengths that a curve stands for."""
    return sum(curve.alive(made) for made in range(curve.made[-1]))


def test_the_curve_is_the_share_that_gets_so_far():
    """Within 2 % of all answers everywhere."""
    curve = learn(histogram(LENGTHS), [], 8192)
    for made in (0, 200, 1000, 2000, 3000, 4500, 7000):
        share = sum(length > made for length in LENGTHS) / len(LENGTHS)
        assert curve.alive(made) == pytest.approx(share, abs=0.02)


def test_a_sample_of_a_curve_is_spread_as_its_answers_are():
    """So many of it are as long as any length, as are of all."""
    sample = learn(histogram(LENGTHS), [], 8192).sample(200)
    assert sample == sorted(sample)
    assert len(sample) == 200
    for length in (1000, 2700, 5000):
        share = sum(one > length for one in LENGTHS) / len(LENGTHS)
        assert sum(one > length for one in sample) / 200 == pytest.approx(share, abs=0.02)


def test_answers_that_still_run_count_as_longer():
    """After the 30 shortest of 100 ended, the rest at 1,800 tokens must not be expected to end like those."""
    lengths = sorted(LENGTHS[:100])
    naive = learn(histogram(lengths[:40]), [], 8192)
    told = learn(histogram(lengths[:40]), [lengths[40]] * 60, 8192)
    truth = sum(lengths) / 100
    assert mean(naive) < 0.8 * truth
    assert mean(told) > 0.9 * truth


@pytest.mark.parametrize("allowance", [1000, 1024, 1500])
def test_who_is_cut_by_an_allowance_is_expected_to_get_to_it(allowance):
    """Half of the answers end before it: at its last token the other half is still there, not on its way down."""
    short = histogram([200 + n % 400 for n in range(60)])
    cut = {bin_beyond(allowance): 60}
    assert learn(short | cut, [], allowance).alive(allowance - 1) == pytest.approx(0.5, abs=0.03)
    assert learn(short, [allowance] * 60, allowance).alive(allowance - 1) == pytest.approx(0.5, abs=0.03)  # gone on
    pretended = learn(histogram([50] * 30), [], allowance)
    assert pretended.alive(allowance - 1) == pytest.approx(4 / 34, abs=0.01)


def test_before_enough_have_finished_the_servers_own_clip_counts():
    """min(max_new_tokens, 4096) less what is made; beyond it a little; never more than the allowance leaves."""
    assert learn(histogram(LENGTHS[: ENOUGH_FINISHED - 1]), [], 8192) is None
    assert most_left(None, 0, 8192) == 4096
    assert most_left(None, 0, 1000) == 1000
    assert most_left(None, 1000, 8192) == 3096
    assert most_left(None, 5000, 8192) == LEAST_REMAINING
    assert most_left(None, 8190, 8192) == 2
    assert most_left(learn(histogram(LENGTHS), [], 8192), 0, 100) == 100


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * 50, [7] * 50, [200_000] * 40, [1, 200_000] * 30])
def test_a_curve_is_small_whole_and_survives_redis(lengths):
    """At most 32 knots, rising, from all to none."""
    curve = learn(histogram(lengths), [5, 500, 60_000], 262_144)
    assert parse_curve(curve.dump()) == curve
    assert len(curve.made) <= MOST_KNOTS
    assert (curve.made[0], curve.share[0], curve.share[-1]) == (0, 1.0, 0.0)
    assert list(curve.made) == sorted(set(curve.made))
    assert list(curve.share) == sorted(curve.share, reverse=True)


def test_what_is_left_is_the_mean_of_the_lengths_beyond():
    """Lengths spread evenly up to 1,000: at 400 they are expected to end at 700 on average."""
    even = Curve((0, 1000), (1.0, 0.0))
    assert even.remaining(0) == 500
    assert even.remaining(400) == pytest.approx(300)
    assert remaining(even, 400, 550) == pytest.approx(131.25)  # a quarter of them would have ended by then
    assert remaining(even, 2000, 4096) == LEAST_REMAINING
    assert remaining(None, 96, 8192) == 4000

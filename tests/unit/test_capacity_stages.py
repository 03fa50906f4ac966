"""What a stage brings is computed as the server computes it, and is said only where it is something."""

import random
import statistics

import pytest

from app.capacity.stages import ENOUGH, Job, suggest
from app.sglang.simulator.engine import Engine, EngineConfig, Request

RANDOM = random.Random(1)
#: As on the real server of docs/decisions/0009: 1,480 tokens on average, 6,000 allowed.
LENGTHS = [min(6000, 2 + int(RANDOM.expovariate(1 / 1480))) for _ in range(2000)]
H200 = Job(120_000, 1150, 6000, LENGTHS)


def use_of(stage: int) -> float:
    """Share of the pool that a simulated server fills, asked for so much at a time, while others wait."""
    engine, chance = Engine(EngineConfig(kv_tokens=120_000, max_running=4096)), random.Random(2)
    for number, length in enumerate(LENGTHS[:400]):
        prompt = chance.randint(500, 1800)
        for made in range(0, length, stage):  # all are there from the start, whatever stage they are in
            tokens = min(stage, length - made)
            engine.submit(0.0, Request(f"{number}-{made}", prompt + made, min(stage, 6000 - made), tokens))
    now, uses = 0.0, []
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        engine.advance(now)
        if engine.waiting and engine.step > 1500:
            uses.append(engine.used_tokens / 120_000)
    return statistics.mean(uses)


def test_what_the_pool_can_hold_is_what_the_servers_rule_lets_in():
    """Within three hundredths of a server with that rule, whole and in stages."""
    found = suggest(H200)
    assert 1400 <= found.tokens <= 1800
    assert found.use == pytest.approx(use_of(6000), abs=0.03)
    assert found.staged_use == pytest.approx(use_of(found.tokens), abs=0.03)
    assert 0.08 < found.gain < 0.15  # measured there: 12 %
    assert f"--stage-tokens {found.tokens}" in str(found)


def test_two_answers_of_three_end_in_their_first_stage():
    """Of any distribution."""
    for lengths in (LENGTHS, [100 + n % 1000 for n in range(5000)]):
        found = suggest(Job(60_000, 200, 4000, lengths))
        assert 0.64 < sum(length <= found.tokens for length in lengths) / len(lengths) < 0.75


@pytest.mark.parametrize(
    "job",
    [
        Job(120_000, 1150, 6000, LENGTHS[: ENOUGH - 1]),  # too few
        Job(120_000, 1150, 1500, [min(1500, length) for length in LENGTHS]),  # most take all they may
        Job(120_000, 8000, 1024, [600] * 100),  # little is kept beside such prompts
        Job(120_000, 1150, 6000, LENGTHS, conservativeness=0.2),  # the server keeps little as it is
    ],
)
def test_where_little_is_won_nothing_is_said(job):
    """A stage costs prefill, too."""
    assert suggest(job) is None

"""The simulated model is a function of the ids it sees."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.model import Model
from app.sglang.simulator.requests import Ask
from app.sglang.simulator.tokens import TokenChain

SMALL = SimulatorConfig(vocab_size=40, id_low=3, id_high=30, eos_id=2, output_mean=12.0)
prompts = st.lists(st.integers(0, 39), min_size=1, max_size=30)


def answer(ids: list[int], allowed: int, config: SimulatorConfig = SMALL, **ask) -> list[int]:
    """What the model says to `ids` when it may say `allowed` ids."""
    model = Model(config, "m", "v")
    job, request = model.start(Ask("rid", ids, allowed, **ask))
    return model.output_ids(job, request.tokens, over=True)


@given(prompts, st.data())
def test_an_answer_continued_from_its_own_ids_goes_on_exactly(prompt, data):
    """prompt + first part of the answer is answered with the rest of it, wherever it is cut.

    The vocabulary is tiny, so prompts that end like an answer by chance are common here.
    """
    whole = answer(prompt, 1000)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert answer(prompt + whole[:cut], 1000) == whole[cut:]


@given(prompts, st.integers(1, 7))
def test_an_answer_in_stages_is_the_whole_answer(prompt, stage):
    """Asked in pieces of `stage` ids until a stop, the pieces make up the same ids."""
    made: list[int] = []
    while not made or made[-1] != SMALL.eos_id:
        made += answer(prompt + made, stage)
    assert made == answer(prompt, 1000)


@given(prompts)
def test_generated_ids_keep_to_their_range_and_only_the_last_is_the_stop(prompt):
    """Ids of an answer stand in [id_low, id_high); the eos id comes once, at the end."""
    whole = answer(prompt, 1000)
    assert whole[-1] == SMALL.eos_id
    assert all(SMALL.id_low <= token < SMALL.id_high for token in whole[:-1])


@given(prompts, st.integers(3, 29))
def test_a_stop_id_of_the_request_ends_the_answer_at_its_first_place(prompt, stop):
    """stop_token_ids cut the answer after their first occurrence; min_new_tokens and ignore_eos lengthen it."""
    whole = answer(prompt, 1000)
    cut = answer(prompt, 1000, stop_token_ids=(stop,))
    assert cut == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert len(answer(prompt, 50, ignore_eos=True)) == 50
    assert len(answer(prompt, 1000, min_new_tokens=200)) >= 200


def test_another_model_version_or_seed_answers_otherwise():
    """The salt is the model: name, weight version and seed all change the ids."""
    chains = [TokenChain(0, 1000, 1001, salt) for salt in ("a", "b", "c")]
    assert len({tuple(chain.ids(chain.plan([1, 2, 3]).state, 20)) for chain in chains}) == 3


@pytest.mark.parametrize(("lengths", "spread"), [("lognormal", True), ("geometric", True), ("fixed", False)])
def test_lengths_follow_the_chosen_distribution(lengths, spread):
    """Their mean is the mean that was asked for; fixed has no spread."""
    chain = TokenChain(0, 1000, 1001, lengths=lengths, mean=300.0, sigma=0.5)
    drawn = [chain.plan([7, n]).left for n in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(300, rel=0.05)
    assert (len(set(drawn)) > 100) is spread


def test_the_chain_has_no_short_cycles():
    """20,000 ids after any of several prompts do not fall into a loop (a narrow state would)."""
    chain = TokenChain(0, 163_584, 163_586)
    for n in range(5):
        ids = chain.ids(chain.plan([n]).state, 20_000)
        assert len(set(pairwise(ids))) > 19_900


def test_settings_that_contradict_each_other_are_refused():
    """An eos id among the generated ones would end answers at random."""
    with pytest.raises(ValueError, match="eos_id"):
        SimulatorConfig(vocab_size=100, id_low=0, id_high=100, eos_id=50)
    with pytest.raises(ValueError, match="vocabulary"):
        SimulatorConfig(vocab_size=100)

"""A short seed in every test run, another in the long one, and the plan's own promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.plan import ACTIONS, plan
from tests.chaos.play import play, undisturbed, write_inputs

ROWS, FAULTS = 120, 6


@given(st.integers(0, 2**32), st.integers(0, 200))
def test_a_plan_is_a_function_of_its_seed(seed, faults):
    """The same seed, the same faults, in the order of the rows; all kinds come equally often."""
    planned = plan(seed, faults)
    assert planned == plan(seed, faults)
    assert len(planned) == faults
    assert [fault.share for fault in planned] == sorted(fault.share for fault in planned)
    assert all(0 < fault.share < 1 for fault in planned)
    kinds = [(fault.action, fault.target) for fault in planned]
    assert all(kinds.count(kind) in (faults // len(ACTIONS), -(-faults // len(ACTIONS))) for kind in ACTIONS)


def test_seeds_differ():
    """Another seed, other faults at other places."""
    assert len({tuple(plan(seed, 50)) for seed in range(20)}) == 20


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The input, and the ids of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("chaos")
    inputs = write_inputs(folder / "input", ROWS)
    return inputs, undisturbed(folder / "undisturbed", inputs)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_short_seed_holds(seed, calm, tmp_path):
    """Random faults over all processes: complete, nothing lost or doubled, nobody left behind."""
    inputs, expected = calm
    outcome = play(seed, FAULTS, ROWS, inputs, expected, tmp_path)
    assert not outcome.broken, f"{outcome}\n{outcome.broken}"

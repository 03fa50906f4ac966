"""workers.retries: what a failed attempt means for its row, as a pure function."""

import pytest

from app.errors import USAGE
from app.reasons import Reason
from app.sglang.faults import Fault, FaultKind
from workers.refusals import Refusals
from workers.retries import Again, Halt, Reject, decide, decide_refusal
from workers.suspects import Suspicion

LOST, REFUSED = Fault(FaultKind.DISCONNECTED), Fault(FaultKind.REFUSED)


@pytest.mark.parametrize("companies", [(100,), (100, 57), (100, 57, 28, 14, 7, 3, 1), (1, 1, 1)])
def test_a_death_charges_nothing_and_rejects_nobody_before_its_guilt_is_shown(companies):
    """However often it was there, and though the endpoint is back and serves others by now."""
    decision = decide(LOST, 2, 9, True, Suspicion(companies))
    assert isinstance(decision, Again)
    assert not decision.charged


def test_a_guilty_one_is_rejected_with_its_evidence():
    """Alone at two deaths, as a suspect: each company is listed, and how the last death showed."""
    decision = decide(LOST, 0, 9, False, Suspicion((100, 57, 3, 1, 1)))
    assert decision.reason is Reason.CRASHES_ENDPOINT
    assert "died 5 times" in decision.detail
    assert "99, 56, 2, 0, 0 other requests" in decision.detail
    assert LOST.detail in decision.detail


def test_three_failures_beside_others_that_are_served_reject_the_row():
    """Charged only while the endpoint goes on serving others."""
    assert decide(LOST, 0, 1, True) == Again(0.5, charged=True)
    assert decide(LOST, 2, 3, False) == Again(2.0, charged=False)
    assert decide(LOST, 2, 3, True).reason is Reason.ATTEMPTS_EXHAUSTED


@pytest.mark.parametrize(
    ("rows", "taken", "served", "again", "others_left", "outcome"),
    [
        (1, 0, True, False, False, Reject),  # others are answered: it is the row
        (1, 0, True, False, True, Again),  # another endpoint may take it
        (9, 0, False, False, False, Again),  # too early to say
        (9, 4, False, True, False, Again),  # it works on others: their answers will tell
        (3, 0, False, True, False, Halt),  # it refuses all: not the rows
        (2, 0, False, True, False, Reject),  # nobody to compare with
    ],
)
def test_a_refusal_is_the_row_s_own_only_where_others_are_answered(rows, taken, served, again, others_left, outcome):
    """And an endpoint that refuses everything halts the run instead of rejecting its rows one by one."""
    refusals = Refusals(rows=rows, taken=taken, has_served=served)
    decision = decide_refusal(REFUSED, refusals, again=again, others_left=others_left)
    assert type(decision) is outcome
    if outcome is Halt:
        assert decision.exit_code == USAGE
    if outcome is Again:
        assert not decision.charged


@pytest.mark.parametrize("kind", [FaultKind.BAD_PARAMETERS, FaultKind.UNAUTHORIZED, FaultKind.NOT_FOUND])
def test_faults_of_ours_halt_the_run(kind):
    """Exit 2, before any row is rejected for them."""
    assert decide(Fault(kind), 0, 1, True).exit_code == USAGE


@pytest.mark.parametrize("kind", [FaultKind.ANOTHER_MODEL, FaultKind.UNCONFIRMED])
def test_answers_of_nobody_knows_whom_are_charged_to_no_row(kind):
    """They are given up and made again."""
    assert decide(Fault(kind), 2, 1, True) == Again(0.5, charged=False)

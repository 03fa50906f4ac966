"""What a failed attempt means for its row: a pure function of the fault and of what the row went through before.

Three owners: the row is rejected, the endpoint costs the row nothing, our own faults halt the run.
"""

from dataclasses import dataclass

from app.errors import USAGE
from app.reasons import Reason
from app.sglang.faults import Fault, FaultKind, Owner
from workers.refusals import Refusals
from workers.suspects import INNOCENT, Suspicion

#: Charged attempts after which a row is given up.
MOST_CHARGES = 3
#: Rows that an endpoint refuses, answering none, before it is not the rows.
LEAST_REFUSALS = 3
REFUSED_AGAIN_SECONDS = 2.0
_REASONS = {FaultKind.TOO_LONG: Reason.TOO_LONG, FaultKind.BAD_IDS: Reason.IDS_OUT_OF_VOCABULARY}
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Again:
    """Try again, after a pause; `charged` counts against the row."""

    after_seconds: float
    charged: bool


@dataclass(frozen=True, slots=True)
class Reject:
    """Give the row up with a reason."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the run before it rejects every row for a fault of ours."""

    exit_code: int
    message: str


def decide(
    fault: Fault, charges: int, attempts: int, endpoint_serves_others: bool, death: Suspicion = INNOCENT
) -> Again | Reject | Halt:
    """What follows a fault.

    charges: charged attempts so far. attempts: requests of this delivery so far, this one included.
    endpoint_serves_others: the same endpoint goes on answering other requests, so the row may be to blame.
    death: if the endpoint died of this or another request, what is known of this task since; nothing is charged then.
    """
    if fault.fatal_for_run:
        return Halt(USAGE, f"{fault.detail}.")
    if fault.owner is Owner.ROW:
        return Reject(_REASONS.get(fault.kind, Reason.REFUSED), fault.detail)
    if death.companies:  # the breaker decides when the endpoint is used again
        return _after_death(fault, death)
    charged = fault.chargeable and endpoint_serves_others and not fault.pressure
    if charged and charges + 1 >= MOST_CHARGES:
        return Reject(Reason.ATTEMPTS_EXHAUSTED, f"{MOST_CHARGES} attempts failed, the last one: {fault.detail}")
    full = fault.kind is FaultKind.QUEUE_FULL  # it gets no more than it takes by then (app/capacity/controller.py)
    pause = _BACKOFF_SECONDS[0 if full else min(attempts - 1, len(_BACKOFF_SECONDS) - 1)]
    return Again(max(pause, fault.retry_after_seconds or 0.0), charged)


def decide_refusal(fault: Fault, refusals: Refusals, *, again: bool, others_left: bool) -> Again | Reject | Halt:
    """What follows a 400 that blames the prompt (`decide` for the rest).

    again: the same endpoint has refused it before, a while ago. others_left: some endpoint has not refused it yet.
    """
    if others_left:
        return Again(0.0, charged=False)
    if fault.kind is FaultKind.REFUSED and not refusals.has_served:
        if refusals.taken or not again:  # it will have answered others, or refused them too, when it is asked again
            return Again(REFUSED_AGAIN_SECONDS, charged=False)
        if refusals.rows >= LEAST_REFUSALS:
            told = f"it refused each of {refusals.rows} prompts and answered none, though it takes a canary"
            return Halt(USAGE, f"{fault.detail}; {told}. Look into its log, or at what stands before it.")
    return Reject(_REASONS.get(fault.kind, Reason.REFUSED), fault.detail)


def _after_death(fault: Fault, death: Suspicion) -> Again | Reject:
    if death.is_guilty:
        return Reject(Reason.CRASHES_ENDPOINT, f"{death.evidence}; the last time: {fault.detail}")
    return Again(_BACKOFF_SECONDS[0], charged=False)

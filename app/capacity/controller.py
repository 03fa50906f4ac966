"""Learning how much one endpoint takes: a pure function of what was known, what is seen now, and the time.

`f` scales the pool that the predicted peak may fill. It rises while tasks wait for leases, the pool has room at its
fullest and the server's own queue is nearly empty; it falls on retractions, refusals, a standing queue, a pool nearly
full, a collapse of throughput. Invariant: between two changes the endpoint had time to show what the first one did.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

F_START, F_LEAST, F_MOST = 1.0, 0.4, 1.6
#: The fullest the pool should get: a margin to the full pool, where servers retract, or die.
USE_AIM, USE_AIM_FRAGILE = 0.92, 0.85
USE_ALARM = 0.97
#: Requests that may stand in the server's own queue: they feed its admission rule, more would only be lost in a crash.
QUEUE_AIM = 4
#: Share of the level at which an endpoint died that is used afterwards, and how long that memory takes to halve.
DEATH_SHARE, DEATH_HALF_LIFE_SECONDS = 0.85, 1800.0
#: A death far below a level that was held before is no sign of overload.
_ATTRIBUTABLE = 0.7
SLOW_START_REQUESTS, SLOW_START_DOUBLING_SECONDS, SLOW_START_SECONDS = 16, 1.0, 10.0
STALE_SECONDS = 15.0
#: A step of f is due after so many generations, and goes so far of the way (a power): its effect comes late.
SETTLE_GENERATIONS, GAIN = 0.5, 0.5
#: Looks ahead for which the pool must not be seen to overflow; else the youngest requests are taken back.
RELIEF_LOOKS = 2.5
#: Looks are so far apart.
LOOK_SECONDS = 0.25
_STEP_UP_MOST, _STEP_DOWN_MOST, _STEP_BACK = 1.05, 0.97, 0.92
_SETTLE_LEAST_SECONDS, _SETTLE_MOST_SECONDS = 2.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at an endpoint; tokens are KV tokens. None: it does not tell."""

    open: bool = False  #: its breaker, now or since the last look
    died: bool = True  #: it opened because the endpoint failed, not because it is loading, leaving or held
    leases: int = 0  #: requests that all workers have there
    wanted: bool = False  #: somebody was refused a lease for lack of room since the last look
    running: int | None = None
    waiting: int | None = None
    used_tokens: int | None = None
    kv_tokens: int | None = None
    throughput: float | None = None  #: tokens per second
    stale_seconds: float = 0.0  #: age of what it tells
    retractions: int = 0  #: since the last look
    refusals: int = 0  #: 503 queue full, since the last look
    generation_seconds: float = 10.0  #: how long an answer takes, about

    @property
    def use(self) -> float:
        """Share of the pool in use; 0 where it is not told."""
        return self.used_tokens / self.kv_tokens if self.used_tokens and self.kv_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What was learned of an endpoint. Times are the caller's clock, in seconds."""

    f: float = F_START
    changed_at: float | None = None  #: when f was last changed, or its rise last held up
    fullest: float = 0.0  #: highest use since then
    queue_ceiling: int = -1  #: while the server lets requests stand: what it runs, and a few; 1 while it overflows
    up: bool = True
    up_at: float | None = None  #: since when it is back after a death; None: it never died
    most_requests: int = 0  #: highest number held for a while without dying
    level_requests: int = 0  #: in flight at the last looks
    level_tokens: int = 0
    used_tokens: int = 0  #: at the last look
    aim: float = USE_AIM  #: lower for an endpoint that died of a full pool
    death_requests: int = 0  #: in flight when it died; 0: it never did
    death_tokens: int = 0
    died_at: float = 0.0
    throughput: float = 0.0  #: with `running` below: when f was last changed
    running: int = 0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What follows for admission now; -1: no ceiling."""

    f: float
    requests: int
    tokens: int


def observe(state: State, seen: Observation, now: float) -> State:
    """The next state after one look."""
    if seen.open:
        return _down(state, seen, now) if state.up else state
    if not state.up:
        state = dataclasses.replace(state, up=True, up_at=now, changed_at=now, fullest=0.0, queue_ceiling=-1)
    state = _levels(state, seen)
    if state.changed_at is None:
        return _changed(state, seen, now, state.f)
    return _learn(state, seen, now)


def ceilings(state: State, now: float) -> Ceilings:
    """f, and the ceilings that the memory of a death and the slow start after it impose."""
    requests = tokens = -1
    if state.death_requests:
        share = DEATH_SHARE * 2 ** ((now - state.died_at) / DEATH_HALF_LIFE_SECONDS)
        requests, tokens = max(1, int(state.death_requests * share)), int(state.death_tokens * share)
    up = 0.0 if not state.up else SLOW_START_SECONDS if state.up_at is None else now - state.up_at
    if up < SLOW_START_SECONDS:
        slow = int(SLOW_START_REQUESTS * 2 ** (up / SLOW_START_DOUBLING_SECONDS))
        requests = slow if requests < 0 else min(requests, slow)
    if state.queue_ceiling >= 0:
        requests = state.queue_ceiling if requests < 0 else min(requests, state.queue_ceiling)
    return Ceilings(state.f, requests, tokens)


def overflow_tokens(state: State, seen: Observation) -> float:
    """Tokens by which the pool will soon be too small, if it goes on filling as it did since the look before."""
    if not seen.kv_tokens or seen.used_tokens is None or not state.used_tokens:
        return 0.0
    growth = max(0, seen.used_tokens - state.used_tokens)
    if seen.throughput is not None:  # what was let in meanwhile came once; what runs goes on growing
        growth = min(growth, seen.throughput * LOOK_SECONDS)
    return max(0.0, seen.used_tokens + RELIEF_LOOKS * growth - seen.kv_tokens)


def to_recall(leases: Iterable[tuple[float, float, str]], tokens: float) -> list[str]:
    """Whom to take back, the youngest first, so that so many tokens are freed. The eldest always stays.

    leases: (granted at, tokens held, id) of each. What is lost is the least that can be: a server that is full would
    push them out of its batch and prefill them again, or die.
    """
    recalled: list[str] = []
    for _, held, lease_id in sorted(leases, reverse=True)[:-1]:
        if tokens <= 0:
            break
        recalled.append(lease_id)
        tokens -= held
    return recalled


def _levels(state: State, seen: Observation) -> State:
    """Remember what is in flight, a little longer than it is: a death is noticed after the level has fallen."""
    return dataclasses.replace(
        state,
        level_requests=max(seen.leases, seen.running or 0, int(state.level_requests * 0.9)),
        level_tokens=max(seen.used_tokens or 0, int(state.level_tokens * 0.9)),
        most_requests=max(state.most_requests, min(state.level_requests, seen.running or seen.leases)),
        used_tokens=seen.used_tokens or 0,
        fullest=max(state.fullest, seen.use),
        queue_ceiling=_queue_ceiling(state, seen),
    )


def _queue_ceiling(state: State, seen: Observation) -> int:
    emptying = state.queue_ceiling == 1 and seen.use > state.aim  # or the freed room would be given away at once
    if seen.use > USE_ALARM or emptying or overflow_tokens(state, seen) > 0:
        return 1
    return (seen.running or 0) + QUEUE_AIM if (seen.waiting or 0) > QUEUE_AIM else -1


def _down(state: State, seen: Observation, now: float) -> State:
    state = dataclasses.replace(state, up=False)
    if not seen.died or state.level_requests < max(2, _ATTRIBUTABLE * state.most_requests):
        return state
    full = state.fullest > USE_AIM
    return dataclasses.replace(
        state, died_at=now, death_requests=state.level_requests, death_tokens=state.level_tokens, most_requests=0,
        f=min(state.f, F_START) if full else state.f, aim=min(state.aim, USE_AIM_FRAGILE) if full else state.aim,
    )  # fmt: skip


def _learn(state: State, seen: Observation, now: float) -> State:
    """At most one step per settling time; harm is answered sooner than room."""
    settle = min(_SETTLE_MOST_SECONDS, max(_SETTLE_LEAST_SECONDS, seen.generation_seconds * SETTLE_GENERATIONS))
    quiet = now - state.changed_at
    harm = seen.retractions > 0 or seen.refusals > 0 or state.queue_ceiling == 1
    if harm and quiet > settle / 2:
        return _changed(state, seen, now, state.f * _STEP_BACK)
    if quiet < settle:
        return state
    if _collapsed(state, seen):
        return _changed(state, seen, now, state.f * _STEP_DOWN_MOST)
    if state.fullest > state.aim:
        return _changed(state, seen, now, state.f * max(_STEP_DOWN_MOST, (state.aim / state.fullest) ** GAIN))
    held_up = not seen.wanted or seen.stale_seconds > STALE_SECONDS or (seen.waiting or 0) > QUEUE_AIM
    if held_up or not state.fullest:
        return _changed(state, seen, now, state.f)
    return _changed(state, seen, now, state.f * min(_STEP_UP_MOST, (state.aim / state.fullest) ** GAIN))


def _collapsed(state: State, seen: Observation) -> bool:
    """More run than before, and together they make less."""
    if seen.throughput is None or not seen.running or not state.throughput:
        return False
    return seen.running > 1.1 * state.running and seen.throughput < 0.8 * state.throughput


def _changed(state: State, seen: Observation, now: float, f: float) -> State:
    return dataclasses.replace(
        state, f=min(F_MOST, max(F_LEAST, f)), changed_at=now, fullest=seen.use,
        throughput=seen.throughput or 0.0, running=seen.running or 0,
    )  # fmt: skip

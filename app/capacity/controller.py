"""Learning how much one endpoint takes: a pure function of what was known, what is seen now, and the time.

`f` scales the pool that the predicted peak may fill. The forecast has its own margin, so f is 1 where nothing is wrong
with it. It rises above where the pool stays clearly empty while tasks wait for leases (shared prefixes, say), and falls
on retractions, a pool nearly full, a collapse of throughput. A server that refuses (503 queue full) gets what it took,
and slowly more. What a death teaches is app/capacity/deaths.py. Invariant: between two changes the endpoint had time to
show what the first one did.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from app.capacity import deaths
from app.capacity.deaths import Lessons, Level

F_START, F_LEAST, F_MOST = 1.0, 0.4, 1.6
#: f falls where the pool was fuller at its fullest, and rises where it stayed emptier: back to 1, and beyond 1.
USE_ALARM, USE_AIM, USE_EMPTY = 0.97, 0.91, 0.85
#: The fullest that a pool should get that an endpoint just died of when it was full.
USE_AIM_FRAGILE = 0.85
#: Requests that may stand in the server's own queue: they feed its admission rule, more would only be lost in a crash.
QUEUE_AIM = 4
#: After a return: so many at first, or what is usual where that is no more than the other number; then doubling.
SLOW_START_REQUESTS, SLOW_START_MOST, SLOW_START_DOUBLING_SECONDS, SLOW_START_SECONDS = 16, 32, 1.0, 10.0
STALE_SECONDS = 15.0
#: More in flight than usual by this much is not needed, but grows in lockstep, and may be what an endpoint dies of.
HEADROOM = 1.3
#: A step of f is due after so many generations, and goes so far of the way (a power): its effect comes late.
SETTLE_GENERATIONS, GAIN = 0.5, 0.5
#: As long as an answer runs that is older than this share of the time we have fed the endpoint, it is not full yet.
_YOUNG = 0.7
#: Looks are so far apart.
LOOK_SECONDS = 0.25
#: The pool must not overflow within three looks, or the youngest requests are taken back: one until it is seen, one
#: until their holders hear of it, one until the endpoint has.
RELIEF_SECONDS = 3 * LOOK_SECONDS
#: What a server takes that refused is tried to be this much more, or one, after each settling time.
TAKEN_GROWTH = 1.05
_STEP_UP_MOST, _STEP_DOWN_MOST, _STEP_BACK, _STEP_ALARM = 1.05, 0.97, 0.95, 0.98
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
    answers: int = 0  #: since the last look
    generation_seconds: float = 10.0  #: how long an answer takes, about
    eldest_seconds: float = 0.0  #: age of the eldest request there
    ending_tokens: float = 0.0  #: given back within RELIEF_SECONDS by requests that end, at the least

    @property
    def use(self) -> float:
        """Share of the pool in use; 0 where it is not told."""
        return self.used_tokens / self.kv_tokens if self.used_tokens and self.kv_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What was learned of an endpoint. Times are the caller's clock, in seconds."""

    f: float = F_START
    since: float | None = None  #: since when it has something of ours
    changed_at: float = 0.0  #: when f was last changed, or its rise last held up
    fullest: float = 0.0  #: highest use since then
    queue_ceiling: int = -1  #: while the server lets requests stand: what it runs, and a few; 1 while it overflows
    up: bool = True
    up_at: float | None = None  #: since when it is back after a death; None: it never died
    taken_requests: float = 0.0  #: what it took when it last refused, and a few more since; 0: it never did
    taken_at: float = 0.0  #: when that was changed
    usual_requests: float = 0.0  #: in flight, averaged over half of an answer's time; 0: not known yet
    lessons: Lessons = field(default_factory=Lessons)  #: of its deaths
    throughput: float = 0.0  #: with `running` below: when f was last changed
    running: int = 0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What follows for admission now; -1: no ceiling."""

    f: float
    requests: int
    tokens: int


def restored(saved: dict[str, Any]) -> State:
    """A state that was written as JSON; raises KeyError or TypeError if another version wrote it."""
    lessons = saved["lessons"]
    levels = {name: Level(**lessons[name]) for name in ("requests", "tokens")}
    return State(**saved | {"lessons": Lessons(**lessons | levels)})


def observe(state: State, seen: Observation, now: float) -> State:
    """The next state after one look."""
    if seen.open:
        return _down(state, seen, now) if state.up else state
    if not state.up:
        lessons = deaths.came_up(state.lessons, ceilings(state, now).requests)
        state = dataclasses.replace(state, up=True, up_at=now, since=now, fullest=0.0, lessons=lessons)
        state = _changed(state, seen, now, state.f)
    if state.since is None or not seen.leases:
        state = _changed(dataclasses.replace(state, since=now), seen, now, state.f)
    young = seen.eldest_seconds >= _YOUNG * (now - state.since)
    return _learn(_refused(_levels(state, seen, young), seen, now), seen, now, young)


def ceilings(state: State, now: float) -> Ceilings:
    """f, and the ceilings that follow from what is usual, from the memory of a death and the slow start after it."""
    requests, tokens = state.lessons.ceilings(now)
    most = [requests]
    if state.usual_requests:
        most.append(max(SLOW_START_REQUESTS, state.usual_requests * HEADROOM))
    up = 0.0 if not state.up else SLOW_START_SECONDS if state.up_at is None else now - state.up_at
    if up < SLOW_START_SECONDS:
        first = SLOW_START_REQUESTS if state.usual_requests > SLOW_START_MOST else state.usual_requests
        most.append(max(SLOW_START_REQUESTS, first) * 2 ** (up / SLOW_START_DOUBLING_SECONDS))
    if state.taken_requests:
        most.append(state.taken_requests)
    if state.queue_ceiling >= 0:
        most.append(state.queue_ceiling)
    return Ceilings(state.f, *(int(ceiling) if ceiling < math.inf else -1 for ceiling in (min(most), tokens)))


def overflow_tokens(seen: Observation) -> float:
    """Tokens by which a pool that is nearly full will soon be too small, whatever ends beyond what is certain to."""
    if not seen.kv_tokens or not seen.used_tokens or not seen.throughput or seen.use < USE_AIM:
        return 0.0
    grown = RELIEF_SECONDS * seen.throughput - seen.ending_tokens
    return max(0.0, seen.used_tokens + max(0.0, grown) - seen.kv_tokens)


def to_recall(leases: Iterable[tuple[float, float, str]], tokens: float, waiting: int = 0) -> list[str]:
    """Whom to take back, the youngest first, so that so many tokens are freed. The eldest always stays.

    leases: (granted at, tokens held, id) of each. waiting: so many of them, the youngest, stand in the server's queue:
    they hold nothing there, and would take the room that the others free. What is lost is the least that can be: a
    server that is full would push them out of its batch and prefill them again, or die.
    """
    recalled: list[str] = []
    for number, (_, held, lease_id) in enumerate(sorted(leases, reverse=True)[:-1]):
        if tokens <= 0:
            break
        recalled.append(lease_id)
        tokens -= held if number >= waiting else 0.0
    return recalled


def _levels(state: State, seen: Observation, young: bool) -> State:
    """What is in flight: what of it is usual, and what would be learned if it died now."""
    usual = state.usual_requests or (0.0 if young else float(seen.leases))
    if not young and (seen.wanted or seen.leases > usual):  # fewer because there is no work, or not yet, says nothing
        usual += (seen.leases - usual) * min(1.0, 2 * LOOK_SECONDS / max(1.0, seen.generation_seconds))
    ceiling = _queue_ceiling(state, seen)
    brim = 1.0 if ceiling == 1 else seen.use
    told = seen.running is not None
    requests = min(seen.leases, seen.running + QUEUE_AIM) if told else seen.leases
    alive = told or seen.answers > 0
    lessons = deaths.looked(state.lessons, requests, seen.used_tokens, brim, seen.answers, alive)
    return dataclasses.replace(
        state, usual_requests=usual, fullest=max(state.fullest, seen.use), queue_ceiling=ceiling, lessons=lessons
    )


def _queue_ceiling(state: State, seen: Observation) -> int:
    emptying = state.queue_ceiling == 1 and seen.use > USE_AIM  # or the freed room would be given away at once
    if seen.use > USE_ALARM or emptying or overflow_tokens(seen) > 0:
        return 1
    return (seen.running or 0) + QUEUE_AIM if (seen.waiting or 0) > QUEUE_AIM else -1


def _refused(state: State, seen: Observation, now: float) -> State:
    """What a server takes that refuses: what is there and was not refused; then more, as long as it is asked for."""
    taken = state.taken_requests
    if seen.refusals:
        there = 0 if seen.running is None else min(seen.leases, seen.running + (seen.waiting or 0))
        taken = max(1.0, there, seen.leases - seen.refusals)
        taken = min(taken, state.taken_requests or taken)
    elif taken and seen.leases >= int(taken) and now - state.taken_at > _settle_seconds(seen):
        taken = max(taken + 1.0, taken * TAKEN_GROWTH)
    return state if taken == state.taken_requests else dataclasses.replace(state, taken_requests=taken, taken_at=now)


def _settle_seconds(seen: Observation) -> float:
    """Until a change has shown its effect."""
    return min(_SETTLE_MOST_SECONDS, max(_SETTLE_LEAST_SECONDS, seen.generation_seconds * SETTLE_GENERATIONS))


def _down(state: State, seen: Observation, now: float) -> State:
    state = dataclasses.replace(state, up=False, queue_ceiling=-1, taken_requests=0.0)
    if not seen.died:
        return state
    lessons = deaths.died(state.lessons, seen.leases, now)
    f = min(state.f, F_START) if lessons.full_at == now else state.f
    return dataclasses.replace(state, f=f, lessons=lessons)


def _learn(state: State, seen: Observation, now: float, young: bool) -> State:
    """At most one step per settling time; harm is answered sooner than room."""
    settle = _settle_seconds(seen)
    quiet = now - state.changed_at
    harm, alarm = seen.retractions > 0, state.queue_ceiling == 1
    if (harm or alarm) and quiet > settle / 2:
        return _changed(state, seen, now, state.f * (_STEP_BACK if harm else _STEP_ALARM))
    if quiet < settle:
        return state
    if _collapsed(state, seen):
        return _changed(state, seen, now, state.f * _STEP_DOWN_MOST)
    fragility = state.lessons.fragility(now)
    most, aim = (use + (USE_AIM_FRAGILE - use) * fragility for use in (USE_ALARM, USE_AIM))
    if state.fullest > most:
        return _changed(state, seen, now, state.f * max(_STEP_DOWN_MOST, (most / state.fullest) ** GAIN))
    if state.f >= F_START:
        aim = min(aim, USE_EMPTY)
    queues = (seen.waiting or 0) > QUEUE_AIM
    if young or queues or not seen.wanted or seen.stale_seconds > STALE_SECONDS or not 0 < state.fullest < aim:
        return _changed(state, seen, now, state.f)
    return _changed(state, seen, now, state.f * min(_STEP_UP_MOST, (aim / state.fullest) ** GAIN))


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

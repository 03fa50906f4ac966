"""One wait, not a thousand pollers: a worker asks in one place for leases for all its waiting tasks.

The decision itself is made in Redis (lease.lua), over all workers. Tasks that wait cost nothing but their place here.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from app.capacity.controller import QUEUE_AIM
from app.capacity.share import Share
from app.lanes import Lane
from app.manifest import RunManifest
from app.records import Task
from app.store import keys
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key
from workers.endpoints import Endpoints
from workers.holdings import HEARTBEAT_SECONDS, HOLD_TTL_MS, Holdings, Lease
from workers.stages import Ask
from workers.suspects import HOME_SECONDS, INNOCENT, Suspicion, name_of

#: After a loss of Redis nothing is admitted for two heartbeats, so that leases are known again.
SETTLE_MS = int(2 * HEARTBEAT_SECONDS * 1000)
#: Where an endpoint tells nothing about itself and the user gave no --concurrency.
UNKNOWN_CONCURRENCY = 64
#: The first in its lane reserves a place after so long: others fit in while it does not.
URGENT_SECONDS = 2.0
#: Other workers' releases are seen this late: twice as late each time that nothing had come free.
_POLL_SECONDS, _POLL_MOST_SECONDS = 0.1, 1.0
_POLL_DOWN_SECONDS = 2.0  # all are away: Redis is not asked; one that returns is told at once, one that is added is not
_GATHER_SECONDS = 0.003  # what comes together is asked for together; how long after a decision, lease.lua says
_ASK_LEAST, _ASK_MOST = 8, 64
_SUSPECTS, _GO_ON = "suspects", "go on"  #: queues beside those of the lanes


@dataclass(slots=True)
class Past:
    """Where a task was sent before, and what came of it. A suspect goes back to where it was last, so that it does not
    take down one endpoint after the other."""

    last: str | None = None
    refused_by: set[str] = field(default_factory=set)
    suspicion: Suspicion = INNOCENT

    def left_of(self, urls: list[str]) -> list[str]:
        """Those that have not refused it; all, if all have."""
        return [url for url in urls if url not in self.refused_by] or urls


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    lease_id: str
    lane: Lane
    kind: str
    prompt_tokens: int
    allowance: int
    left: int  #: what its answer may get in all
    past: Past
    future: asyncio.Future
    goes_on: bool
    home_until: float  #: a suspect waits so long (time.monotonic()) to be tried where it was last
    first_since: float | None = None  #: when it became the first of its lane

    def urgent(self) -> bool:
        """Whether it has been the first of its lane for long."""
        return self.first_since is not None and time.monotonic() - self.first_since > URGENT_SECONDS

    def share(self, granted_ms: int) -> Share:
        """What its lease says of it."""
        company = self.past.suspicion.company
        return Share(self.lane.value, self.prompt_tokens, self.allowance, granted_ms, self.kind, company)


@dataclass(slots=True)
class _Room:
    """The waiting room of one run: a queue for each lane, one for suspects, which hold nobody up, and one for answers
    that go on with their next stage."""

    run: RunManifest
    queues: dict[str, deque[_Waiting]] = field(
        default_factory=lambda: {queue: deque() for queue in (_SUSPECTS, _GO_ON, *Lane)}
    )
    ask: int = _ASK_LEAST
    poll_seconds: float = _POLL_SECONDS
    turn: float = 0.0  #: time.monotonic() from which on it may be asked for again

    def enter(self, waiting: _Waiting) -> bool:
        """Join the queue; returns whether it will be asked for at the next decision."""
        suspect = waiting.past.suspicion.company
        queue = self.queues[_SUSPECTS if suspect else _GO_ON if waiting.goes_on else waiting.lane]
        queue.append(waiting)
        return len(queue) <= self.ask

    def next_poll(self, fruitful: bool) -> float:
        """Seconds until it is worth asking again, if nothing is heard meanwhile."""
        poll = _POLL_SECONDS if fruitful else self.poll_seconds
        self.poll_seconds = min(_POLL_MOST_SECONDS, poll * 2)
        return poll

    def eldest(self) -> list[_Waiting]:
        """Whom to ask for now: the eldest of each queue, so that none hides another: suspects first, for they take the
        place that is empty already, then those that go on (their ids are still in the server's cache), then in order
        of arrival."""
        asked: list[_Waiting] = []
        for queue in self.queues.values():
            while queue and queue[0].future.done():
                queue.popleft()
            if queue and queue[0].first_since is None:
                queue[0].first_since = time.monotonic()
            waiting = (w for w in queue if not w.future.done())
            asked += itertools.islice(waiting, self.ask)
        return sorted(asked, key=lambda one: (one.past.suspicion.company == 0, not one.goes_on, one.number))


class Admission:
    """Leases for this worker's tasks. `manifest` gives a run's present manifest: it may change while tasks wait."""

    def __init__(
        self, courier: Courier, holdings: Holdings, endpoints: Endpoints, name: str,
        manifest: Callable[[str], Awaitable[RunManifest | None]] | None = None,
    ):  # fmt: skip
        self._courier, self._holdings, self._endpoints, self._name = courier, holdings, endpoints, name
        self._manifest = manifest
        self._rooms: dict[str, _Room] = {}
        self._wake = asyncio.Event()
        endpoints.when_back.append(self._wake.set)
        self._numbers = itertools.count(1)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a lease now."""
        return sum(len(queue) for room in self._rooms.values() for queue in room.queues.values())

    def waiting_in(self, lane: Lane) -> int:
        """Tasks of a lane that wait for a lease now, suspects apart. May be called from any thread."""
        return sum(len(room.queues[lane]) for room in list(self._rooms.values()))

    @property
    def held(self) -> int:
        """Leases of this worker."""
        return len(self._holdings.leases)

    async def lease(self, run: RunManifest, task: Task, ask: Ask, past: Past) -> Lease:
        """Wait for a share of an endpoint that can take this task, by preference not the last one it was at."""
        waiting = self._waiting(run, task, ask, past)
        room = self._rooms.setdefault(run.run_id, _Room(run))
        room.run = run
        if room.enter(waiting):
            self._wake.set()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled():  # granted in the same turn
                self._holdings.release(waiting.future.result())
            raise

    def _waiting(self, run: RunManifest, task: Task, ask: Ask, past: Past) -> _Waiting:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        return _Waiting(
            number, f"{self._name}:{number}:{name_of(run.run_id, task.key)}", ask.lane, ask.stage_kind,
            len(ask.input_ids), ask.max_new_tokens, ask.left, past, future, ask.goes_on,
            time.monotonic() + HOME_SECONDS,
        )  # fmt: skip

    def _may(self, run: RunManifest, waiting: _Waiting) -> str:
        """Which endpoints may take it now, "1" or "0" for each: they come, go and return while it waits."""
        past = waiting.past
        able = past.left_of(run.endpoints_for(waiting.prompt_tokens, waiting.left) or run.endpoints)
        able = [url for url in able if self._endpoints.objection(url, run.run_id) is None]
        others = [url for url in able if url != past.last]
        if past.suspicion.company and past.last in able and time.monotonic() < waiting.home_until:
            able = [past.last]
        elif any(not self._endpoints.is_open(url) for url in others):
            able = others
        return "".join("1" if url in able else "0" for url in run.endpoints)

    def release(self, lease: Lease) -> None:
        """Give a share back; the next decision may use it."""
        self._holdings.release(lease)
        self._wake.set()

    def released_by_publish(self, lease: Lease) -> None:
        """The publish script ended this lease in Redis."""
        self._holdings.leases.pop(lease.id, None)
        self._wake.set()

    async def run_forever(self) -> None:
        """Decide whenever something changed that could free a share, and at a slow poll while tasks wait; by turns."""
        pause, turn = None, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):  # wait_for (Python 3.11) takes a cancellation for a wake
                    await self._wake.wait()
            await asyncio.sleep(max(_GATHER_SECONDS, turn - time.monotonic()))
            self._wake.clear()
            rooms = list(self._rooms.values())  # others may come meanwhile
            pauses = [await self._decide(room) for room in rooms]
            turn = min((room.turn for room in rooms), default=0.0)
            self._rooms = {run: room for run, room in self._rooms.items() if any(room.queues.values())}
            pause = min((p for p in pauses if p is not None), default=None)

    async def _decide(self, room: _Room) -> float | None:
        """One decision for one run. Returns seconds until the next one is due, None if nobody waits."""
        asked = room.eldest()
        if not asked:
            return None
        if self._manifest is not None:
            room.run = await self._manifest(room.run.run_id) or room.run
        run, urls = room.run, room.run.endpoints
        if all(map(self._endpoints.is_open, urls)):
            return _POLL_DOWN_SECONDS
        names = [EndpointKeys(endpoint_key(url)) for url in urls]
        answer = await self._courier.script(
            "lease",
            [keys.EPOCH, keys.EXPECTED, *(key for n in names for key in lease_keys(n))],
            [HOLD_TTL_MS, SETTLE_MS, len(urls), *self._ceilings(run), *self._requests(run, asked)],
        )
        settling, now_ms, turn_ms, *places = answer
        room.turn = time.monotonic() + turn_ms / 1000
        for waiting, place in zip(asked, places, strict=True):
            if place:
                self._grant(waiting, urls[place - 1], names[place - 1].endpoint, now_ms)
        granted = sum(map(bool, places))
        room.ask = min(_ASK_MOST, room.ask * 2) if granted == len(asked) else max(_ASK_LEAST, granted * 2)
        if settling > 0:
            return min(settling / 1000, 1.0)
        poll = room.next_poll(granted > 0 or self._endpoints.grows)
        if granted == len(asked):
            return 0.0 if any(room.queues.values()) else None
        return poll

    def _grant(self, waiting: _Waiting, url: str, endpoint: str, now_ms: int) -> None:
        lease = Lease(waiting.lease_id, url, endpoint, str(waiting.share(now_ms)))
        self._holdings.leases[lease.id] = lease
        if waiting.future.done():  # its task was cancelled while Redis decided
            self._holdings.release(lease)
        else:
            waiting.future.set_result(lease)

    def _requests(self, run: RunManifest, asked: list[_Waiting]) -> list[str | int]:
        return [
            word
            for w in asked
            for word in (
                w.lease_id, w.lane.value, w.prompt_tokens, w.allowance, w.kind, self._may(run, w),
                "1" if w.urgent() else "0", w.past.suspicion.company,
            )
        ]  # fmt: skip

    def _ceilings(self, run: RunManifest) -> list[int]:
        """Five words for each endpoint; a server's own running limit is given a few more, which its queue takes."""
        words: list[int] = []
        for url in run.endpoints:
            info = self._endpoints.info(url)
            running = info.max_running_requests if info else None
            queue = QUEUE_AIM if info is None or info.max_queued_requests is None else info.max_queued_requests
            most = [n for n in (run.concurrency, running and running + min(queue, QUEUE_AIM)) if n and n > 0]
            budget = (info.kv_tokens if info else None) or -1
            ceiling = min(most) if most else (-1 if budget > 0 else UNKNOWN_CONCURRENCY)
            per_minute = run.requests_per_minute
            words += [ceiling, run.short_concurrency, run.long_concurrency, budget, per_minute]
        return words


def lease_keys(names: EndpointKeys) -> list[str]:
    """The keys of an endpoint that lease.lua decides by, in its order."""
    return [names.leases, names.lease_info, names.open, names.control, names.reserved]

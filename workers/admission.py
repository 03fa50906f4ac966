"""One wait, not a thousand pollers: a worker asks in one place for leases for all its waiting tasks.

The decision itself is made in Redis (lease.lua), over all workers. Tasks that wait cost nothing but their place here.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field

from app.lanes import Lane, lane_of, lease_weight
from app.manifest import RunManifest
from app.records import Task
from app.store import keys
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key
from workers.endpoints import Endpoints
from workers.holdings import HEARTBEAT_SECONDS, HOLD_TTL_MS, Holdings, Lease

#: After a loss of Redis nothing is admitted for two heartbeats, so that leases are known again.
SETTLE_MS = int(2 * HEARTBEAT_SECONDS * 1000)
#: Where an endpoint tells nothing about itself and the user gave no --concurrency.
UNKNOWN_CONCURRENCY = 64
_POLL_SECONDS = 0.1  # other workers' releases are seen this late
_POLL_DOWN_SECONDS = 1.0
_GATHER_SECONDS = 0.003  # releases and arrivals within this time share one decision
_ASK_LEAST, _ASK_MOST = 32, 512


@dataclass(slots=True, eq=False)
class _Waiting:
    lease_id: str
    lane: Lane
    weight: int
    may: tuple[str, ...]
    future: asyncio.Future


@dataclass(slots=True)
class _Room:
    """The waiting room of one run."""

    run: RunManifest
    lanes: dict[Lane, deque[_Waiting]] = field(default_factory=lambda: {lane: deque() for lane in Lane})
    ask: int = _ASK_LEAST

    def eldest(self) -> list[_Waiting]:
        """Whom to ask for now: the eldest of each lane, so that neither lane hides the other."""
        for lane, queue in self.lanes.items():
            self.lanes[lane] = deque(waiting for waiting in queue if not waiting.future.done())
        return [w for queue in self.lanes.values() for w in itertools.islice(queue, self.ask)]


class Admission:
    """Leases for this worker's tasks."""

    def __init__(self, courier: Courier, holdings: Holdings, endpoints: Endpoints, name: str):
        self._courier, self._holdings, self._endpoints, self._name = courier, holdings, endpoints, name
        self._rooms: dict[str, _Room] = {}
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a lease now."""
        return sum(len(queue) for room in self._rooms.values() for queue in room.lanes.values())

    async def lease(self, run: RunManifest, task: Task, avoid: str | None = None) -> Lease:
        """Wait for a share of an endpoint that can take this task. `avoid`: not this one, if another can."""
        may = run.endpoints_for(len(task.prompt_token_ids), task.max_new_tokens) or run.endpoints
        others = [url for url in may if url != avoid and not self._endpoints.is_open(url)]
        waiting = _Waiting(
            f"{self._name}:{next(self._numbers)}",
            lane_of(len(task.prompt_token_ids), task.max_new_tokens),
            lease_weight(task),
            tuple(others or may),
            asyncio.get_running_loop().create_future(),
        )
        room = self._rooms.setdefault(run.run_id, _Room(run))
        room.run = run
        room.lanes[waiting.lane].append(waiting)
        self._wake.set()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled():  # granted in the same turn
                self._holdings.release(waiting.future.result())
            raise

    def release(self, lease: Lease) -> None:
        """Give a share back; the next decision may use it."""
        self._holdings.release(lease)
        self._wake.set()

    def released_by_publish(self, lease: Lease) -> None:
        """The publish script ended this lease in Redis."""
        self._holdings.leases.pop(lease.id, None)
        self._wake.set()

    async def run_forever(self) -> None:
        """Decide whenever something changed that could free a share, and at a slow poll while tasks wait."""
        pause: float | None = None
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pass
            await asyncio.sleep(_GATHER_SECONDS)
            self._wake.clear()
            pauses = [await self._decide(room) for room in self._rooms.values()]
            self._rooms = {run: room for run, room in self._rooms.items() if any(room.lanes.values())}
            pause = min((p for p in pauses if p is not None), default=None)

    async def _decide(self, room: _Room) -> float | None:
        """One decision for one run. Returns seconds until the next one is due, None if nobody waits."""
        asked = room.eldest()
        if not asked:
            return None
        run, urls = room.run, room.run.endpoints
        names = [EndpointKeys(endpoint_key(url)) for url in urls]
        answer = await self._courier.script(
            "lease",
            [keys.EPOCH, *(key for name in names for key in (name.leases, name.lease_info, name.open))],
            [HOLD_TTL_MS, SETTLE_MS, len(urls), *self._ceilings(run), *self._requests(asked, urls)],
        )
        settling, places = answer[0], answer[1:]
        granted = 0
        for waiting, place in zip(asked, places, strict=True):
            if place:
                granted += 1
                self._grant(waiting, urls[place - 1], names[place - 1].endpoint)
        room.ask = min(_ASK_MOST, room.ask * 2) if granted == len(asked) else max(_ASK_LEAST, granted * 2)
        if not any(room.eldest()):
            return None
        if settling > 0:
            return min(settling / 1000, _POLL_DOWN_SECONDS)
        if granted == len(asked):
            return 0.0
        return _POLL_DOWN_SECONDS if all(map(self._endpoints.is_open, urls)) else _POLL_SECONDS

    def _grant(self, waiting: _Waiting, url: str, endpoint: str) -> None:
        lease = Lease(waiting.lease_id, url, endpoint, f"{waiting.lane} {waiting.weight}")
        self._holdings.leases[lease.id] = lease
        if waiting.future.done():  # its task was cancelled while Redis decided
            self._holdings.release(lease)
        else:
            waiting.future.set_result(lease)

    def _ceilings(self, run: RunManifest) -> list[int]:
        words: list[int] = []
        for url in run.endpoints:
            info = self._endpoints.info(url)
            most = [n for n in (run.concurrency, info.max_running_requests if info else None) if n and n > 0]
            budget = (info.kv_tokens if info else None) or -1
            ceiling = min(most) if most else (-1 if budget > 0 else UNKNOWN_CONCURRENCY)
            words += [ceiling, run.short_concurrency, run.long_concurrency, budget]
        return words

    def _requests(self, asked: list[_Waiting], urls: list[str]) -> list[str | int]:
        return [
            word
            for w in asked
            for word in (w.lease_id, w.lane.value, w.weight, "".join("1" if url in w.may else "0" for url in urls))
        ]

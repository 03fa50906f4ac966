"""Watching endpoints for what no failing request tells: they hang with all sockets open, or they were told to stop.

One worker watches an endpoint for all (leased in Redis); what it finds, every worker heeds within a second: requests
at a stalled endpoint are aborted there and go to others, charged to nobody; requests whose answers are lost fail like
any other. How long an endpoint may be silent is workers/patience.py.
"""

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field

from app.capacity.share import parse_share
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault, FaultKind
from app.sglang.wire import Loads, Readiness
from app.store.breaker import Breaker, Why
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key
from workers.endpoints import Endpoints
from workers.holdings import Holdings, Work
from workers.patience import Patience, Verdict, is_overdue

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_AWAY_TICKS = 5
_LEAD_MS = 8000
_LOADS_SECONDS = 2.0
_LOST_MS = 5000
#: Between two looks at /ready, which costs nothing; where only /health is there, it makes the server generate.
_READY_SECONDS, _HEALTH_SECONDS = 2.0, 10.0
_SLOW_SECONDS = 0.5
_GOODBYES = {
    Readiness.DRAINING: (
        Why.LEAVING, "it is leaving: it said that it was ready, and now that it is not; what runs there finishes"),
    Readiness.PAUSED: (Why.PAUSED, "it is paused: what runs there waits until its /continue_generation is called"),
}  # fmt: skip


@dataclass(slots=True)
class _Watched:
    patience: Patience
    ready_at: float = 0.0  #: when to look at its readiness again
    goodbyes: int = field(default=0)  #: looks in a row at which it was leaving or paused


class Watch:
    """Watches the endpoints of all runs this worker has seen, where it leads."""

    def __init__(self, courier: Courier, client: SGLangClient, endpoints: Endpoints, holdings: Holdings, name: str):
        self._courier, self._client, self._endpoints = courier, client, endpoints
        self._holdings, self._name = holdings, name
        self._watched: dict[str, _Watched] = {}
        self._looks: dict[str, asyncio.Task] = {}

    async def run_forever(self) -> None:
        """Look at each endpoint once a second, at one that is away seldom; one that hangs holds up no other."""
        for tick in itertools.count():
            working = {work.lease.url for work in self._holdings.claims.values() if work.lease is not None}
            for url in self._endpoints.urls:
                if self._endpoints.is_open(url) and url not in working and tick % _AWAY_TICKS:
                    continue
                if url not in self._looks or self._looks[url].done():
                    self._looks[url] = asyncio.create_task(self._look(url))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, url: str) -> None:
        names = EndpointKeys(endpoint_key(url))
        leads, requests, (done, rate, silence), lost = await asyncio.gather(
            self._courier.script("lead", [names.watch], [self._name, _LEAD_MS]),
            self._courier.command("ZCARD", names.leases),
            self._courier.command("HMGET", names.control, "done", "rate", "silence"),
            self._courier.command("GET", names.lost),
        )
        breaker = self._endpoints.breaker(url)
        paused = breaker is not None and breaker.why is Why.PAUSED  # silent on purpose, for as long as somebody wants
        if not paused:
            self._give_up(url, breaker, float(rate or 0) * 1000, int(lost or 0))
        if not leads or paused or (breaker is not None and not requests):
            self._watched.pop(url, None)
            return
        watched = self._watched.setdefault(url, _Watched(Patience(float(silence or 0))))
        loads, _ = await asyncio.gather(self._loads(url), self._heed_goodbye(url, watched, breaker))
        limit = watched.patience.limit_seconds
        verdict = watched.patience.look(requests, int(done or 0), loads, time.monotonic())
        await self._courier.command("HSET", names.control, "silence", f"{watched.patience.slowest_seconds:.3f}")
        if verdict is Verdict.STALLED:
            sentence = f"it stalled: nothing came back for {limit:.0f} s, and its figures stand still"
            await self._endpoints.open(url, sentence, why=Why.STALLED, explains=True)
        elif verdict is Verdict.LOST:
            seconds, microseconds = await self._courier.command("TIME")
            before = int(seconds) * 1000 + int(microseconds) // 1000 - round(limit * 1000)
            log.warning("answers_lost %s: nothing to do for %.0f s, and %d answers owed", url, limit, requests)
            await self._courier.command("SET", names.lost, before, "PX", _LOST_MS)

    async def _loads(self, url: str) -> Loads | None:
        try:
            async with asyncio.timeout(_LOADS_SECONDS):
                return await self._client.loads(url)
        except (Fault, TimeoutError):
            return None

    async def _heed_goodbye(self, url: str, watched: _Watched, breaker: Breaker | None) -> None:
        """A server that was told to stop says so at once and twice, and goes on serving: it gets nothing new. Nor does
        one that is paused."""
        now = time.monotonic()
        if breaker is not None or now < watched.ready_at:
            return
        readiness = await self._endpoints.readiness(url)
        watched.goodbyes = watched.goodbyes + 1 if readiness in _GOODBYES else 0
        pause = _READY_SECONDS if time.monotonic() - now < _SLOW_SECONDS else _HEALTH_SECONDS
        watched.ready_at = now + (0.0 if watched.goodbyes == 1 else pause)
        if watched.goodbyes > 1:
            watched.goodbyes = 0
            why, sentence = _GOODBYES[readiness]
            await self._endpoints.open(url, sentence, why=why)

    def _give_up(self, url: str, breaker: Breaker | None, tokens_per_second: float, lost_ms: int) -> None:
        """End our requests there of which nothing is to be expected."""
        stalled_ms = breaker.since * 1000 if breaker is not None and breaker.why is Why.STALLED else 0.0
        for work in list(self._holdings.claims.values()):
            if work.lease is not None and work.lease.url == url:
                fault = _hopeless(work, stalled_ms, lost_ms, tokens_per_second)
                if fault is not None:
                    work.give_up(fault)


def _hopeless(work: Work, stalled_ms: float, lost_ms: int, tokens_per_second: float) -> Fault | None:
    share = parse_share(work.lease.share.encode())
    if share.granted_ms <= stalled_ms:  # nothing was granted since
        return Fault(FaultKind.STALLED)
    age = time.monotonic() - work.sent_at
    if share.granted_ms < lost_ms:
        return Fault(FaultKind.TIMEOUT, f"no answer within {age:.0f} s, and the endpoint has nothing to do")
    if is_overdue(age, share.allowance, tokens_per_second):
        return Fault(FaultKind.TIMEOUT, f"no answer within {age:.0f} s, ten times what its allowance takes")
    return None

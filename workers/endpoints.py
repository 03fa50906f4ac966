"""What this worker knows of endpoints: what they said of themselves, and whether their breaker is open.

The breaker's state lies in Redis and is shared by all workers and runs (app/store/breaker.py). An endpoint that
refuses, resets or stalls is left alone and probed, by one worker for all; it is used again when a real generation comes
back. What it says of its health is evidence, never the verdict: only a generation proves that it works.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from app.capacity.controller import SLOW_START_SECONDS
from app.drift import drift, guarded, objection
from app.manifest import RunManifest
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault, FaultKind
from app.sglang.knock import listens
from app.sglang.wire import EndpointInfo, Readiness
from app.store.breaker import Breaker, Why, closing, opening, parse_breaker
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_TRY_SECONDS = 25.0
_PROBE_TTL_MS, _TRIAL_TTL_MS = 6000, 45_000  # a look at it; a trial, and asking who it is
_PROBE_SECONDS = (0.25, 0.5, 1.0, 1.0, 1.0, 1.0, 1.5)
#: In between, one that refuses connections is knocked at after so much of the time that it has been away.
_KNOCK_SHARE, _KNOCK_LEAST_SECONDS = 0.01, 0.1
_LOOK_TOGETHER_SECONDS, _LOOK_TOGETHER_SHARE = 0.02, 0.002  # answers wait for each other: of the time they took
_READY_SECONDS = 2.0  # a /health that takes longer is busy: it says nothing
#: A server that was told to stop ends within 5 s of its last request; one that says so and stays is lying.
_LINGER_SECONDS = 15.0
_SAYS_NOTHING_ABOUT_HEALTH = (FaultKind.QUEUE_FULL, FaultKind.LOCAL_RESOURCES, FaultKind.BAD_IDS, FaultKind.TOO_LONG,
                              FaultKind.REFUSED)  # fmt: skip
#: Who loses these together with others was a bystander.
_LOST_TOGETHER = (FaultKind.RESET, FaultKind.DISCONNECTED, FaultKind.ABORTED)


@dataclass(slots=True)
class _Check:
    """One look at an endpoint, for all whose requests failed there meanwhile."""

    task: asyncio.Task
    losses: int = 0


class Endpoints:
    """The endpoints of all runs this worker has seen."""

    def __init__(self, courier: Courier, client: SGLangClient, name: str):
        self._courier, self._client, self._name = courier, client, name
        self._manifests: dict[str, RunManifest] = {}
        self._runs: dict[str, RunManifest] = {}  # url → a run that uses it (for the canary's parameters)
        self._info: dict[str, EndpointInfo] = {}
        self._problems: dict[str, Fault] = {}
        self._open: dict[str, Breaker] = {}
        self._served_at: dict[str, float] = {}
        self._checks: dict[str, _Check] = {}
        self._probes: dict[str, asyncio.Task] = {}
        self._idle_since: dict[str, float] = {}  # of those that say that they are leaving
        self._seen_at: dict[str, float] = {}  # url → when a look began that found the run's model there
        self._looks: dict[str, asyncio.Task] = {}
        self._back_at = -SLOW_START_SECONDS
        self.when_back: list[Callable[[], None]] = []  #: called when an endpoint that was open is found closed

    def use(self, run: RunManifest) -> None:
        """Learn the endpoints of a run as they are now; those that no run has any more are forgotten."""
        self._manifests[run.run_id] = run
        self._index()

    def leave(self, run_id: str) -> None:
        """Nothing of this run is here any more: its endpoints are looked at no more."""
        self._manifests.pop(run_id, None)
        self._index()

    def _index(self) -> None:
        self._runs = {url: one for one in self._manifests.values() for url in one.endpoints}
        for known in (self._info, self._open):
            for url in known.keys() - self._runs.keys():  # should it come back, it is asked who it is by then
                del known[url]

    @property
    def urls(self) -> list[str]:
        """The endpoints of all runs."""
        return list(self._runs)

    def info(self, url: str) -> EndpointInfo | None:
        """What the endpoint said of itself; None until it was asked."""
        return self._info.get(url)

    async def known(self, url: str) -> EndpointInfo:
        """What the endpoint said of itself, asked now if it was never asked. Raises Fault if it can't be used."""
        if url not in self._info and url in self._runs:
            self._start(url, self._learn(url))
            await asyncio.shield(self._probes[url])
        if url not in self._info:
            problem = self._problems.get(url) or Fault(FaultKind.UNAVAILABLE, f"{url} cannot be used now")
            raise problem if not problem.chargeable else Fault(FaultKind.UNAVAILABLE, problem.detail, url=url)
        return self._info[url]

    def breaker(self, url: str) -> Breaker | None:
        """The breaker if it was open when last looked at."""
        return self._open.get(url)

    def is_open(self, url: str) -> bool:
        """Whether the breaker was open when last looked at."""
        return url in self._open

    def served(self, url: str) -> None:
        """A request came back well."""
        self._served_at[url] = time.monotonic()

    async def confirm(self, url: str, sent_at: float) -> None:
        """Be sure that the run's model answered a request sent at that time (time.monotonic). Raises Fault if not.

        A server that took a request and answered it was the one at this address in between. So one look, begun at any
        time after the sending, confirms all that were sent before it; after a swap that cost us no connection, the
        answers since the last good look are given up. Those that come within a moment share a look.
        """
        while self._seen_at.get(url, 0.0) <= sent_at:
            look = self._looks.get(url)
            if look is None:
                pause = min(_LOOK_TOGETHER_SECONDS, _LOOK_TOGETHER_SHARE * (time.monotonic() - sent_at))
                look = self._looks[url] = asyncio.create_task(self._see(url, pause))
            await asyncio.shield(look)

    async def _see(self, url: str, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            began = time.monotonic()
            found = await self._client.serves(url)
        except Fault as fault:
            raise Fault(FaultKind.UNCONFIRMED, f"{FaultKind.UNCONFIRMED.sentence}: {fault.detail}") from fault
        finally:
            del self._looks[url]  # before any waiter goes on: the next one needs a look of its own
        run = self._runs.get(url)
        if run is None:
            raise Fault(FaultKind.UNCONFIRMED, f"{FaultKind.UNCONFIRMED.sentence}: it was removed")
        if change := drift(run.server, guarded(found.identity)):
            raise Fault(FaultKind.ANOTHER_MODEL, f"another model answers there: {change}").at(url)
        self._seen_at[url] = began

    async def after_fault(self, url: str, fault: Fault, started_at: float) -> bool:
        """Take a fault as evidence. Returns whether the endpoint goes on serving others (the row may be to blame).

        started_at: time.monotonic() at which the failed attempt was sent.
        """
        if fault.kind in _SAYS_NOTHING_ABOUT_HEALTH:
            return self._served_at.get(url, 0.0) > started_at
        if fault.kind is FaultKind.STALLED or url not in self._runs:  # opened before it was given up; or removed
            return False
        self._info.pop(url, None)  # whoever answers there next may be somebody else: asked before anything is sent
        if url in self._open:  # known, and probed
            return False
        if fault.kind is FaultKind.UNREACHABLE:
            await self.open(url, fault.detail)
            return False
        check = self._checks.get(url)
        if check is None:
            check = self._checks[url] = _Check(asyncio.create_task(self._check(url, fault)))
            check.task.add_done_callback(lambda _: self._checks.pop(url, None))
        together = fault.kind in _LOST_TOGETHER
        check.losses += together
        return await asyncio.shield(check.task) and not (together and check.losses > 1)

    async def look(self) -> None:
        """Once a second: read the shared breakers, ask new endpoints about themselves, probe open ones."""
        urls = self.urls
        if not urls:
            return
        states = await asyncio.gather(*(self._courier.command("GET", _keys(url).open) for url in urls))
        for url, breaker in zip(urls, map(parse_breaker, states), strict=True):
            if breaker is None:
                if self._found_back(url):  # who it is now, we ask ourselves
                    self._info.pop(url, None)
                if url not in self._info:
                    self._start(url, self._learn(url))
            else:
                self._open[url] = breaker
                if breaker.why is not Why.DRAINED:
                    self._start(url, self._probe(url))

    def _found_back(self, url: str) -> bool:
        """Whoever waits for it need not look for it; a goodbye, if it was one, is over."""
        self._idle_since.pop(url, None)
        was_open = self._open.pop(url, None) is not None
        if was_open:
            self._back_at = time.monotonic()
        for tell in self.when_back if was_open else ():
            tell()
        return was_open

    @property
    def grows(self) -> bool:
        """Whether one came back a moment ago: it gets more and more."""
        return time.monotonic() - self._back_at < SLOW_START_SECONDS

    async def run_forever(self) -> None:
        """Look every second."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """End what looks at endpoints now."""
        tasks = [*self._probes.values(), *self._looks.values(), *(check.task for check in self._checks.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, url: str, coroutine) -> None:
        if url in self._probes:
            coroutine.close()
            return
        task = self._probes[url] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._probes.pop(url, None))

    async def readiness(self, url: str) -> Readiness:
        """What /ready or /health says at once. DRAINING: its 200 was seen by some worker since it last died."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                readiness = await self._client.is_ready(url)
        except TimeoutError:
            return Readiness.UNKNOWN
        control = _keys(url).control
        if readiness is Readiness.READY:
            await self._courier.command("HSET", control, "ready", 1)
        elif readiness is Readiness.LOADING and await self._courier.command("HGET", control, "ready") == b"1":
            return Readiness.DRAINING
        return readiness

    async def _check(self, url: str, fault: Fault) -> bool:
        """Is it the endpoint or the request? One look, one real generation, for all who just failed there."""
        problem = await self._try(url)
        if problem is None:
            await self._learn(url)
            return url in self._info
        why, sentence = problem
        await self.open(url, f"{fault.detail}; then {sentence}", why=why)
        return False

    async def _try(self, url: str) -> tuple[Why, str] | None:
        """What keeps the endpoint from generating; None: nothing does."""
        readiness, run = Readiness.UNKNOWN, self._runs.get(url)
        if run is None:  # nobody needs it
            return None
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                readiness = await self.readiness(url)
                if readiness is Readiness.AWAY:
                    return Why.DIED, "it is away"
                if readiness is Readiness.PAUSED:
                    return Why.PAUSED, "it is paused"
                if readiness is Readiness.DRAINING and not await self._lingers(url):
                    return Why.LEAVING, "it is leaving"
                await self._canary(url, run)
        except TimeoutError:
            return Why.STALLED, f"no generation within {_TRY_SECONDS:g} s"
        except Fault as problem:
            if problem.kind is FaultKind.QUEUE_FULL and readiness is not Readiness.LOADING:  # others keep it busy
                return None
            return Why.UNAVAILABLE if problem.pressure else Why.DIED, problem.detail
        return None

    async def _canary(self, url: str, run: RunManifest) -> None:
        """One real generation; raises the Fault that prevents it. Whoever leads the probe leads it till then."""
        names = _keys(url)
        if url in self._open:
            await self._lead_probe(url, _TRIAL_TTL_MS)
        await self._courier.command("HSET", names.control, "trial", 1)
        try:
            await self._client.canary(url, run.sampling, vocab_size=run.output_vocab_size)
        finally:
            await asyncio.shield(self._courier.command("HDEL", names.control, "trial"))

    async def _lingers(self, url: str) -> bool:
        """Whether it says that it is leaving, has nothing to do, and does not go: then its word counts no more."""
        try:
            loads = await self._client.loads(url)
        except Fault:
            return False
        if loads is not None and (loads.running or loads.waiting):
            self._idle_since.pop(url, None)
            return False
        if time.monotonic() - self._idle_since.setdefault(url, time.monotonic()) < _LINGER_SECONDS:
            return False
        del self._idle_since[url]
        log.warning("health_lies %s: it says that it is leaving, and stays", url)
        await self._courier.command("HDEL", _keys(url).control, "ready")
        return True

    async def open(self, url: str, evidence: str, *, why: Why = Why.DIED, explains: bool = False) -> None:
        """Open the breaker for all workers. explains: this evidence says more than that of an open breaker."""
        evidence = evidence.replace(f", at {url}", "")  # whoever shows it names the endpoint
        self._open.setdefault(url, Breaker(time.time(), evidence, why))
        if await self._courier.script(*opening(url, why, evidence, replaces=explains)):
            log.warning("endpoint_open %s: %s", url, evidence)

    async def _learn(self, url: str) -> None:
        try:
            info = await self._client.info(url)
        except Fault as fault:
            self._problems[url] = fault
            if fault.kind is not FaultKind.TIMEOUT:  # busy, perhaps: what it says of itself waits behind its work
                await self.open(url, fault.detail, why=Why.UNAVAILABLE if fault.pressure else Why.DIED)
            return
        self._problems.pop(url, None)
        run = self._runs.get(url)
        if run is None:  # left meanwhile
            return
        if sentence := objection(run.server, run.required, info.identity) or info.drops(run.sampling):
            await self.open(url, sentence, why=Why.DIFFERS, explains=True)
            return
        self._info[url] = info
        await self._courier.command("SET", _keys(url).info, orjson.dumps(info))

    async def _probe(self, url: str) -> None:
        """Half-open, again and again: probe until a real generation comes back. One worker does so for all."""
        for attempt in range(1_000_000_000):
            breaker = self._open.get(url)
            if breaker is None or breaker.why is Why.DRAINED or url not in self._runs:
                return
            if not await self._lead_probe(url, _PROBE_TTL_MS):
                return
            if await self._answers(url, breaker):
                told = await self._courier.script(*closing(url))
                self._found_back(url)
                if told:
                    log.warning("endpoint_closed %s: it answers again", url)
                await self._lead_probe(url, 1)
                return
            await self._pause(url, _PROBE_SECONDS[min(attempt, len(_PROBE_SECONDS) - 1)], time.time() - breaker.since)

    async def _pause(self, url: str, seconds: float, away_seconds: float) -> None:
        """Until the next probe; where nobody listens, until somebody does, if that is sooner."""
        until = time.monotonic() + seconds
        refused = not await listens(url)
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, max(_KNOCK_LEAST_SECONDS, away_seconds * _KNOCK_SHARE)) if refused else left)
            if refused and await listens(url):
                return

    async def _lead_probe(self, url: str, ttl_ms: int) -> bool:
        return bool(await self._courier.script("lead", [_keys(url).probe], [self._name, ttl_ms]))

    async def _answers(self, url: str, breaker: Breaker) -> bool:
        problem = await self._try(url)
        if problem is None:
            self._info.pop(url, None)
            await self._learn(url)
            return url in self._info
        why, sentence = problem
        log.info("probe_failed %s: %s", url, sentence)
        if why is not breaker.why:
            await self.open(url, sentence, why=why, explains=True)
        return False


def _keys(url: str) -> EndpointKeys:
    return EndpointKeys(endpoint_key(url))

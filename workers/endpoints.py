"""What this worker knows of endpoints: what they said of themselves, and whether their breaker is open.

The breaker's state lies in Redis and is shared by all workers and runs; lease.lua grants nothing at an open endpoint.
An endpoint that refuses or resets is left alone and probed; it is used again when a real generation comes back.
"""

import asyncio
import logging
import time

import orjson

from app.drift import drift, guarded, objection
from app.manifest import RunManifest
from app.sglang.client import Readiness, SGLangClient
from app.sglang.faults import Fault, FaultKind
from app.sglang.wire import EndpointInfo
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_PROBE_TTL_MS = 30_000
_PROBE_SECONDS = (0.5, 1.0, 2.0, 3.0)
_TRY_SECONDS = _PROBE_TTL_MS / 1000 - 5
_SAYS_NOTHING_ABOUT_HEALTH = (FaultKind.QUEUE_FULL, FaultKind.LOCAL_RESOURCES, FaultKind.BAD_IDS, FaultKind.TOO_LONG,
                              FaultKind.REFUSED)  # fmt: skip


class Endpoints:
    """The endpoints of all runs this worker has seen."""

    def __init__(self, courier: Courier, client: SGLangClient, name: str):
        self._courier, self._client, self._name = courier, client, name
        self._runs: dict[str, RunManifest] = {}  # url → a run that uses it (for the canary's parameters)
        self._info: dict[str, EndpointInfo] = {}
        self._problems: dict[str, Fault] = {}
        self._open: set[str] = set()
        self._served_at: dict[str, float] = {}
        self._checks: dict[str, asyncio.Task] = {}
        self._probes: dict[str, asyncio.Task] = {}
        self._seen_at: dict[str, float] = {}  # url → when a look began that found the run's model there
        self._looks: dict[str, asyncio.Task] = {}

    def use(self, run: RunManifest) -> None:
        """Learn the endpoints of a run."""
        for url in run.endpoints:
            self._runs[url] = run

    def info(self, url: str) -> EndpointInfo | None:
        """What the endpoint said of itself; None until it was asked."""
        return self._info.get(url)

    async def known(self, url: str) -> EndpointInfo:
        """What the endpoint said of itself, asked now if it was never asked. Raises Fault if it can't be used."""
        if url not in self._info:
            self._start(url, self._learn(url))
            await asyncio.shield(self._probes[url])
        if url not in self._info:
            raise self._problems.get(url) or Fault(FaultKind.UNAVAILABLE, f"{url} cannot be used now")
        return self._info[url]

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
        answers since the last good look are given up.
        """
        while self._seen_at.get(url, 0.0) <= sent_at:
            look = self._looks.get(url)
            if look is None:
                look = self._looks[url] = asyncio.create_task(self._see(url))
            await asyncio.shield(look)

    async def _see(self, url: str) -> None:
        began = time.monotonic()
        try:
            found = await self._client.serves(url)
        except Fault as fault:
            raise Fault(FaultKind.UNCONFIRMED, f"{FaultKind.UNCONFIRMED.sentence}: {fault.detail}") from fault
        finally:
            del self._looks[url]  # before any waiter goes on: the next one needs a look of its own
        if change := drift(self._runs[url].server, guarded(found.identity)):
            raise Fault(FaultKind.ANOTHER_MODEL, f"another model answers there: {change}").at(url)
        self._seen_at[url] = began

    async def after_fault(self, url: str, fault: Fault, started_at: float) -> bool:
        """Take a fault as evidence. Returns whether the endpoint goes on serving others (the row may be to blame).

        started_at: time.monotonic() at which the failed attempt was sent.
        """
        if fault.kind in _SAYS_NOTHING_ABOUT_HEALTH:
            return self._served_at.get(url, 0.0) > started_at
        self._info.pop(url, None)  # whoever answers there next may be somebody else: asked before anything is sent
        if fault.kind is FaultKind.UNREACHABLE:
            await self.open(url, fault.detail)
            return False
        check = self._checks.get(url)
        if check is None:
            check = self._checks[url] = asyncio.create_task(self._check(url, fault))
            check.add_done_callback(lambda _: self._checks.pop(url, None))
        return await asyncio.shield(check)

    async def look(self) -> None:
        """Once a second: read the shared breakers, ask new endpoints about themselves, probe open ones."""
        urls = list(self._runs)
        if not urls:
            return
        states = await asyncio.gather(*(self._courier.command("GET", _keys(url).open) for url in urls))
        for url, state in zip(urls, states, strict=True):
            if state is None:
                if url in self._open:  # another worker found it back; who it is now, we ask ourselves
                    self._open.discard(url)
                    self._info.pop(url, None)
                if url not in self._info:
                    self._start(url, self._learn(url))
            else:
                self._open.add(url)
                self._start(url, self._probe(url))

    async def run_forever(self) -> None:
        """Look every second."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def _start(self, url: str, coroutine) -> None:
        if url in self._probes:
            coroutine.close()
            return
        task = self._probes[url] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._probes.pop(url, None))

    async def _check(self, url: str, fault: Fault) -> bool:
        """Is it the endpoint or the request? One look, one real generation, for all who just failed there."""
        readiness, problem = await self._try(url)
        if problem is None:
            await self._learn(url)
            return url in self._info
        await self.open(url, f"{fault.detail}; then {problem}", loading=readiness is Readiness.LOADING)
        return False

    async def _try(self, url: str) -> tuple[Readiness, str | None]:
        """Readiness, and what keeps the endpoint from generating (None: nothing does)."""
        readiness = Readiness.UNKNOWN
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                readiness = await self._client.is_ready(url, was_ready=url in self._info)
                if readiness not in (Readiness.READY, Readiness.UNKNOWN):
                    return readiness, f"it is {readiness}"
                run = self._runs[url]
                await self._client.canary(url, run.sampling, vocab_size=run.output_vocab_size)
                return readiness, None
        except Fault as problem:
            return readiness, problem.detail
        except TimeoutError:
            return readiness, f"no generation within {_TRY_SECONDS:g} s"

    async def open(self, url: str, evidence: str, *, loading: bool = False, differs: bool = False) -> None:
        """Open the breaker for all workers. differs: another model is there; that says more than other evidence."""
        self._open.add(url)
        evidence = evidence.replace(f", at {url}", "")  # whoever shows it names the endpoint
        state = {"since": time.time(), "evidence": evidence, "loading": loading}
        state |= {"why": "differs"} if differs else {}
        fresh = await self._courier.command("SET", _keys(url).open, orjson.dumps(state), "NX")
        if not fresh and differs:
            known = orjson.loads(await self._courier.command("GET", _keys(url).open) or b"{}")
            if known.get("evidence") == evidence:
                return
            state["since"] = known.get("since", state["since"])
            await self._courier.command("SET", _keys(url).open, orjson.dumps(state))
        if fresh or differs:
            log.warning("endpoint_open %s: %s", url, evidence)

    async def _learn(self, url: str) -> None:
        try:
            info = await self._client.info(url)
        except Fault as fault:
            self._problems[url] = fault
            await self.open(url, fault.detail)
            return
        self._problems.pop(url, None)
        run = self._runs[url]
        if sentence := objection(run.server, run.required, info.identity):
            await self.open(url, sentence, differs=True)
            return
        self._info[url] = info
        await self._courier.command("SET", _keys(url).info, orjson.dumps(info))

    async def _probe(self, url: str) -> None:
        """Probe an open endpoint until it answers a real generation; one worker at a time does so."""
        attempt = 0
        while url in self._open:
            mine = await self._courier.command("SET", _keys(url).probe, self._name, "NX", "PX", _PROBE_TTL_MS)
            if not mine:
                return
            try:
                if await self._answers(url):
                    await self._close(url)
                    return
            finally:
                await self._courier.command("DEL", _keys(url).probe)
            await asyncio.sleep(_PROBE_SECONDS[min(attempt, len(_PROBE_SECONDS) - 1)])
            attempt += 1

    async def _answers(self, url: str) -> bool:
        readiness, problem = await self._try(url)
        if problem is None:
            self._info.pop(url, None)
            await self._learn(url)
            return url in self._info
        log.info("probe_failed %s: %s", url, problem)
        await self._mark_loading(url, readiness is Readiness.LOADING)
        return False

    async def _mark_loading(self, url: str, loading: bool) -> None:
        state = orjson.loads(await self._courier.command("GET", _keys(url).open) or b"{}")
        if state and state.get("loading") != loading:
            await self._courier.command("SET", _keys(url).open, orjson.dumps({**state, "loading": loading}), "XX")

    async def _close(self, url: str) -> None:
        self._open.discard(url)
        await self._courier.command("DEL", _keys(url).open)
        log.warning("endpoint_closed %s: it answers again", url)


def _keys(url: str) -> EndpointKeys:
    return EndpointKeys(endpoint_key(url))

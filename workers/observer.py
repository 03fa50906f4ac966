"""One observer per endpoint, whichever worker leads: looks, learns, and writes what lease.lua decides by.

The arithmetic is app/capacity; here is who looks when, and which key is read and written. A second loop learns the
lengths of answers for all endpoints together. Nothing here is needed to go on: without an observer f stands still,
and after ten seconds counts as 1 at most.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain

import orjson

from app.capacity import controller
from app.capacity.lengths import bin_beyond, bin_of, first_of, learn, parse_curve
from app.capacity.peak import Forecast, Held
from app.capacity.share import Share, parse_share
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault
from app.sglang.wire import Generation, Loads
from app.store import keys
from app.store.breaker import Why
from app.store.courier import Courier
from app.store.keys import EndpointKeys
from app.urls import endpoint_key
from workers.endpoints import Endpoints
from workers.holdings import Holdings, Lease

log = logging.getLogger(__name__)
_LEARN_SECONDS = 1.0
_AWAY_TICKS = 8
_LEAD_MS = 3000
_RECALL_MS = 2000
_LENGTHS_TTL_SECONDS = 30 * 24 * 3600
_FADE = 0.98  # of what finished answers say of the pace, per look: about ten seconds count
_SMOOTHING = 0.3
_COUNTERS = ("done_tokens", "done_ms", "done", "retractions", "refusals", "opens")


@dataclass(slots=True)
class _Seen:
    """What the observer keeps between two looks at an endpoint; another one begins anew."""

    counters: dict[str, int] = field(default_factory=dict)
    pace: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS[:3], 0.0))
    foreign: float = 0.0
    at_ms: int = 0
    stamp: float | None = None
    stamp_at: float = 0.0
    skip: int = 0


class Observer:
    """Observes the endpoints of all runs this worker has seen, where it leads, and collects what its own tasks saw."""

    def __init__(self, courier: Courier, client: SGLangClient, endpoints: Endpoints, holdings: Holdings, name: str):
        self._courier, self._client, self._endpoints = courier, client, endpoints
        self._holdings, self._name = holdings, name
        self._back = asyncio.Event()
        endpoints.when_back.append(self._back.set)
        self._looks: dict[str, asyncio.Task] = {}
        self._seen: dict[str, _Seen] = {}
        self._aborts: set[asyncio.Task] = set()
        self._counts: dict[tuple[str, str], int] = defaultdict(int)  # (HASH, field) → to be added in Redis

    def answered(self, lease: Lease, generation: Generation, latency: float) -> None:
        """A request was answered: its pace and retractions count from the next look on. latency in seconds."""
        control, tokens = EndpointKeys(lease.endpoint).control, generation.num_output_tokens
        self._counts[control, "done"] += 1
        self._counts[control, "done_tokens"] += tokens
        self._counts[control, "done_ms"] += round(latency * 1000)
        retractions = generation.meta_info.get("num_retractions")
        if type(retractions) is int and retractions > 0:
            self._counts[control, "retractions"] += retractions

    def ended(self, kind: str, tokens: int, *, cut: bool) -> None:
        """An answer, or a later stage of one, ended at that length; cut: what it was allowed ended it, and it would
        have gone on."""
        self._counts[keys.lengths(kind), str(bin_beyond(tokens) if cut else bin_of(tokens))] += 1

    def refused(self, lease: Lease) -> None:
        """The endpoint's own queue was full (503)."""
        self._counts[EndpointKeys(lease.endpoint).control, "refusals"] += 1

    async def run_forever(self) -> None:
        """Look at each endpoint four times a second, at one that is away seldom; one that hangs holds up no other."""
        learner = asyncio.create_task(self._learn_forever())
        try:
            for tick in itertools.count():
                if learner.done():
                    break
                self._flush()
                urls = self._endpoints.urls
                away = urls != [] and all(map(self._endpoints.is_open, urls))
                for url in urls:
                    done = url not in self._looks or self._looks[url].done()
                    if done and (away or tick % _AWAY_TICKS == 0 or not self._endpoints.is_open(url)):
                        self._looks[url] = asyncio.create_task(self._look(url))
                self._back.clear()
                with contextlib.suppress(TimeoutError):  # wait_for (Python 3.11) takes a cancellation for a wake
                    async with asyncio.timeout(controller.LOOK_SECONDS * (_AWAY_TICKS if away else 1)):
                        await self._back.wait()
            learner.result()
        finally:
            for task in [learner, *self._looks.values()]:
                task.cancel()

    def _flush(self) -> None:
        """Hand over what was counted; nobody waits for it."""
        counts, self._counts = self._counts, defaultdict(int)
        for (key, name), number in counts.items():
            self._send("HINCRBY", key, name, number)
        for key in {key for key, _ in counts if key.startswith(keys.lengths(""))}:
            self._send("EXPIRE", key, _LENGTHS_TTL_SECONDS)

    def _send(self, *command: object) -> None:
        asyncio.ensure_future(self._courier.command(*command)).add_done_callback(_consume)

    # one look at one endpoint

    async def _look(self, url: str) -> None:
        names = EndpointKeys(endpoint_key(url))
        recalled, leads = await asyncio.gather(
            self._courier.command("GET", names.recalled),
            self._courier.script("lead", [names.observer], [self._name, _LEAD_MS]),
        )
        self._take_back(set((recalled or b"").decode().split()))
        if not leads:
            self._seen.pop(url, None)
            return
        seen = self._seen.setdefault(url, _Seen())
        idle, seen.skip = seen.skip > 0, seen.skip - 1
        if idle:
            return
        loads = None if self._endpoints.is_open(url) else await self._loads(url)
        shares, control, state, opened, clock = await asyncio.gather(
            self._courier.command("HGETALL", names.lease_info),
            self._courier.command("HGETALL", names.control),
            self._courier.command("GET", names.learned),
            self._courier.command("EXISTS", names.open),
            self._courier.command("TIME"),
        )
        now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
        await self._conclude(url, names, seen, loads, _pairs(shares), _pairs(control), state, bool(opened), now_ms)

    async def _loads(self, url: str) -> Loads | None:
        try:
            return await self._client.loads(url)
        except Fault:
            return None  # the breaker hears of faults from those who generate

    async def _conclude(
        self, url: str, names: EndpointKeys, seen: _Seen, loads: Loads | None, shares: dict[str, bytes],
        control: dict[str, bytes], state_json: bytes | None, opened: bool, now_ms: int,
    ) -> None:  # fmt: skip
        """From what was read to what is written."""
        fresh = _deltas(seen, control)
        rate = _rate(seen, loads, float(control.get("rate", 0)))
        held = {name: parse_share(share) for name, share in shares.items()}
        seen.foreign = _foreign(seen, loads, held.values(), now_ms, rate)
        observation = self._observation(url, seen, loads, held, now_ms, fresh, control, opened)
        if observation.use >= controller.USE_AIM:
            ending = await self._ending_tokens(held.values(), now_ms, rate)
            observation = dataclasses.replace(observation, ending_tokens=ending)
        state = _state(state_json)
        now = time.time()
        recall = self._to_recall(observation, held, now_ms, rate)
        state = controller.observe(state, observation, now)
        limits = controller.ceilings(state, now)
        busy = held or observation.wanted or opened or self._endpoints.grows  # an open one is looked at seldom anyway
        seen.skip = 0 if busy else 3
        seen.at_ms = now_ms
        figures = {
            "f": f"{limits.f:.4f}", "rate": f"{rate:.6f}", "foreign": round(seen.foreign), "requests": limits.requests,
            "tokens": limits.tokens, "at": now_ms, "running": _told(observation.running),
            "waiting": _told(observation.waiting), "used": _told(observation.used_tokens),
        }  # fmt: skip
        commands = [
            self._courier.command("HSET", names.control, *chain.from_iterable(figures.items())),
            self._courier.command("SET", names.learned, orjson.dumps(state)),
        ]
        if recall:
            log.warning("requests_recalled %d from %s: its pool is about to be full", len(recall), url)
            commands.append(self._courier.command("SET", names.recalled, " ".join(recall), "PX", _RECALL_MS))
            self._take_back(set(recall))
        await asyncio.gather(*commands)

    def _observation(
        self, url: str, seen: _Seen, loads: Loads | None, held: dict[str, Share], now_ms: int, fresh: dict[str, int],
        control: dict[str, bytes], opened: bool,
    ) -> controller.Observation:  # fmt: skip
        info, pace = self._endpoints.info(url), seen.pace
        eldest_ms = min((share.granted_ms for share in held.values()), default=now_ms)
        told = {} if loads is None else {
            "running": loads.running, "waiting": loads.waiting, "used_tokens": loads.used_tokens,
            "throughput": loads.gen_throughput, "stale_seconds": _stale_seconds(seen, loads),
        }  # fmt: skip
        return controller.Observation(
            open=opened or fresh["opens"] > 0, died=Why(control.get("why", b"died").decode()).is_death,
            leases=len(held), eldest_seconds=(now_ms - eldest_ms) / 1000,
            wanted=int(control.get("wanted", 0)) > seen.at_ms > 0,
            kv_tokens=(loads and loads.capacity_tokens) or (info and info.kv_tokens) or None,
            retractions=fresh["retractions"], refusals=fresh["refusals"], answers=fresh["done"],
            generation_seconds=pace["done_ms"] / pace["done"] / 1000 if pace["done"] else 10.0, **told,
        )  # fmt: skip

    # taking requests back

    async def _ending_tokens(self, shares: Collection[Share], now_ms: int, rate: float) -> float:
        """What those of our requests that end soon give back at the least."""
        kinds = sorted({share.kind for share in shares})
        known = await self._courier.command("HMGET", keys.EXPECTED, *kinds) if kinds else []
        curves = {kind: parse_curve(text.decode()) for kind, text in zip(kinds, known, strict=True) if text}
        made = [(share, share.made(now_ms, rate)) for share in shares]
        held = [Held(s.prompt_tokens + m, m, s.allowance, curves.get(s.kind)) for s, m in made]
        return Forecast(held).freed_within(controller.RELIEF_SECONDS * 1000 * rate)

    def _to_recall(self, seen: controller.Observation, held: dict[str, Share], now_ms: int, rate: float) -> list[str]:
        leases = ((s.granted_ms, s.prompt_tokens + s.made(now_ms, rate), name) for name, s in held.items())
        return controller.to_recall(leases, controller.overflow_tokens(seen), seen.waiting or 0)

    def _take_back(self, recalled: set[str]) -> None:
        """Abort our requests among those recalled: each is answered as aborted, and leases again, uncharged."""
        for work in list(self._holdings.claims.values()) if recalled else ():
            if work.lease is not None and work.lease.id in recalled:
                work.recalled = True
                abort = asyncio.create_task(self._client.abort(work.lease.url, work.rid))
                self._aborts.add(abort)
                abort.add_done_callback(self._aborts.discard)

    # lengths

    async def _learn_forever(self) -> None:
        while True:
            if await self._courier.script("lead", [keys.LEARNER], [self._name, _LEAD_MS]):
                await self._learn()
            await asyncio.sleep(_LEARN_SECONDS)

    async def _learn(self) -> None:
        """Curves for every kind of task that is at an endpoint now."""
        running: dict[str, list[float]] = defaultdict(list)
        allowance: dict[str, int] = defaultdict(int)
        clock = await self._courier.command("TIME")
        now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
        for url in self._endpoints.urls:
            if self._endpoints.is_open(url):
                continue
            names = EndpointKeys(endpoint_key(url))
            shares, rate = await asyncio.gather(
                self._courier.command("HVALS", names.lease_info), self._courier.command("HGET", names.control, "rate")
            )
            for share in map(parse_share, shares):
                running[share.kind].append(share.made(now_ms, float(rate or 0)))
                allowance[share.kind] = max(allowance[share.kind], share.allowance)
        for kind in [kind for kind in running if first_of(kind)]:  # whoever is in a later stage got through the first
            first, stage = first_of(kind), allowance[kind]
            allowance[first] = max(allowance[first], stage)
            running[first] += [allowance[first]] * len(running[kind])
        for kind, made in running.items():
            finished = _pairs(await self._courier.command("HGETALL", keys.lengths(kind)))
            curve = learn({int(name): int(number) for name, number in finished.items()}, made, allowance[kind])
            if curve is not None:
                self._send("HSET", keys.EXPECTED, kind, curve.dump())


def _pairs(reply: object) -> dict[str, bytes]:
    """HGETALL through execute_command: a dict, or a flat list, of bytes."""
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {name.decode(): value for name, value in items}


def _consume(future: asyncio.Future) -> None:
    """Counts that Redis refused are lost: they are estimates. Connection trouble never comes here (see Courier)."""
    if not future.cancelled() and future.exception() is not None:
        log.warning("capacity_count_lost: %s", future.exception())


def _deltas(seen: _Seen, control: dict[str, bytes]) -> dict[str, int]:
    """What the workers counted since the last look; the pace fades."""
    counters = {name: int(control.get(name, 0)) for name in _COUNTERS}
    before, seen.counters = seen.counters or counters, counters
    fresh = {name: max(0, counters[name] - before[name]) for name in _COUNTERS}
    for name in seen.pace:
        seen.pace[name] = seen.pace[name] * _FADE + fresh[name]
    return fresh


def _rate(seen: _Seen, loads: Loads | None, before: float) -> float:
    """Tokens per millisecond of one request: by finished answers, else as the endpoint says, else as before."""
    if seen.pace["done"] >= 2 and seen.pace["done_ms"] > 0:
        return seen.pace["done_tokens"] / seen.pace["done_ms"]
    if before > 0 or loads is None or not loads.gen_throughput or not loads.running:
        return before
    return loads.gen_throughput / loads.running / 1000


def _foreign(seen: _Seen, loads: Loads | None, shares: Iterable[Share], now_ms: int, rate: float) -> float:
    """Tokens in use beyond what our leases should hold: other clients' requests, and what we underestimate.

    At the first look all of them: a Redis that forgot who holds what admits by this figure soon.
    """
    if loads is None:
        return seen.foreign
    ours = sum(share.prompt_tokens + share.made(now_ms, rate) for share in shares)
    weight = _SMOOTHING if seen.at_ms else 1.0
    return max(0.0, seen.foreign + weight * (loads.used_tokens - ours - seen.foreign))


def _stale_seconds(seen: _Seen, loads: Loads) -> float:
    """How long its figures have not been renewed while it says that it runs something. By our clock alone."""
    now = time.monotonic()
    if loads.timestamp is None or loads.timestamp != seen.stamp or not loads.running:
        seen.stamp, seen.stamp_at = loads.timestamp, now
    return now - seen.stamp_at


def _state(text: bytes | None) -> controller.State:
    """What an observer before us learned; from the beginning if an older version wrote it."""
    if not text:
        return controller.State()
    with contextlib.suppress(KeyError, TypeError):
        return controller.restored(orjson.loads(text))
    return controller.State()


def _told(figure: int | None) -> int:
    return -1 if figure is None else figure

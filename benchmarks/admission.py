"""Headrace's admission, played: several workers against several endpoints, without a socket.

Plays the rules of app/capacity against the simulated scheduler, faster than real time: benchmarks/saturation.py
compares them with feeding everything at once and with fixed numbers, benchmarks/staged.py answers in stages with whole
ones. A deadly endpoint dies above 100 running or on a full pool.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from app.capacity import controller
from app.capacity.lengths import Curve, bin_beyond, bin_of, learn
from app.capacity.peak import Forecast, Held
from app.sglang.simulator.engine import Engine, EngineConfig, Request

KV_TOKENS, MAX_NEW_TOKENS = 231_120, 8192
#: Lengths of answers, log-normal: mu and sigma of their logarithm. About 2,700, with a heavy tail, and about 150.
DISTRIBUTIONS = {"normal": (7.9, 0.45), "heavy": (7.5, 1.0), "short": (5.0, 0.5)}
DOWN_SECONDS = 10.0
#: Times of steps and prefill: the simulator's own, which are an H200's with a 1.7B model; those of the study behind
#: docs/decisions/0003; and those of a large mixture of experts.
TIMES = {
    "h200": {},
    "study": {"step_seconds": 0.002, "step_seconds_per_request": 1e-5, "step_seconds_per_token": 0.0,
              "prefill_tokens_per_second": 60_000.0},
    "weights": {"step_seconds": 0.025, "step_seconds_per_token": 2e-9, "prefill_tokens_per_second": 20_000.0},
}  # fmt: skip


@dataclass
class Result:
    """What one play came to."""

    seconds: float = 0.0
    died: int = 0
    recalled: int = 0
    retractions: int = 0
    peak_running: int = 0
    fullest: float = 0.0
    mean_use: float = 0.0


def jobs(count: int, mu: float, sigma: float, seed: int) -> list[Request]:
    """Prompts of 500-1,800 tokens, answers of log-normal lengths."""
    rnd = random.Random(seed)

    def one(number: int) -> Request:
        prompt, tokens = rnd.randint(500, 1800), int(rnd.lognormvariate(mu, sigma))
        return Request(f"{number:06d}", prompt, MAX_NEW_TOKENS, min(MAX_NEW_TOKENS, max(2, tokens)))

    return [one(number) for number in range(count)]


def count(lengths: dict[int, int], tokens: int, *, cut: bool) -> None:
    """One more answer that ended at that length, as the observer counts them."""
    number = bin_beyond(tokens) if cut else bin_of(tokens)
    lengths[number] = lengths.get(number, 0) + 1


class Site:
    """One endpoint as the observer that leads there sees it; `slow` times as slow as the others."""

    def __init__(self, config: EngineConfig, slow: float = 1.0):
        self.config, self.engine, self.slow = config, Engine(config), slow
        self.engine.slow = slow
        self.held: dict[Request, float] = {}  #: request → granted at
        self.state = controller.State()
        self.rate, self.foreign, self.pace = 0.0, 0.0, [0.0, 0.0, 0.0]
        self.wanted, self.retractions, self.answers, self.back_at = False, 0, 0, 0.0
        self.recall: list[Request] = []

    def made(self, request: Request, now: float) -> float:
        """Tokens it has made by now, as far as Redis knows."""
        return max(0.0, min(self.rate * (now - self.held[request]), request.max_new_tokens - 1))

    def answered(self, request: Request, now: float) -> None:
        """Its pace counts."""
        seconds = now - self.held.pop(request)
        self.pace = [a + b for a, b in zip(self.pace, (1, request.made, seconds), strict=True)]
        self.answers += 1

    def learn_pace(self, now: float) -> None:
        """As at each look of an observer."""
        self.pace = [figure * 0.98 for figure in self.pace]
        if self.pace[0] > 2:
            self.rate = self.pace[1] / self.pace[2]
        elif self.engine.running:
            self.rate = self.engine.throughput() / len(self.engine.running)
        ours = sum(request.prompt_tokens + self.made(request, now) for request in self.held)
        self.foreign = max(0.0, self.foreign + 0.3 * (self.engine.used_tokens - ours - self.foreign))

    def look(self, now: float, shares: list[Held]) -> float:
        """What the controller concludes; returns the share of the pool in use."""
        engine, names = self.engine, {request.rid: request for request in self.held}
        nearly_full = engine.used_tokens >= controller.USE_AIM * self.config.kv_tokens
        seen = controller.Observation(
            leases=len(self.held), wanted=self.wanted, running=len(engine.running), waiting=len(engine.waiting),
            used_tokens=engine.used_tokens, kv_tokens=self.config.kv_tokens, throughput=engine.throughput(),
            retractions=engine.counters.retractions - self.retractions, answers=self.answers,
            generation_seconds=self.pace[2] / self.pace[0] if self.pace[0] else 10.0,
            eldest_seconds=now - min(self.held.values(), default=now),
            ending_tokens=Forecast(shares).freed_within(controller.RELIEF_SECONDS * self.rate) if nearly_full else 0.0,
        )  # fmt: skip
        self.wanted, self.retractions, self.answers = False, engine.counters.retractions, 0
        leases = ((self.held[r], r.prompt_tokens + self.made(r, now), name) for name, r in names.items())
        tokens = controller.overflow_tokens(seen)
        self.recall = [names[name] for name in controller.to_recall(leases, tokens, seen.waiting)]
        self.state = controller.observe(self.state, seen, now)
        return seen.use

    def die(self, now: float) -> None:
        """It is away for a while, and has forgotten everything."""
        self.state = controller.observe(self.state, controller.Observation(open=True), now)
        self.engine, self.retractions = Engine(self.config), 0
        self.engine.clock = self.back_at = now + DOWN_SECONDS
        self.engine.slow = self.slow


@dataclass(slots=True)
class Asker:
    """A worker that asks for leases in its own time (workers/admission.py)."""

    number: int
    at: float = 0.0  #: when it asks next
    ask: int = 8
    poll: float = 0.1


class Play:
    """Workers against endpoints: leases by predicted peak; lengths, pace and f learned from looks.

    slow: how much slower each endpoint is. workers: 0: one, which asks whenever something ends, without delay; else
    each gathers for some milliseconds, asks for at most 64, and hears of what came free at others by asking again.
    """

    def __init__(
        self, work: list[Request], admission: str, *, deadly: bool = False, kv_tokens: int = KV_TOKENS,
        allowance: int = MAX_NEW_TOKENS, slow: Sequence[float] = (1.0,), workers: int = 0, **pace: float,
    ):  # fmt: skip
        self.config = EngineConfig(kv_tokens=kv_tokens, max_running=4096, admission=admission, **pace)
        self.sites, self.deadly, self.allowance = [Site(self.config, one) for one in slow], deadly, allowance
        self.askers = [Asker(number) for number in range(workers)]
        self.asker_of: dict[Request, Asker] = {}
        self.now, self.todo = 0.0, deque(work)
        self.finished: dict[int, int] = {}
        self.curve: Curve | None = None
        self.uses: list[float] = []
        self.result = Result()

    def run(self) -> Result:
        """Play until all is done."""
        next_look, sites = 0.0, self.sites
        while self.todo or any(site.held for site in sites):
            asks = [asker.at for asker in self.askers if self.todo]
            events = [event for site in sites if (event := site.engine.next_event()) is not None]
            self.now = max(self.now, min([next_look, *events, *asks]))
            for site in sites:
                for request in site.engine.advance(self.now):
                    self._over(site, request)
                if self.deadly and (len(site.engine.running) > 100 or site.engine.counters.pool_full):
                    self._die(site)
            if self.now >= next_look:
                next_look = self.now + controller.LOOK_SECONDS
                self._look()
            self._ask_all()
            self.result.peak_running = max(self.result.peak_running, *(len(site.engine.running) for site in sites))
        counters = [site.engine.counters for site in sites]
        self.result.seconds, self.result.retractions = self.now, sum(one.retractions for one in counters)
        self.result.fullest = max(one.peak_used_tokens for one in counters) / self.config.kv_tokens
        self.result.mean_use = sum(self.uses) / len(self.uses)
        return self.result

    def _over(self, site: Site, request: Request) -> None:
        asker = self.asker_of.pop(request, None)
        if asker is not None:
            asker.at = min(asker.at, self.now + self._gather_seconds(asker))
        if request.outcome != "done":
            return self._again(site, request)
        site.answered(request, self.now)
        return self._done(request)

    def _done(self, request: Request) -> None:
        count(self.finished, request.made, cut=request.made == request.max_new_tokens)

    def _curve(self, request: Request) -> Curve | None:
        return self.curve

    def _again(self, site: Site, request: Request) -> None:
        request.made, request.serial, request.base, request.prefilled, request.outcome = 0, 0, 0, 0.0, ""
        del site.held[request]
        self.todo.appendleft(request)

    def _die(self, site: Site) -> None:
        self.result.died += 1
        for request in list(site.held):
            self._again(site, request)
        site.die(self.now)

    # asking

    def _ask_all(self) -> None:
        if not self.askers:
            self._ask(None, len(self.todo))
        for asker in self.askers:
            if asker.at <= self.now and self.todo:
                wanted = min(asker.ask, len(self.todo))
                granted = self._ask(asker, wanted)
                self._next_ask(asker, wanted, granted)

    def _next_ask(self, asker: Asker, wanted: int, granted: int) -> None:
        asker.ask = min(64, asker.ask * 2) if granted == wanted else max(8, granted * 2)
        poll = 0.1 if granted else asker.poll
        asker.poll = min(1.0, poll * 2)
        asker.at = self.now + (0.0 if granted == wanted else poll) + self._gather_seconds(asker)

    def _gather_seconds(self, asker: Asker) -> float:
        return 0.003 + 0.00002 * sum(one is asker for one in self.asker_of.values())

    def _ask(self, asker: Asker | None, wanted: int) -> int:
        """One decision about so many, eldest first; returns how many were granted."""
        places = [_Place(site, self._shares(site), self.now, self._newest()) for site in self.sites] if wanted else []
        for granted in range(wanted):
            request = self.todo[0]
            newcomer = Held(request.prompt_tokens, 0, request.max_new_tokens, self._curve(request))
            rooms = [place.room(newcomer) for place in places]
            if max(rooms) < 0:
                return granted
            best = places[rooms.index(max(rooms))]
            best.take(newcomer)
            best.site.held[self.todo.popleft()] = self.now
            if asker is not None:
                self.asker_of[request] = asker
            best.site.engine.submit(self.now, request)
        return wanted

    def _newest(self) -> Held:
        return Held(0, 0, self.allowance, self.curve)

    def _shares(self, site: Site) -> list[Held]:
        made = [(request, site.made(request, self.now)) for request in site.held]
        return [Held(r.prompt_tokens + m, m, r.max_new_tokens, self._curve(r)) for r, m in made]

    # looking

    def _look(self) -> None:
        sites = [site for site in self.sites if self.now >= site.back_at]
        for site in sites:
            for request in site.recall:  # what the look before decided: workers hear of it now
                if request in site.held:
                    site.engine.abort(self.now, request.rid)
                    self.result.recalled += 1
            site.learn_pace(self.now)
        self._learn()
        uses = [site.look(self.now, self._shares(site)) for site in sites]
        if self.todo:
            self.uses += uses

    def _learn(self) -> None:
        made = [site.made(request, self.now) for site in self.sites for request in site.held]
        self.curve = learn(self.finished, made, self.allowance)


class _Place:
    """An endpoint in one decision, as lease.lua weighs it."""

    def __init__(self, site: Site, shares: list[Held], now: float, newest: Held):
        self.site, self.limits = site, controller.ceilings(site.state, now)
        self.forecast = Forecast(shares, [newest])
        self.held = sum(share.tokens for share in shares) + site.foreign
        self.away = now < site.back_at

    def room(self, newcomer: Held) -> float:
        """Free share if it joined; below 0: it does not."""
        site, limits = self.site, self.limits
        if self.away or (site.held and 0 <= limits.requests <= len(site.held)):
            return -1.0
        budget = limits.f * site.config.kv_tokens
        peak = self.forecast.peak_with(newcomer) + site.foreign
        if site.held and (peak > budget or 0 <= limits.tokens < self.held + newcomer.tokens):
            site.wanted = True
            return -1.0
        return max(0.0, 1 - peak / budget)

    def take(self, newcomer: Held) -> None:
        """It joins."""
        self.forecast.add(newcomer)
        self.held += newcomer.tokens

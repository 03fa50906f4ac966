"""What admission by predicted peak costs or saves against feeding everything at once, without tuning.

    python benchmarks/admission.py [PROMPTS]

Plays the pure rules (app/capacity) against the simulated scheduler, faster than real time: three distributions of
lengths, the server's reserve rule and free space; then an endpoint that dies above 100 running or on a full pool.
"""

import random
import sys
from collections import deque
from dataclasses import dataclass, field

from app.capacity import controller
from app.capacity.lengths import Curve, bin_of, learn, remaining
from app.capacity.peak import Forecast
from app.sglang.simulator.engine import Engine, EngineConfig, Request

KV_TOKENS, MAX_NEW_TOKENS = 231_120, 8192
LOOK_SECONDS = 0.5
DISTRIBUTIONS = {"2,700 ± 45 %": (7.9, 0.45), "heavy tail": (7.5, 1.0), "short, 150": (5.0, 0.5)}


@dataclass
class Result:
    """What one play came to."""

    seconds: float
    engine: Engine
    died: int = 0
    peak_running: int = 0
    mean_use: float = 0.0
    f: list[tuple[float, float]] = field(default_factory=list)


def jobs(count: int, mu: float, sigma: float, seed: int = 5) -> list[Request]:
    """Prompts of 500-1,800 tokens, answers of log-normal lengths."""
    rnd = random.Random(seed)
    return [
        Request("", rnd.randint(500, 1800), MAX_NEW_TOKENS, min(MAX_NEW_TOKENS, max(2, int(rnd.lognormvariate(mu, sigma)))))
        for _ in range(count)
    ]  # fmt: skip


def everything_at_once(work: list[Request], admission: str) -> Result:
    """The server's own rules, fed without limit."""
    engine = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission))
    for request in work:
        engine.submit(0.0, request)
    now = 0.0
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        engine.advance(now)
    return Result(now, engine, peak_running=engine.counters.peak_running)


class Client:
    """All workers together: leases by predicted peak, lengths and f learned from looks."""

    def __init__(self, work: list[Request], admission: str, deadly_running: int = 0, deadly_pool: bool = False):
        self.config = EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission)
        self.engine = Engine(self.config)
        self.todo, self.held, self.now = deque(work), {}, 0.0
        self.deadly_running, self.deadly_pool = deadly_running, deadly_pool
        self.state, self.finished, self.curve = controller.State(), {}, None
        self.rate, self.foreign, self.tokens_done, self.seconds_done = 0.0, 0.0, 0, 0.0
        self.wanted = False
        self.retractions = 0
        self.back_at = -1.0
        self.result = Result(0.0, self.engine)
        self.area = self.busy = 0.0

    def made(self, request: Request, now: float) -> float:
        return min(self.rate * max(0.0, now - self.held[request]), request.max_new_tokens - 1)

    def ask(self) -> None:
        limits = controller.ceilings(self.state, self.now)
        first = remaining(self.curve, 0, MAX_NEW_TOKENS)
        pairs = []
        for request in self.held:
            made = self.made(request, self.now)
            pairs.append((request.prompt_tokens + made, remaining(self.curve, made, request.max_new_tokens)))
        forecast = Forecast(max([first, *(left for _, left in pairs)]), pairs)
        budget = KV_TOKENS * limits.f
        held_now = sum(h for h, _ in pairs) + self.foreign
        while self.todo:
            request = self.todo[0]
            full = len(self.held) and (
                forecast.peak_with(request.prompt_tokens, first) + self.foreign > budget
                or 0 <= limits.tokens < held_now + request.prompt_tokens
                or 0 <= limits.requests <= len(self.held)
            )
            if full:
                self.wanted = True
                return
            self.todo.popleft()
            self.held[request] = self.now
            forecast.add(request.prompt_tokens, first)
            held_now += request.prompt_tokens
            self.engine.submit(self.now, request)

    def look(self) -> None:
        engine = self.engine
        if self.tokens_done > 5000:
            rate = self.tokens_done / self.seconds_done
            self.rate = rate
            self.tokens_done *= 0.9
            self.seconds_done *= 0.9
        elif engine.running:
            self.rate = engine.throughput() / len(engine.running)
        made = [self.made(r, self.now) for r in self.held]
        self.curve = learn(self.finished, made, MAX_NEW_TOKENS)
        estimate = sum(r.prompt_tokens for r in self.held) + sum(made)
        foreign = engine.used_tokens - estimate
        if len(engine.waiting) > 0: foreign = max(0, foreign)
        self.foreign += 0.3 * (foreign - self.foreign)
        mean = remaining(self.curve, 0, MAX_NEW_TOKENS)
        retr = engine.counters.retractions
        seen = controller.Observation(
            leases=len(self.held), wanted=self.wanted and bool(self.todo), running=len(engine.running),
            waiting=len(engine.waiting), used_tokens=engine.used_tokens, kv_tokens=KV_TOKENS,
            throughput=engine.throughput(), retractions=retr - self.retractions,
            generation_seconds=mean / self.rate if self.rate else 10.0,
        )  # fmt: skip
        self.retractions = retr
        self.wanted = False
        self.state = controller.observe(self.state, seen, self.now)
        if self.todo:
            self.area += seen.use
            self.busy += 1
        self.result.f.append((round(self.now, 1), round(self.state.f, 3), len(engine.running), len(engine.waiting), round(seen.use, 2), round(self.foreign)))

    def run(self) -> Result:
        next_look = 0.0
        while self.todo or self.held:
            event = self.engine.next_event()
            self.now = max(self.now, min(x for x in (event, next_look) if x is not None))
            for request in self.engine.advance(self.now):
                self.tokens_done += request.made
                self.seconds_done += request.finished - self.held.pop(request)
                self.finished[bin_of(request.made)] = self.finished.get(bin_of(request.made), 0) + 1
            if (self.deadly_running and len(self.engine.running) > self.deadly_running) or (
                self.deadly_pool and self.engine.counters.pool_full
            ):
                self.die()
            if self.now >= next_look:
                next_look = self.now + LOOK_SECONDS
                self.look()
            self.ask()
            self.result.peak_running = max(self.result.peak_running, len(self.engine.running))
        self.result.seconds, self.result.engine = self.now, self.engine
        self.result.mean_use = self.area / max(1, self.busy)
        return self.result

    def die(self) -> None:
        self.result.died += 1
        for request in list(self.held):
            request.made, request.serial, request.base, request.prefilled = 0, 0, 0, 0.0
            self.todo.appendleft(request)
        self.held.clear()
        self.state = controller.observe(self.state, controller.Observation(open=True), self.now)
        self.now += 10
        self.engine = Engine(self.config)
        self.engine.clock = self.now
        self.retractions = 0


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for admission in ("reserve", "free_space"):
        for name, (mu, sigma) in DISTRIBUTIONS.items():
            base = everything_at_once(jobs(count, mu, sigma), admission)
            mine = Client(jobs(count, mu, sigma), admission).run()
            print(f"{admission:10} {name:14} all at once {base.seconds:6.1f} s ({base.engine.counters.retractions} retr, peak {base.peak_running}), "
                  f"peak rule {mine.seconds:6.1f} s = {mine.seconds/base.seconds:.3f}, retr {mine.engine.counters.retractions}, peak {mine.peak_running}, use {mine.mean_use:.2f}, pool {mine.engine.counters.peak_used_tokens/KV_TOKENS:.3f} f {mine.f[len(mine.f)//4][1]} {mine.f[len(mine.f)//2][1]} {mine.f[-1][1]}")
    for name, (mu, sigma) in DISTRIBUTIONS.items():
      for seed in (5,6,7):
        base = everything_at_once(jobs(count, mu, sigma, seed), "reserve")
        mine = Client(jobs(count, mu, sigma, seed), "reserve", 100, True).run()
        print(f"deadly {name} {seed}: {mine.died} deaths, {mine.seconds/base.seconds:.3f} peak {mine.peak_running} pool {mine.engine.counters.peak_used_tokens/KV_TOKENS:.3f} f {mine.f[len(mine.f)//4][1]} {mine.f[len(mine.f)//2][1]} {mine.f[-1][1]}")


if __name__ == "__main__":
    main()

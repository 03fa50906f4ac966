"""What admission by predicted peak costs or saves against feeding everything at once, without tuning.

    python benchmarks/admission.py [PROMPTS] [SEEDS]

Plays the rules of app/capacity against the simulated scheduler, faster than real time: three distributions of lengths,
on a server with SGLang's reserve rule and on one that admits by free space; then on one that dies above 100 running or
on a full pool. `ratio` is wall time over that of everything at once on the same server made crash-free.
"""

import random
import sys
from collections import deque
from dataclasses import dataclass

from app.capacity import controller
from app.capacity.lengths import Curve, bin_beyond, bin_of, learn
from app.capacity.peak import Forecast, Held
from app.sglang.simulator.engine import Engine, EngineConfig, Request

KV_TOKENS, MAX_NEW_TOKENS = 231_120, 8192
DISTRIBUTIONS = {"2,700 ± 45 %": (7.9, 0.45), "heavy tail": (7.5, 1.0), "short, 150": (5.0, 0.5)}
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


def everything_at_once(work: list[Request], admission: str) -> Result:
    """The server's own rules, fed without limit."""
    engine = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission))
    for request in work:
        engine.submit(0.0, request)
    now = 0.0
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        engine.advance(now)
    return Result(now, retractions=engine.counters.retractions, peak_running=engine.counters.peak_running)


def count(lengths: dict[int, int], tokens: int, *, cut: bool) -> None:
    """One more answer that ended at that length, as the observer counts them."""
    number = bin_beyond(tokens) if cut else bin_of(tokens)
    lengths[number] = lengths.get(number, 0) + 1


class Play:
    """All workers together against one endpoint: leases by predicted peak; lengths, pace and f learned from looks."""

    def __init__(
        self, work: list[Request], admission: str, *, deadly: bool = False, kv_tokens: int = KV_TOKENS,
        allowance: int = MAX_NEW_TOKENS, **pace: float,
    ):  # fmt: skip
        self.config = EngineConfig(kv_tokens=kv_tokens, max_running=4096, admission=admission, **pace)
        self.engine, self.deadly, self.allowance = Engine(self.config), deadly, allowance
        self.now, self.todo, self.held = 0.0, deque(work), {}
        self.state, self.finished, self.curve = controller.State(), {}, None
        self.rate, self.foreign, self.pace = 0.0, 0.0, [0.0, 0.0, 0.0]
        self.wanted, self.retractions, self.recall, self.uses = False, 0, [], []
        self.result = Result()

    def run(self) -> Result:
        """Play until all is done."""
        next_look = 0.0
        while self.todo or self.held:
            self.now = max(self.now, min(self.engine.next_event() or next_look, next_look))
            for request in self.engine.advance(self.now):
                self._over(request)
            if self.deadly and (len(self.engine.running) > 100 or self.engine.counters.pool_full):
                self._die()
            if self.now >= next_look:
                next_look = self.now + controller.LOOK_SECONDS
                self._look()
            self._ask()
            self.result.peak_running = max(self.result.peak_running, len(self.engine.running))
        counters = self.engine.counters
        self.result.seconds, self.result.retractions = self.now, counters.retractions
        self.result.fullest = counters.peak_used_tokens / self.config.kv_tokens
        self.result.mean_use = sum(self.uses) / len(self.uses)
        return self.result

    def _made(self, request: Request) -> float:
        return max(0.0, min(self.rate * (self.now - self.held[request]), request.max_new_tokens - 1))

    def _over(self, request: Request) -> None:
        if request.outcome != "done":
            return self._again(request)
        seconds = self.now - self.held.pop(request)
        self.pace = [a + b for a, b in zip(self.pace, (1, request.made, seconds), strict=True)]
        return self._done(request)

    def _done(self, request: Request) -> None:
        count(self.finished, request.made, cut=request.made == request.max_new_tokens)

    def _curve(self, request: Request) -> Curve | None:
        return self.curve

    def _again(self, request: Request) -> None:
        request.made, request.serial, request.base, request.prefilled, request.outcome = 0, 0, 0, 0.0, ""
        del self.held[request]
        self.todo.appendleft(request)

    def _die(self) -> None:
        self.result.died += 1
        for request in list(self.held):
            self._again(request)
        self.state = controller.observe(self.state, controller.Observation(open=True), self.now)
        self.now += DOWN_SECONDS
        self.engine, self.retractions = Engine(self.config), 0
        self.engine.clock = self.now

    def _ask(self) -> None:
        if not self.todo:
            return
        limits, first = controller.ceilings(self.state, self.now), Held(0, 0, self.allowance, self.curve)
        shares = [self._share(request) for request in self.held]
        forecast, held = Forecast(shares, [first]), sum(share.tokens for share in shares) + self.foreign
        while self.todo:
            prompt = self.todo[0].prompt_tokens
            if self.held and 0 <= limits.requests <= len(self.held):
                return
            newcomer = Held(prompt, 0, self.todo[0].max_new_tokens, self._curve(self.todo[0]))
            full = forecast.peak_with(newcomer) + self.foreign > limits.f * self.config.kv_tokens
            if self.held and (full or 0 <= limits.tokens < held + prompt):
                self.wanted = True
                return
            forecast.add(newcomer)
            held += prompt
            self.held[self.todo[0]] = self.now
            self.engine.submit(self.now, self.todo.popleft())

    def _share(self, request: Request) -> Held:
        made = self._made(request)
        return Held(request.prompt_tokens + made, made, request.max_new_tokens, self._curve(request))

    def _look(self) -> None:
        engine, now = self.engine, self.now
        for request in self.recall:  # what the look before decided: workers hear of it now
            if request in self.held:
                engine.abort(now, request.rid)
                self.result.recalled += 1
        self._learn()
        seen = controller.Observation(
            leases=len(self.held), wanted=self.wanted, running=len(engine.running), waiting=len(engine.waiting),
            used_tokens=engine.used_tokens, kv_tokens=self.config.kv_tokens, throughput=engine.throughput(),
            retractions=engine.counters.retractions - self.retractions,
            generation_seconds=self.pace[2] / self.pace[0] if self.pace[0] else 10.0,
            eldest_seconds=now - min(self.held.values(), default=now), ending_tokens=self._ending_tokens(),
        )  # fmt: skip
        self.wanted, self.retractions = False, engine.counters.retractions
        names = {request.rid: request for request in self.held}
        leases = ((self.held[r], r.prompt_tokens + self._made(r), name) for name, r in names.items())
        tokens = controller.overflow_tokens(seen)
        self.recall = [names[name] for name in controller.to_recall(leases, tokens, seen.waiting)]
        self.state = controller.observe(self.state, seen, now)
        if self.todo:
            self.uses.append(seen.use)

    def _ending_tokens(self) -> float:
        if self.engine.used_tokens < controller.USE_AIM * self.config.kv_tokens:
            return 0.0
        return Forecast(map(self._share, self.held)).freed_within(controller.RELIEF_SECONDS * self.rate)

    def _learn(self) -> None:
        self.pace = [figure * 0.98 for figure in self.pace]
        if self.pace[0] > 2:
            self.rate = self.pace[1] / self.pace[2]
        elif self.engine.running:
            self.rate = self.engine.throughput() / len(self.engine.running)
        made = [self._made(request) for request in self.held]
        self.curve = learn(self.finished, made, self.allowance)
        ours = sum(request.prompt_tokens for request in self.held) + sum(made)
        self.foreign = max(0.0, self.foreign + 0.3 * (self.engine.used_tokens - ours - self.foreign))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print("server      lengths       seed  at once s (retr, peak)    ratio  died  recalled  retr  peak  use  fullest")
    for server in ("reserve", "free_space", "deadly"):
        admission = "free_space" if server == "free_space" else "reserve"
        for name, (mu, sigma) in DISTRIBUTIONS.items():
            for seed in range(5, 5 + seeds):
                base = everything_at_once(jobs(count, mu, sigma, seed), admission)
                mine = Play(jobs(count, mu, sigma, seed), admission, deadly=server == "deadly").run()
                print(_row(server, name, seed, base, mine), flush=True)


def _row(server: str, name: str, seed: int, base: Result, mine: Result) -> str:
    return (
        f"{server:10}  {name:12}  {seed:4}  {base.seconds:6.1f} ({base.retractions:4}, {base.peak_running:3})"
        f"        {mine.seconds / base.seconds:.3f} {mine.died:5} {mine.recalled:9} {mine.retractions:5}"
        f" {mine.peak_running:5}  {mine.mean_use:.2f}  {mine.fullest:.2f}"
    )



if __name__ == "__main__":
    main()

"""Answers in stages against whole ones, at a server that keeps SGLang's reserve: how much less time do they take?

    python -m benchmarks.staged [--prompts 1000] [--seeds 5] [--settings long,short,small]
                                [--times h200,study,weights] [--stage N] [--json FILE]

Plays Headrace's rules (benchmarks/admission.py) faster than real time; four times the mean length is allowed, stages
are as `headrace plan` suggests them. `ratio` is the time in stages over that of whole answers; `floor` is what it would
be if the pool were full from the first step to the last: no client can do better, whatever it asks.

Settings, of a pool of 120,000 tokens with a prefix cache: `long` is the study's (prompts of 500-1,800 tokens, answers
of 1,500 on average, exponential, as on the real server), `short` the chat's (prompts of 100-400, answers of 1,000,
log-normal with the simulator's sigma), `small` the same with a pool of 60,000.
Times: `h200` is the simulator's own (a 1.7B model: a step grows from 2.6 ms to 7.6 ms as the pool fills), `study` 2 ms
and 10 µs for each request, `weights` a large mixture of experts: 25 ms whatever it holds, 20,000 tokens prefilled a
second.
That answers are the same ones is tests/integration/test_stages.py's; benchmarks/staged_path.py does it over HTTP.
"""

import argparse
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from app.capacity.lengths import Curve, learn
from app.capacity.peak import Held
from app.capacity.stages import Job, suggest
from app.sglang.simulator.engine import Engine, EngineConfig, Request
from benchmarks.admission import TIMES, Play, count


@dataclass(frozen=True, slots=True)
class Setting:
    """Prompts, answers and the pool they share."""

    prompts: tuple[int, int]
    mean: int  #: tokens of an answer
    sigma: float  #: log-normal; 0: exponential
    kv_tokens: int

    @property
    def allowance(self) -> int:
        """max_new_tokens."""
        return 4 * self.mean

    def jobs(self, number: int, seed: int) -> list[Request]:
        """Whole answers; a stage's `payload` is what is left of its answer beyond it."""
        rnd = random.Random(seed)
        return [
            Request(f"{n:06d}", rnd.randint(*self.prompts), self.allowance, min(self.allowance, 2 + self._length(rnd)))
            for n in range(number)
        ]

    def _length(self, rnd: random.Random) -> int:
        if not self.sigma:
            return int(rnd.expovariate(1 / self.mean))
        return int(rnd.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))


SETTINGS = {
    "long": Setting((500, 1800), 1500, 0.0, 120_000),
    "short": Setting((100, 400), 1000, 0.6, 120_000),
    "small": Setting((100, 400), 1000, 0.6, 60_000),
}


def first_stage(whole: Request, stage: int) -> Request:
    """What is asked first of an answer."""
    return _stage(whole.rid, whole.prompt_tokens, whole.max_new_tokens, whole.tokens, stage)


def next_stage(done: Request, stage: int) -> Request | None:
    """What is asked next, None if the answer is whole. A stage that its answer ends with is the last one."""
    allowed, left = done.payload
    return _stage(done.rid, done.prompt_tokens + done.made, allowed, left, stage, done.rid) if left else None


def _stage(rid: str, prompt: int, allowed: int, tokens: int, stage: int, after: str = "") -> Request:
    now = min(tokens, stage)
    return Request(rid, prompt, min(allowed, stage), now, payload=(allowed - now, tokens - now), after=after)


def at_once(work: list[Request], stage: int, config: EngineConfig) -> float:
    """Seconds of a server that is fed without limit; what goes on stands at the end of the queue."""
    engine = Engine(config)
    for request in work:
        engine.submit(0.0, first_stage(request, stage))
    now = 0.0
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        for done in engine.advance(now):
            if (follower := next_stage(done, stage)) is not None:
                engine.submit(now, follower)
    return now


def floor_seconds(work: list[Request], config: EngineConfig) -> float:
    """Seconds if each step held as many tokens as the pool takes, and no prompt were prefilled twice.

    All steps together hold a sum of tokens that no order changes: so many at least are needed, and reading them takes
    as long as it does.
    """
    held = sum(one.tokens * (one.prompt_tokens + (one.tokens + 1) / 2) for one in work)
    steps, made = held / config.kv_tokens, sum(one.tokens for one in work)
    decoding = steps * config.step_seconds + made * config.step_seconds_per_request
    prefill = sum(one.prompt_tokens for one in work) / config.prefill_tokens_per_second
    return decoding + held * config.step_seconds_per_token + prefill


class StagedPlay(Play):
    """Headrace's rules; what goes on is asked first, and later stages have lengths of their own."""

    def __init__(self, setting: Setting, work: list[Request], stage: int, times: dict[str, float]):
        firsts = [first_stage(one, stage) for one in work]
        super().__init__(firsts, "reserve", kv_tokens=setting.kv_tokens, allowance=stage, prefix_cache=True, **times)
        self.stage, self.whole_allowance = stage, setting.allowance
        self.later_finished, self.later_curve = {}, None

    def _done(self, request: Request) -> None:
        whole, follower = self.whole_allowance - request.payload[0], next_stage(request, self.stage)
        cut = follower is not None or whole == self.whole_allowance
        if whole > request.made:
            count(self.later_finished, request.made, cut=cut)
        if follower is None:
            count(self.finished, whole, cut=cut)
        else:
            self.todo.appendleft(follower)

    def _curve(self, request: Request) -> Curve | None:
        return self.later_curve if self._goes_on(request) else self.curve

    def _goes_on(self, request: Request) -> bool:
        return request.payload[0] + request.tokens < self.whole_allowance

    def _newest(self) -> Held:
        return Held(0, 0, self.allowance, self._curve(self.todo[0]))

    def _learn(self) -> None:
        made = {request: site.made(request, self.now) for site in self.sites for request in site.held}
        later = [tokens for request, tokens in made.items() if self._goes_on(request)]
        first = [tokens for request, tokens in made.items() if not self._goes_on(request)]
        self.curve = learn(self.finished, first + [self.allowance] * len(later), self.allowance)
        self.later_curve = learn(self.later_finished, later, self.allowance)


def suggested(setting: Setting, seed: int) -> int:
    """The stage that `plan` suggests after a thousand answers like these."""
    sample = setting.jobs(1000, seed + 1000)
    mean = statistics.mean(one.prompt_tokens for one in sample)
    found = suggest(Job(setting.kv_tokens, mean, setting.allowance, [one.tokens for one in sample]))
    return found.tokens if found else setting.allowance


def compare(name: str, times: str, prompts: int, stage: int | None, seed: int) -> dict[str, float | str]:
    """One row of the table."""
    setting, pace = SETTINGS[name], TIMES[times]
    stage = stage or suggested(setting, seed)
    config = EngineConfig(kv_tokens=setting.kv_tokens, max_running=4096, prefix_cache=True, **pace)
    whole, staged = (
        StagedPlay(setting, setting.jobs(prompts, seed), size, pace).run() for size in (setting.allowance, stage)
    )
    fed, fed_staged = (at_once(setting.jobs(prompts, seed), size, config) for size in (setting.allowance, stage))
    return {
        "setting": name, "times": times, "seed": seed, "stage": stage, "at_once_seconds": fed,
        "at_once_staged_seconds": fed_staged, "seconds": whole.seconds, "use": whole.mean_use,
        "staged_seconds": staged.seconds, "staged_use": staged.mean_use, "staged_fullest": staged.fullest,
        "staged_retractions": staged.retractions, "staged_recalled": staged.recalled,
        "ratio": staged.seconds / whole.seconds,
        "floor": floor_seconds(setting.jobs(prompts, seed), config) / whole.seconds,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--times", default=",".join(TIMES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict] = []
    print("setting times    stage | at once, s  in stages | Headrace, s (use)  in stages (use)  retr  recalled"
          " | ratio (of)            floor")  # fmt: skip
    for setting in arguments.settings.split(","):
        for times in arguments.times.split(","):
            seeds = range(arguments.seeds)
            mine = [compare(setting, times, arguments.prompts, arguments.stage, seed) for seed in seeds]
            rows += mine
            print(_line(mine), flush=True)
    if arguments.json:
        settings = {name: asdict(one) for name, one in SETTINGS.items()}
        arguments.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


def _line(rows: list[dict]) -> str:
    """Medians over seeds."""
    mid = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in ("setting", "times")}
    ratios = [row["ratio"] for row in rows]
    return (
        "{setting:7} {times:8}".format(**rows[0])
        + "{stage:6.0f} | {at_once_seconds:10.1f} {at_once_staged_seconds:10.1f} | {seconds:11.1f} ({use:.2f}) "
        "{staged_seconds:10.1f} ({staged_use:.2f}) {staged_retractions:5.0f} {staged_recalled:9.0f} | "
        "{ratio:.3f}".format(**mid) + f" ({min(ratios):.3f}-{max(ratios):.3f})  {mid['floor']:.3f}"
    )


if __name__ == "__main__":
    main()

"""Answers in stages against whole ones, at a server that keeps SGLang's reserve: how much less time do they take?

    python -m benchmarks.staged [--prompts 1000] [--stage 1500] [--seeds 5] [--json FILE]

Plays Headrace's rules (benchmarks/admission.py) faster than real time; beside it everything at once. Prompts of
500-1,800 tokens, answers of 1,500 on average (exponential), four times that allowed. Two servers of 120,000 KV tokens
with a prefix cache: `attention` is as a 1.7B model on an H200 measures (a step grows from 2.6 ms to 7.6 ms as the pool
fills), `weights` as a large mixture of experts, whose step takes 25 ms whatever it holds, and which prefills 20,000
tokens a second. `ratio` is the time in stages over that of whole answers.
That answers are the same ones is tests/integration/test_stages.py's.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from app.capacity.lengths import Curve, learn
from app.sglang.simulator.engine import Engine, EngineConfig, Request
from benchmarks.admission import Play, count

KV_TOKENS, MEAN, ALLOWANCE = 120_000, 1_500, 6_000
PACES = {
    "attention": {"prefix_cache": True},
    "weights": {"prefix_cache": True, "step_seconds": 0.025, "step_seconds_per_token": 2e-9,
                "prefill_tokens_per_second": 20_000.0},
}  # fmt: skip


def jobs(count: int, seed: int) -> list[Request]:
    """Whole answers; a stage's `payload` is what is left of its answer beyond it."""
    rnd = random.Random(seed)
    return [
        Request(f"{n:06d}", rnd.randint(500, 1800), ALLOWANCE, min(ALLOWANCE, 2 + int(rnd.expovariate(1 / MEAN))))
        for n in range(count)
    ]  # fmt: skip


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


def at_once(work: list[Request], stage: int | None, pace: dict) -> tuple[float, float]:
    """Seconds and mean KV use of a server that is fed without limit."""
    engine = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, **pace))
    for request in work:
        engine.submit(0.0, first_stage(request, stage or ALLOWANCE))
    now, uses = 0.0, []
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        for done in engine.advance(now):
            if (follower := next_stage(done, stage or ALLOWANCE)) is not None:
                engine.submit(now, follower)
        if engine.waiting:
            uses.append(engine.used_tokens / KV_TOKENS)
    return now, statistics.mean(uses)


class StagedPlay(Play):
    """Headrace's rules; what goes on is asked first, and later stages have lengths of their own."""

    def __init__(self, work: list[Request], stage: int, pace: dict):
        firsts, most = [first_stage(one, stage) for one in work], min(stage, ALLOWANCE)
        super().__init__(firsts, "reserve", kv_tokens=KV_TOKENS, allowance=most, **pace)
        self.stage, self.later_finished, self.later_curve = stage, {}, None

    def _done(self, request: Request) -> None:
        whole, follower = ALLOWANCE - request.payload[0], next_stage(request, self.stage)
        cut = follower is not None or whole == ALLOWANCE
        if whole > request.made:
            count(self.later_finished, request.made, cut=cut)
        if follower is None:
            count(self.finished, whole, cut=cut)
        else:
            self.todo.appendleft(follower)

    def _curve(self, request: Request) -> Curve | None:
        return self.later_curve if _goes_on(request) else self.curve

    def _learn(self) -> None:
        super()._learn()
        made = {request: self._made(request) for request in self.held}
        later = [tokens for request, tokens in made.items() if _goes_on(request)]
        first = [tokens for request, tokens in made.items() if not _goes_on(request)]
        self.curve = learn(self.finished, first + [self.allowance] * len(later), self.allowance)
        self.later_curve = learn(self.later_finished, later, self.allowance)


def _goes_on(request: Request) -> bool:
    return request.payload[0] + request.tokens < ALLOWANCE


def compare(server: str, prompts: int, stage: int, seed: int) -> dict[str, float | str]:
    """One row of the table."""
    pace = PACES[server]
    whole, staged = (StagedPlay(jobs(prompts, seed), size, pace).run() for size in (ALLOWANCE, stage))
    fed, fed_staged = (at_once(jobs(prompts, seed), size, pace) for size in (None, stage))
    return {
        "server": server, "seed": seed, "at_once_seconds": fed[0], "at_once_use": fed[1],
        "at_once_staged_seconds": fed_staged[0], "at_once_staged_use": fed_staged[1],
        "seconds": whole.seconds, "use": whole.mean_use,
        "retractions": whole.retractions, "staged_seconds": staged.seconds, "staged_use": staged.mean_use,
        "staged_retractions": staged.retractions, "staged_recalled": staged.recalled,
        "ratio": staged.seconds / whole.seconds, "at_once_ratio": fed_staged[0] / fed[0],
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--stage", type=int, default=MEAN)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        compare(server, arguments.prompts, arguments.stage, seed)
        for server in PACES for seed in range(arguments.seeds)
    ]  # fmt: skip
    print("server     seed   at once (use)   in stages (use)  ratio | Headrace (use)   in stages (use)  ratio")
    for row in rows:
        print("{server:9}  {seed:4}  {at_once_seconds:7.1f} ({at_once_use:.2f})  {at_once_staged_seconds:9.1f} "
              "({at_once_staged_use:.2f})   {at_once_ratio:.3f} | {seconds:8.1f} ({use:.2f})  {staged_seconds:8.1f} "
              "({staged_use:.2f})   {ratio:.3f}".format(**row), flush=True)  # fmt: skip
    for server in PACES:
        ratios = [row["ratio"] for row in rows if row["server"] == server]
        print(f"{server}: ratio {statistics.median(ratios):.3f} (of {min(ratios):.3f} to {max(ratios):.3f})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"stage": arguments.stage, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

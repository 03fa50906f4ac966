"""Saturation without tuning: against everything at once, and against the best fixed number found by sweeping.

    python -m benchmarks.saturation [--prompts 2000] [--seed 11] [--servers reserve,free_space,deadly] [--json FILE]

Plays benchmarks/admission.py faster than real time: three distributions of lengths, one endpoint of 231,120 KV tokens.
`ratio` is the time of Headrace's rules over the best of the two others on the same server, made crash-free.
"""

import argparse
import json
from pathlib import Path

from app.sglang.simulator.engine import Engine, EngineConfig
from benchmarks.admission import DISTRIBUTIONS, KV_TOKENS, Play, everything_at_once, jobs

SWEEP = (40, 57, 64, 72, 80, 90, 100, 120, 144, 170)


def fixed(work: list, admission: str, limit: int) -> float:
    """Seconds with so many in flight."""
    engine = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission))
    now, todo = 0.0, iter(work)
    for _ in range(min(limit, len(work))):
        engine.submit(0.0, next(todo))
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        for _ in engine.advance(now):
            if (follower := next(todo, None)) is not None:
                engine.submit(now, follower)
    return now


def compare(server: str, name: str, prompts: int, seed: int) -> dict:
    """One row of the table."""
    admission, shape = "free_space" if server == "free_space" else "reserve", DISTRIBUTIONS[name]
    base = everything_at_once(jobs(prompts, *shape, seed), admission)
    swept = {limit: fixed(jobs(prompts, *shape, seed), admission, limit) for limit in SWEEP}
    best = min(swept, key=swept.get)
    mine = Play(jobs(prompts, *shape, seed), admission, deadly=server == "deadly").run()
    return {
        "server": server, "lengths": name, "prompts": prompts, "seed": seed,
        "at_once_seconds": round(base.seconds, 1), "best_fixed": best, "best_fixed_seconds": round(swept[best], 1),
        "seconds": round(mine.seconds, 1), "to_at_once": round(mine.seconds / base.seconds, 3),
        "ratio": round(mine.seconds / min(base.seconds, swept[best]), 3), "died": mine.died,
        "recalled": mine.recalled, "retractions": mine.retractions, "peak_running": mine.peak_running,
        "fullest": round(mine.fullest, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--servers", default="reserve,free_space,deadly")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for server in arguments.servers.split(","):
        for name in DISTRIBUTIONS:
            rows.append(compare(server, name, arguments.prompts, arguments.seed))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

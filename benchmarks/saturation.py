"""Saturation without tuning: against everything at once, and against the best fixed number found by sweeping.

    python -m benchmarks.saturation [--prompts 2000] [--seeds 5] [--first-seed 11] [--times h200,study]
                                    [--servers reserve,free_space,deadly] [--lengths normal,heavy,short]
                                    [--endpoints 1] [--workers 1] [--json FILE]

Plays benchmarks/admission.py faster than real time: three distributions of lengths, endpoints of 231,120 KV tokens (of
more than one, every second takes twice as long for everything). `ratio` is the time of Headrace's rules over the best
of the two others on the same servers, made crash-free; `to at once` over everything at once, dealt in proportion to the
endpoints' speeds; beside it the same of the best fixed number. Medians over seeds, and the worst.
"""

import argparse
import json
import statistics
from pathlib import Path

from app.sglang.simulator.engine import Engine, EngineConfig
from benchmarks.admission import DISTRIBUTIONS, KV_TOKENS, TIMES, Play, jobs

SWEEP = (40, 57, 64, 72, 80, 90, 100, 120, 144, 170)


def speeds(endpoints: int) -> list[float]:
    """How many times as long each endpoint takes."""
    return [1.0 + number % 2 for number in range(endpoints)]


def fixed(work: list, config: EngineConfig, slow: list[float], limit: int) -> float:
    """Seconds with so many in flight at each endpoint, the next one sent where one has ended."""
    engines, todo, now = [], iter(work), 0.0
    for one in slow:
        engines.append(Engine(config))
        engines[-1].slow = one
        for request in (next(todo, None) for _ in range(limit)):
            if request is not None:
                engines[-1].submit(0.0, request)
    while events := [event for engine in engines if (event := engine.next_event()) is not None]:
        now = max(now, min(events))
        for engine in engines:
            for _ in engine.advance(now):
                if (follower := next(todo, None)) is not None:
                    engine.submit(now, follower)
    return now


def at_once(work: list, config: EngineConfig, slow: list[float]) -> float:
    """Seconds if all is sent at the start, dealt so that each endpoint has as much to do."""
    shares, seconds, begin = [1 / one for one in slow], 0.0, 0.0
    for share, one in zip(shares, slow, strict=True):
        engine, end = Engine(config), begin + len(work) * share / sum(shares)
        engine.slow = one
        for request in work[round(begin) : round(end)]:
            engine.submit(0.0, request)
        now, begin = 0.0, end
        while (event := engine.next_event()) is not None:
            now = max(now, event)
            engine.advance(now)
        seconds = max(seconds, now)
    return seconds


def compare(server: str, name: str, times: str, prompts: int, seed: int, endpoints: int, workers: int) -> dict:
    """One play of each."""
    admission, shape = "free_space" if server == "free_space" else "reserve", DISTRIBUTIONS[name]
    config = EngineConfig(kv_tokens=KV_TOKENS, max_running=4096, admission=admission, **TIMES[times])
    slow = speeds(endpoints)
    flooded = at_once(jobs(prompts, *shape, seed), config, slow)
    swept = {limit: fixed(jobs(prompts, *shape, seed), config, slow, limit) for limit in SWEEP}
    best = min(swept, key=swept.get)
    mine = Play(
        jobs(prompts, *shape, seed), admission, deadly=server == "deadly", slow=slow, workers=workers, **TIMES[times]
    ).run()
    return {
        "server": server, "lengths": name, "times": times, "prompts": prompts, "seed": seed, "endpoints": endpoints,
        "workers": workers, "at_once_seconds": flooded, "best_fixed": best, "best_fixed_seconds": swept[best],
        "seconds": mine.seconds, "ratio": mine.seconds / min(flooded, swept[best]),
        "to_at_once": mine.seconds / flooded, "best_to_at_once": swept[best] / flooded, "died": mine.died,
        "recalled": mine.recalled, "retractions": mine.retractions, "peak_running": mine.peak_running,
        "fullest": mine.fullest,
    }  # fmt: skip


def line(rows: list[dict]) -> str:
    """Medians over seeds."""
    mid = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in _WORDS}
    return (
        "{server:10} {lengths:13} {times:7}".format(**rows[0])
        + "{ratio:.3f}".format(**mid) + f" (worst {max(row['ratio'] for row in rows):.3f})  "
        + "{to_at_once:.3f}       {best_to_at_once:.3f} at {best_fixed:3.0f}   {peak_running:4.0f} {fullest:.3f}  "
        "{recalled:5.0f} {retractions:5.0f}".format(**mid) + f"  {sum(row['died'] for row in rows)}"
    )  # fmt: skip


_WORDS = ("server", "lengths", "times")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=11)
    parser.add_argument("--servers", default="reserve,free_space,deadly")
    parser.add_argument("--times", default="h200,study")
    parser.add_argument("--lengths", default=",".join(DISTRIBUTIONS))
    parser.add_argument("--endpoints", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict] = []
    print("server     lengths       times  ratio                to at once  best fixed to at once  peak fullest"
          " recalled retracted died")  # fmt: skip
    for server in arguments.servers.split(","):
        for name in arguments.lengths.split(","):
            for times in arguments.times.split(","):
                seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
                counts = arguments.prompts, arguments.endpoints, arguments.workers
                mine = [compare(server, name, times, counts[0], seed, *counts[1:]) for seed in seeds]
                rows += mine
                print(line(mine), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Answers in stages against whole ones, at an endpoint that keeps SGLang's reserve: how much less time do they take?

    python -m benchmarks.staged [--prompts 300] [--stage 1500] [--rounds 3] [--speed 4] [--json FILE]

A real worker on a private Redis, and a simulated endpoint of 120,000 KV tokens with SGLang's reserve rule: prompts of
1,000 ids, answers of 1,500 on average (geometric), 6,000 allowed. The endpoint has no prefix cache: each stage pays for
its prefill whole. Rounds alternate; `ratio` is staged over whole, its median reported. Answers must be equal.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, RunKeys
from tests.belt import manifest, published, put, worker

KV_TOKENS, PROMPT, MEAN, ALLOWANCE = 120_000, 1_000, 1_500, 6_000
_SAME = ("output_ids", "finish_reason", "matched", "attempt", "num_output_tokens", "max_new_tokens")


def play(prompts: int, stage: int | None, speed: float) -> tuple[dict[str, float], dict[str, tuple]]:
    """Figures of one run, times in the endpoint's seconds, and its answers."""
    config = SimulatorConfig(
        output_lengths="geometric", output_mean=MEAN, max_total_num_tokens=KV_TOKENS, max_running_requests=1024,
        speed=speed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, running_simulator(config) as endpoint:
        folder = Path(name)
        server = PrivateServer(folder / "redis")
        server.start()
        client = connect(server.url)
        client.set(EPOCH, 0)
        run = manifest(endpoint.url, max_new_tokens=ALLOWANCE, stage_tokens=stage, stop_ids=[config.eos_id])
        put(client, server.url, run, prompts, prompt=PROMPT)
        use, running = [], []
        with worker(server.url, folder):
            while endpoint.stats(detail=False)["requests"] == 0:
                time.sleep(0.01)
            begun = time.monotonic()
            while (done := client.xlen(RunKeys("run1").responses)) < prompts:
                stats = endpoint.stats(detail=False)
                if done < prompts / 2:  # while others wait
                    use.append(stats["used_tokens"] / KV_TOKENS)
                    running.append(stats["running"])
                time.sleep(0.05)
            seconds = (time.monotonic() - begun) * speed
            stats = endpoint.stats(detail=False)
        answers = {one["key"]: tuple(str(one[field]) for field in _SAME) for one in published(client)}
        server.stop()
    figures = {
        "seconds": seconds, "tokens_per_second": stats["generated_tokens"] / seconds, "requests": stats["requests"],
        "mean_running": statistics.mean(running), "kv_use": statistics.mean(use), "retractions": stats["retractions"],
    }  # fmt: skip
    return figures, answers


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--stage", type=int, default=MEAN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speed", type=float, default=4.0, help="times faster than a real server")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = [
        (play(arguments.prompts, None, arguments.speed), play(arguments.prompts, arguments.stage, arguments.speed))
        for _ in range(arguments.rounds)
    ]
    differ = sum(whole[1][key] != staged[1].get(key) for whole, staged in pairs for key in whole[1])
    ratios = [staged[0]["seconds"] / whole[0]["seconds"] for whole, staged in pairs]
    print(f"{'':<20}{'whole':>12}{'staged':>12}")
    table = {}
    for name in pairs[0][0][0]:
        table[name] = [statistics.median(pair[place][0][name] for pair in pairs) for place in (0, 1)]
        print(f"{name:<20}{table[name][0]:>12,.2f}{table[name][1]:>12,.2f}")
    print(f"ratio {statistics.median(ratios):.3f} (of {min(ratios):.3f} to {max(ratios):.3f}), {differ} answers differ")
    if arguments.json:
        found = {"stage": arguments.stage, "ratios": ratios, "differ": differ, "whole_and_staged": table}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

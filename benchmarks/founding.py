"""The founding scenario on the real path: `headrace run` and an endpoint that dies of too much.

    python -m benchmarks.founding [--prompts 2000] [--workers 1,2,8] [--sigma 0.45] [--speed 5] [--json FILE]

KV 231,120 tokens, prompts of about 500-1,800 ids, answers log-normal around 2,700 (--sigma 1.0: a heavy tail), an
endpoint with SGLang's reserve rule that dies above 100 running or on a full pool. First a naive client with 150 + 32
requests in flight, then `headrace run` with nothing tuned and 1, 2 and 8 worker processes. `ratio` is the time from the
first request to the last answer over that of the same requests given all at once to the same endpoint made crash-free,
played by the simulator's engine without HTTP. The endpoint runs in a process of its own, `--speed` times as fast.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import orjson

from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault
from app.sglang.simulator.engine import Engine, EngineConfig, Request
from tests.acceptance.harness import IDS, TOKENIZER, headrace, run

KV_TOKENS, MAX_NEW_TOKENS, NAIVE = 231_120, 8192, 150 + 32
WORDS = (Path(__file__).parent.parent / "README.md").read_text().split()


@dataclass
class Endpoint:
    """A simulated server in its own process."""

    url: str

    def stats(self) -> dict:
        """What it has counted."""
        return httpx.get(f"{self.url}/_sim/stats", timeout=10).json()


def start_endpoint(arguments: argparse.Namespace) -> tuple[subprocess.Popen, Endpoint]:
    """The endpoint that dies, and its process."""
    config = {
        **IDS, "max_total_num_tokens": KV_TOKENS, "max_running_requests": 4096, "output_lengths": "lognormal",
        "output_mean": 2990, "output_sigma": arguments.sigma, "speed": arguments.speed,
    }  # fmt: skip
    code = (
        "import json, sys\n"
        "from app.sglang.simulator import SimulatorConfig, serve\n"
        "from app.sglang.simulator.faults import Faults\n"
        "faults = Faults(crash_above_running=100, crash_on_kv_full=True)\n"
        "config = SimulatorConfig(**json.loads(sys.argv[1]), faults=faults)\n"
        "serve(config, 0, on_ready=lambda url: print(url, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(config)], stdout=subprocess.PIPE, text=True)
    return process, Endpoint(process.stdout.readline().strip())


def write_prompts(path: Path, count: int) -> None:
    """Rows of about 500-1,800 tokens."""
    rnd = random.Random(5)
    with path.open("w") as file:
        for number in range(count):
            text = f"{number} " + " ".join(rnd.choices(WORDS, k=rnd.randint(170, 640)))
            file.write(json.dumps({"id": str(number), "messages": [{"role": "user", "content": text}]}) + "\n")


async def naive(url: str, prompts: int) -> int:
    """An engineer's evening: so many at once, whatever happens. Returns how many answers came."""
    client, gate, rnd, done = SGLangClient(), asyncio.Semaphore(NAIVE), random.Random(1), 0

    async def one() -> None:
        nonlocal done
        ids = [rnd.randrange(256, 4000) for _ in range(rnd.randint(500, 1800))]
        async with gate:
            try:
                await client.generate(url, ids, {"max_new_tokens": MAX_NEW_TOKENS}, rid=new_rid(), deadline_seconds=120)
                done += 1
            except Fault:
                pass

    await asyncio.gather(*(one() for _ in range(prompts)))
    await client.aclose()
    return done


def at_once(lengths: list[tuple[int, int]]) -> float:
    """Engine seconds for these (prompt, output) tokens, all submitted at the start, crash-free."""
    engine, now = Engine(EngineConfig(kv_tokens=KV_TOKENS, max_running=4096)), 0.0
    for number, (prompt, output) in enumerate(lengths):
        engine.submit(0.0, Request(str(number), prompt, MAX_NEW_TOKENS, output))
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        engine.advance(now)
    return now


def founding(data: Path, out: Path, workers: int, arguments: argparse.Namespace) -> dict:
    """One `headrace run`, untuned."""
    process, endpoint = start_endpoint(arguments)
    try:
        options = ["--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--max-new-tokens", MAX_NEW_TOKENS,
                   "--workers", workers, "--temperature", "0"]  # fmt: skip
        with run(out, data, *options) as going:
            code = going.process.wait()
        stats = endpoint.stats()
    finally:
        process.kill()
        process.wait()
    rows = [orjson.loads(line) for path in out.glob("*/raw_responses.jsonl") for line in path.open("rb")]
    rows.sort(key=lambda row: row["row_number"])
    starts = [datetime.fromisoformat(row["started_at"]).timestamp() for row in rows]
    wall = max(s + r["latency_seconds"] for s, r in zip(starts, rows, strict=True)) - min(starts)
    base = at_once([(row["num_prompt_tokens"], row["num_output_tokens"]) for row in rows]) / arguments.speed
    return {
        "client": "headrace run", "workers": workers, "exit": code, "rows": len(rows), "crashes": stats["crashes"],
        "seconds": round(wall, 1), "ratio": round(wall / base, 3), "peak_running": stats["peak_running"],
        "fullest": round(stats["peak_used_tokens"] / KV_TOKENS, 3), "retractions": stats["retractions"],
        "recalled": stats["aborted"], "mean_length": round(sum(r["num_output_tokens"] for r in rows) / len(rows)),
        "verified": headrace("verify", out, timeout=300).returncode == 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--workers", default="1,2,8")
    parser.add_argument("--sigma", type=float, default=0.45)
    parser.add_argument("--speed", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    process, endpoint = start_endpoint(arguments)
    try:
        done = asyncio.run(naive(endpoint.url, 2 * NAIVE))
        crashes = endpoint.stats()["crashes"]
    finally:
        process.kill()
        process.wait()
    results = [{"client": f"naive, {NAIVE} in flight", "rows": done, "of": 2 * NAIVE, "crashes": crashes}]
    show(results[0])
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        write_prompts(data, arguments.prompts)
        for workers in map(int, arguments.workers.split(",")):
            results.append(founding(data, Path(folder) / f"out{workers}", workers, arguments))
            show(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def show(result: dict) -> None:
    """One line of the table."""
    print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)


if __name__ == "__main__":
    main()

"""Answers in stages against whole ones on the real path: a worker process, Redis, and a simulated endpoint over HTTP.

    python -m benchmarks.staged_path [--setting short] [--times weights] [--prompts 600] [--speed 4] [--json FILE]

The same prompts twice, against the same endpoint in a process of its own with SGLang's reserve rule and a prefix cache,
of whose mean length four times are allowed; first whole, then in stages as `plan` suggests them. `ratio` is the time
in stages over that of whole answers, each from the first request to the last answer. Records must be equal but for
what is of one request (times, endpoint, meta_info, attempts where one was taken back) and `stages`. Settings and times
are those of benchmarks/staged.py, answers log-normal; what the controller does takes real seconds, so a speed makes
stages look worse than they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, RunKeys
from benchmarks.admission import TIMES
from benchmarks.staged import SETTINGS, Setting, suggested
from tests.belt import manifest, published, put, until, worker

OF_ONE_REQUEST = {"attempt", "endpoint", "latency_seconds", "meta_info", "server", "stages", "started_at"}
_SERVE = (
    "import json, sys\n"
    "from app.sglang.simulator import SimulatorConfig, serve\n"
    "spell = lambda ids: ''.join(f'<{one}>' for one in ids if one != SimulatorConfig.eos_id)\n"
    "config = SimulatorConfig(**json.loads(sys.argv[1]), decode=spell)\n"
    "serve(config, 0, on_ready=lambda url: print(url, flush=True))"
)


@contextmanager
def endpoint(config: dict) -> Iterator[str]:
    """The URL of a simulated server."""
    with subprocess.Popen([sys.executable, "-c", _SERVE, json.dumps(config)], stdout=subprocess.PIPE, text=True) as one:
        try:
            yield one.stdout.readline().strip()
        finally:
            one.kill()


def play(setting: Setting, config: dict, prompts: int, stage: int | None) -> tuple[dict[str, float], dict[str, dict]]:
    """Figures of one run, and its records by key."""
    with tempfile.TemporaryDirectory() as name, endpoint(config) as url:
        server = PrivateServer(Path(name) / "redis")
        server.start()
        client = connect(server.url)
        client.set(EPOCH, 0)
        run = manifest(url, max_new_tokens=setting.allowance, stage_tokens=stage, stop_ids=[163_586])
        put(client, server.url, run, prompts, prompt=sum(setting.prompts) // 2)
        with worker(server.url, Path(name)):
            until(lambda: _stats(url)["running"] > 0, 60, "the first request")
            begun, uses = time.monotonic(), []
            while client.xlen(RunKeys("run1").responses) < prompts:
                stats = _stats(url)
                if stats["running"] + stats["waiting"] and client.zcard(RunKeys("run1").claims("d")) > stats["running"]:
                    uses.append(stats["used_tokens"] / setting.kv_tokens)
                time.sleep(0.1)
            seconds, stats = time.monotonic() - begun, _stats(url)
        records = {record["key"]: record for record in published(client)}
        server.stop()
    figures = {"seconds": seconds, "use": sum(uses) / len(uses), "retractions": stats["retractions"],
               "aborted": stats["aborted"], "requests": stats["requests"]}  # fmt: skip
    return figures, records


def _stats(url: str) -> dict:
    return httpx.get(f"{url}/_sim/stats", timeout=30).json()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="short", choices=SETTINGS)
    parser.add_argument("--times", default="weights", choices=TIMES)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    config = {
        "max_total_num_tokens": setting.kv_tokens, "max_running_requests": 4096, "prefix_cache": True,
        "output_mean": setting.mean, "output_sigma": setting.sigma or 0.6, "speed": arguments.speed,
        **TIMES[arguments.times],
    }  # fmt: skip
    stage = suggested(setting, 0)
    whole, records = play(setting, config, arguments.prompts, None)
    staged, in_stages = play(setting, config, arguments.prompts, stage)
    differing = [key for key in records if _plain(records[key]) != _plain(in_stages[key])]
    found = {
        "stage": stage, "whole": whole, "staged": staged, "ratio": staged["seconds"] / whole["seconds"],
        "differing_records": len(differing),
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _plain(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in OF_ONE_REQUEST}


if __name__ == "__main__":
    main()

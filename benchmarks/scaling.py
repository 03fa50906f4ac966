"""Workers come and go under load: 1 → 2 → 3 → 4 → 1, then one that is scaled; throughput follows until the endpoints
are the limit, and nothing is lost.

    python -m benchmarks.scaling [--seconds 12] [--json]

Real workers (`headrace worker`), stopped with `headrace workers stop` and scaled with `headrace workers scale`, on a
private Redis and two simulated endpoints that run 48 requests each. A worker has 32 slots: three fill the endpoints.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, RunKeys
from app.store.live import workers_at
from tests.belt import manifest, published, put, until, worker

_SLOTS, _RUNNING, _TASKS = 32, 48, 6000
_SETTLE_SECONDS = 6.0
_KEYS = RunKeys("run1")
_SERVER = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.1, max_running_requests=_RUNNING)


def main() -> None:
    """Run it, print the table or JSON; exit 1 if anything was lost or came twice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="measured in each phase")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result = _scale(Path(folder), stack, arguments.seconds)
    print(json.dumps(result) if arguments.json else _table(result))
    sys.exit(0 if result["lost"] == result["twice"] == 0 else 1)


def _scale(folder: Path, stack: ExitStack, seconds: float) -> dict:
    server = PrivateServer(folder / "redis")
    server.start()
    stack.callback(server.stop)
    client = connect(server.url)
    client.set(EPOCH, 0)
    endpoints = [stack.enter_context(running_simulator(_SERVER)) for _ in range(2)]
    keys = put(client, server.url, manifest(*(endpoint.url for endpoint in endpoints)), _TASKS)
    phases = []
    for wanted in (1, 2, 3, 4, 1):
        for number in range(len(workers_at(client)) + 1, wanted + 1):
            name = f"w{len(phases)}{number}"
            stack.enter_context(worker(server.url, folder, "--slots", str(_SLOTS), name=name))
        if leaving := [one.name for one in workers_at(client)[wanted:]]:
            _headrace("workers", "stop", *leaving, "--redis", server.url)
        until(lambda wanted=wanted: len(workers_at(client)) == wanted, 90.0, f"{wanted} workers")
        phases.append(_phase(client, endpoints, f"{wanted} of {_SLOTS} slots", wanted * _SLOTS, seconds))
    _headrace("workers", "scale", str(4 * _SLOTS), "--redis", server.url)
    phases.append(_phase(client, endpoints, f"1 scaled to {4 * _SLOTS}", 4 * _SLOTS, seconds))
    _headrace("workers", "stop", *(one.name for one in workers_at(client)), "--redis", server.url)
    until(lambda: not workers_at(client), 90.0, "no worker")
    return {"phases": phases, **_balance(client, keys)}


def _phase(client, endpoints, name: str, slots: int, seconds: float) -> dict:
    time.sleep(_SETTLE_SECONDS)
    before, started = client.xlen(_KEYS.responses), time.monotonic()
    running = []
    while time.monotonic() - started < seconds:
        running.append(sum(endpoint.stats()["running"] for endpoint in endpoints))
        time.sleep(0.25)
    rate = (client.xlen(_KEYS.responses) - before) / (time.monotonic() - started)
    return {"workers": name, "slots": slots, "rows_per_second": rate, "running": sum(running) / len(running)}


def _balance(client, keys: list[str]) -> dict:
    """Every key is in the stream once or still to be done, and no request was sent twice."""
    records = published(client)
    done = [record["key"] for record in records]
    left = {key.decode() for key in client.hkeys(_KEYS.payload("d"))}
    return {
        "rows": len(keys), "done": len(done), "left": len(left), "lost": len(set(keys) - set(done) - left),
        "twice": len(done) - len(set(done)) + len(left & set(done)),
        "extra_generations": sum(record["attempt"] - 1 for record in records),
    }  # fmt: skip


def _headrace(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "app.cli.main", *words], check=True, capture_output=True)


def _table(result: dict) -> str:
    lines = [f"{'workers':<18}{'slots':>7}{'running':>10}{'rows/s':>9}{'of first':>10}"]
    first = result["phases"][0]["rows_per_second"]
    for phase in result["phases"]:
        rate = phase["rows_per_second"]
        share = f"{rate / first:.2f} ×"
        lines.append(f"{phase['workers']:<18}{phase['slots']:>7}{phase['running']:>10.1f}{rate:>9.1f}{share:>10}")
    lines.append(f"the endpoints run {2 * _RUNNING}; {result['rows']:,} rows: {result['done']:,} done, "
                 f"{result['left']:,} left, {result['lost']} lost, {result['twice']} twice, "
                 f"{result['extra_generations']} generated again")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()

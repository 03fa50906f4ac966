"""Does anything grow with the rows? Memory, open files and threads of every process of `headrace run`, size by size.

    python -m benchmarks.flat [--rows 10000,100000] [--json FILE]     (1000000: about an hour on 2 cores)

Short synthetic rows, an endpoint that answers at once. For each process the most resident memory, open files and
threads that a whole run saw (renderers together). `grown` is that of the largest size over that of the smallest, which
must be large enough to have warmed everything up: 10,000 rows.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from app.sglang.simulator import SimulatorConfig, serve
from tests.acceptance.harness import IDS, TOKENIZER, Run, run

_ROLES = {"worker": "worker", "collect": "collector", "produce": "producer", "valkey": "redis", "redis": "redis"}
_SPAWN = multiprocessing.get_context("spawn")


def _endpoint(ready) -> None:
    config = SimulatorConfig(**IDS, instant=True, output_lengths="fixed", output_mean=8)
    serve(config, port=0, on_ready=ready.send)


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    command = words[3] if len(words) > 3 and words[1:3] == ["-m", "app.cli.main"] else Path(words[0]).name
    return next((role for word, role in _ROLES.items() if word in command), command if "-m" in words else "renderer")


def _look(started: Run, most: dict[str, dict[str, float]]) -> None:
    now: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for process in started.everything():
        try:
            figures = now["supervisor" if process.pid == started.process.pid else _role(process)]
            with process.oneshot():
                figures["memory_mb"] += process.memory_info().rss / 1e6
                figures["open_files"] += process.num_fds()
                figures["threads"] += process.num_threads()
        except (psutil.Error, IndexError):
            continue
    for role, figures in now.items():
        for name, figure in figures.items():
            most[role][name] = max(most[role].get(name, 0.0), figure)


def play(rows: int) -> dict[str, dict[str, float]]:
    """The most that each process had, over a run of so many rows."""
    most: dict[str, dict[str, float]] = defaultdict(dict)
    ready, end = _SPAWN.Pipe()
    endpoint = _SPAWN.Process(target=_endpoint, args=(end,), daemon=True)
    endpoint.start()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "rows.jsonl"
        with data.open("w") as file:
            file.writelines(f'{{"prompt": "What is {n} plus {n * 7 % 1000}?"}}\n' for n in range(rows))
        words = [data, "--endpoint", ready.recv(), "--tokenizer", TOKENIZER, "--max-new-tokens", 16]
        begun = time.monotonic()
        with run(Path(name) / "out", *words) as started:
            while started.process.poll() is None:
                _look(started, most)
                time.sleep(0.25)
            assert started.process.returncode == 0, started.text()
        most["run"]["rows_per_second"] = rows / (time.monotonic() - begun)
    endpoint.terminate()
    endpoint.join()
    return most


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.rows.split(",")]
    found = {size: play(size) for size in sizes}
    print(f"{'':<28}" + "".join(f"{size:>14,}" for size in sizes) + f"{'grown':>10}")
    for role in sorted(found[sizes[-1]]):
        for name in found[sizes[-1]][role]:
            figures = [found[size].get(role, {}).get(name, 0.0) for size in sizes]
            grown = figures[-1] / figures[0] if figures[0] else 0.0
            print(f"{role + ' ' + name:<28}" + "".join(f"{one:>14,.1f}" for one in figures) + f"{grown:>10.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

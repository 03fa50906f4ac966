"""Does anything grow with the rows? Memory, open files and threads of every process of one `headrace run`, as it goes.

    python -m benchmarks.flat [--rows 100000] [--workers 1] [--endpoints 1] [--json FILE]

Short synthetic rows, endpoints that answer at once; 1000000 rows want `--workers 8 --endpoints 4` and 16 cores to be
done in minutes. A column is the most that was seen since the column before, until so many rows were done; those of one
kind (workers, renderers) together. Memory is PSS: what processes share is divided among them. `grown` is the last
column over that of 10,000 rows, by when everything is warm.
"""

import argparse
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import psutil

from app.ledger import Ledger
from app.rundir import RunDir
from app.sglang.simulator import SimulatorConfig, serve
from tests.acceptance.harness import IDS, TOKENIZER, Run, run
from tests.belt import until

_ROLES = {"worker": "worker", "collect": "collector", "produce": "producer", "run": "run"}
_SPAWN = multiprocessing.get_context("spawn")
_WARM_ROWS, _LOOK_SECONDS = 10_000, 0.5

Figures = dict[str, dict[str, float]]  # role → what → how much


def _endpoint(ready) -> None:
    config = SimulatorConfig(**IDS, instant=True, output_lengths="fixed", output_mean=8)
    serve(config, port=0, on_ready=ready.send)


def _start_endpoint(stack: ExitStack) -> str:
    """Its URL; it ends with the stack."""
    ready, end = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_endpoint, args=(end,), daemon=True)
    process.start()
    stack.callback(process.kill)
    return ready.recv()


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if words[1:3] == ["-m", "app.cli.main"]:
        return _ROLES.get(words[3], words[3])
    return "redis" if "valkey" in words[0] or "redis" in words[0] else "renderer"


def _look(started: Run, most: Figures) -> None:
    now: Figures = defaultdict(lambda: defaultdict(float))
    for process in started.everything():
        with contextlib.suppress(psutil.Error, IndexError):
            figures = now[_role(process)]
            figures["memory_mb"] += process.memory_full_info().pss / 1e6
            figures["open_files"] += process.num_fds()
            figures["threads"] += process.num_threads()
    for role, figures in now.items():
        for name, figure in figures.items():
            most[role][name] = max(most[role].get(name, 0.0), figure)


def _points(rows: int) -> list[int]:
    """10,000, 30,000, 100,000, … rows done, and all."""
    steps = (power * one for power in (_WARM_ROWS * 10**n for n in range(6)) for one in (1, 3))
    return [*(step for step in steps if step < rows), rows]


def play(rows: int, workers: int, endpoints: int) -> dict[int, Figures]:
    """What each kind of process had, by the rows that were done; and the seconds since the run began."""
    found: dict[int, Figures] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        data, out = Path(name) / "rows.jsonl", Path(name) / "out"
        with data.open("w") as file:
            file.writelines(f'{{"prompt": "What is {n} plus {n * 7 % 1000}?"}}\n' for n in range(rows))
        words = ["--tokenizer", TOKENIZER, "--max-new-tokens", 16, "--workers", workers]
        words += [word for _ in range(endpoints) for word in ("--endpoint", _start_endpoint(stack))]
        begun = time.monotonic()
        started = stack.enter_context(run(out, data, *words))
        until(lambda: started.lines() or started.process.poll() is not None, what="a first line")
        with Ledger.open(RunDir(out)) as ledger:
            for point in _points(rows):
                most = found[point] = defaultdict(dict)
                while started.process.poll() is None and sum(one.tokenized for one in ledger.counts()) < point:
                    _look(started, most)
                    time.sleep(_LOOK_SECONDS)
                most["run"]["seconds"] = time.monotonic() - begun
                print(f"{point:,} rows after {most['run']['seconds']:.0f} s", flush=True)
        assert started.wait(60) == 0, started.text()
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--endpoints", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = play(arguments.rows, arguments.workers, arguments.endpoints)
    print(f"{'':<24}" + "".join(f"{point:>12,}" for point in found) + f"{'grown':>10}")
    last = list(found.values())[-1]
    for role in sorted(last):
        for name in last[role]:
            figures = [one.get(role, {}).get(name, 0.0) for one in found.values()]
            grown = f"{figures[-1] / figures[0]:10.2f}" if figures[0] and name != "seconds" else ""
            print(f"{role + ' ' + name:<24}" + "".join(f"{one:>12,.1f}" for one in figures) + grown)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The same prompts, endpoint and concurrency for Headrace and for others: speed, then a kill, then an endpoint away.

    python -m benchmarks.peers.compare [--rows 500] [--away-seconds 30] [--venvs DIR] [--json FILE]

The endpoint runs 64 requests at once, each of 100 tokens takes a second. steady: undisturbed. killed: SIGKILL when
half of the rows are in the file, then the same command again. away: it refuses for so long from a third of the rows
on; no second try. A row is lost if it is missing at the end, doubled if it is there twice; `repeated` counts requests
beyond one a row. `truth` says whether exit code 0 came with all rows, and another one without. Peers from PyPI take
part where --venvs says that benchmarks/peers/setup.sh put them. CPU is of processes that ended in good order, start
and imports included.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from app.sglang.simulator import RunningSimulator, SimulatorConfig, running_simulator
from tests.acceptance.harness import IDS, TOKENIZER
from tests.belt import ROOT

CONCURRENCY, TOKENS, MAX_TOKENS = 64, 100, 128



def _headrace(url: str, prompts: Path, out: Path) -> list[str]:
    words = ["run", f"rows={prompts}", "--endpoint", url, "--tokenizer", TOKENIZER, "--out", out, "--concurrency",
             CONCURRENCY, "--max-new-tokens", MAX_TOKENS]  # fmt: skip
    return [sys.executable, "-m", "app.cli.main", *map(str, words)]


def _script(python: str, name: str) -> Callable[[str, Path, Path], list[str]]:
    def command(url: str, prompts: Path, out: Path) -> list[str]:
        out.mkdir(exist_ok=True)
        words = [ROOT / "benchmarks" / "peers" / name, url, prompts, out / "out.jsonl", CONCURRENCY, MAX_TOKENS]
        return [python, *map(str, words)]

    return command


def _of_flexllm(record: dict) -> str | None:
    return record["metadata"]["id"] if record["status"] == "success" else None


@dataclass(frozen=True)
class Peer:
    """How it is started, and how its file is read."""

    command: Callable[[str, Path, Path], list[str]]  #: of URL, prompts, output directory
    file: str = "out.jsonl"
    row: Callable[[dict], str | None] = lambda record: record["id"]  #: the row that a record answers, None if it failed


def peers(venvs: Path | None) -> dict[str, Peer]:
    """Those that can be run here."""
    found = {
        "headrace": Peer(_headrace, "rows/raw_responses.jsonl", lambda record: record["source_id"]),
        "evening": Peer(_script(sys.executable, "evening.py")),
    }
    if venvs is not None:
        python = str(venvs.absolute() / "flexllm" / "bin" / "python")
        found["flexllm"] = Peer(_script(python, "flexllm_script.py"), row=_of_flexllm)
    return found


class Play:
    """One peer on one endpoint."""

    def __init__(self, peer: Peer, folder: Path, rows: int):
        self._peer, self.out, self.rows, self.prompts = peer, folder / "out", rows, folder / "prompts.jsonl"
        self._file, self._log = self.out / peer.file, folder / "log"
        with self.prompts.open("w") as prompts:
            for n in range(rows):
                messages = [{"role": "user", "content": f"What is {n} plus {n * 7 % 1000}?"}]
                prompts.write(json.dumps({"id": f"r{n}", "messages": messages}) + "\n")

    def lines(self) -> int:
        """Rows in its file."""
        return self._file.read_bytes().count(b"\n") if self._file.exists() else 0

    def start(self, url: str) -> subprocess.Popen:
        """The command, in a session of its own."""
        return subprocess.Popen(
            self._peer.command(url, self.prompts, self.out), cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=self._log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def outcome(self, code: int, endpoint: RunningSimulator) -> dict[str, object]:
        """What is in its file, against what was asked."""
        ids = []
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            try:
                ids.append(self._peer.row(json.loads(line)))
            except ValueError:
                continue  # torn
        counts = Counter(row for row in ids if row is not None)
        lost = self.rows - len(counts)
        return {
            "exit": code, "lost": lost, "doubled": sum(n - 1 for n in counts.values()),
            "repeated": max(0, endpoint.stats(detail=False)["completed"] - self.rows),
            "truth": (code == 0) == (lost == 0),
        }  # fmt: skip


def steady(play: Play, endpoint: RunningSimulator) -> dict[str, object]:
    """Undisturbed: rates, CPU of all its processes that ended in good order, most memory of all together."""
    before, begun, most, reached = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0, {}
    process = play.start(endpoint.url)
    while process.poll() is None:
        most = max(most, _memory(process.pid))
        done = play.lines()
        for share in (0.2, 0.8):
            if done >= share * play.rows:
                reached.setdefault(share, (time.monotonic(), done))
        time.sleep(0.05)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (t0, n0), (t1, n1) = reached[0.2], reached[0.8]
    return {"rows_per_second": (n1 - n0) / (t1 - t0), "wall_seconds": wall, "cpu_ms_a_row": 1000 * cpu / play.rows,
            "memory_mb": most / 1e6, **play.outcome(process.returncode, endpoint)}  # fmt: skip


def killed(play: Play, endpoint: RunningSimulator) -> dict[str, object]:
    """SIGKILL in the middle, then the same command again."""
    process = play.start(endpoint.url)
    while play.lines() < play.rows / 2 and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return play.outcome(play.start(endpoint.url).wait(600), endpoint)


def away(play: Play, endpoint: RunningSimulator, seconds: float) -> dict[str, object]:
    """The endpoint refuses for a while."""
    process = play.start(endpoint.url)
    while play.lines() < play.rows / 3 and process.poll() is None:
        time.sleep(0.02)
    endpoint.refuse()
    back = threading.Timer(seconds, endpoint.accept)
    back.start()
    code = process.wait(600)
    back.join()
    return play.outcome(code, endpoint)


def _memory(pid: int) -> int:
    try:
        me = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (me, *me.children(recursive=True)))
    except psutil.Error:
        return 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--away-seconds", type=float, default=30.0)
    parser.add_argument("--venvs", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = SimulatorConfig(
        **IDS, output_lengths="fixed", output_mean=TOKENS, step_seconds=0.01, step_seconds_per_token=0.0,
        max_running_requests=CONCURRENCY,
    )  # fmt: skip
    plays = {"steady": steady, "killed": killed, "away": partial(away, seconds=arguments.away_seconds)}
    found: dict[str, dict[str, dict]] = {}
    for name, peer in peers(arguments.venvs).items():
        for what, play in plays.items():
            with tempfile.TemporaryDirectory() as folder, running_simulator(config) as endpoint:
                figures = play(Play(peer, Path(folder), arguments.rows), endpoint)
            found.setdefault(name, {})[what] = figures
            shown = "  ".join(f"{key} {round(value, 1)}" for key, value in figures.items())
            print(f"{name:<10}{what:<8}{shown}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

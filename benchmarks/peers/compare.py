"""The same prompts, endpoint and limit of requests at once for Headrace and others: speed, a kill, an endpoint away.

    python -m benchmarks.peers.compare [--venvs DIR] [--only NAME] [--json FILE] [--rows 500] [--away-seconds 30]

The endpoint runs 64 requests at once, each of 100 tokens takes a second. steady: undisturbed. killed: SIGKILL of all
processes at once when half of the rows have been answered, then the same command again. away: the endpoint refuses for
so long from a third of the rows on. Where rows are missing at the end, the same command once more shows whether that
mends it.
Peers from PyPI take part where --venvs says that benchmarks/peers/setup.sh put them. With --json a peer's figures
replace its old ones in the file, and the table shows everybody in it.

What is counted: `rows_per_second` over the middle half of the answers; `cpu_ms_a_row` of all processes, start and
imports included; `memory_mb`, most at one time, all processes (a shared page once); `lost`: rows not in the output;
`failed`: those of them that the output calls failed (the endpoint could have served each); `doubled`; `repeated`:
answers made beyond those in the output; `exit`, None if it did not end; `truth`: exit code 0 came with all rows, or
another one without; `again`: exit code and rows lost after the same command once more.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from app.sglang.simulator import RunningSimulator, SimulatorConfig, running_simulator
from benchmarks.peers.dialect import vllm_dialect
from benchmarks.peers.roster import CONCURRENCY, NOT_RUN, PEERS, Job, Peer
from benchmarks.peers.table import lines
from tests.acceptance.harness import IDS
from tests.belt import ROOT

TOKENS, LIMIT_SECONDS = 100, 150
CONFIG = SimulatorConfig(
    **IDS, output_lengths="fixed", output_mean=TOKENS, step_seconds=0.01, step_seconds_per_token=0.0,
    max_running_requests=CONCURRENCY,
)  # fmt: skip
Figures = dict[str, object]


class Unfit(RuntimeError):
    """A peer that cannot be compared here; the text says why."""


class Play:
    """One peer on one endpoint."""

    def __init__(self, peer: Peer, python: str, folder: Path, rows: int, endpoint: RunningSimulator, url: str):
        self._peer, self.rows, self.endpoint = peer, rows, endpoint
        self._job = Job(url, folder / "prompts.jsonl", folder / "out", python)
        self._log = folder / "log"
        with self._job.prompts.open("w") as prompts:
            for n in range(rows):
                messages = [{"role": "user", "content": f"What is {n} plus {n * 7 % 1000}?"}]
                prompts.write(json.dumps({"id": f"r{n}", "messages": messages}) + "\n")

    def start(self) -> subprocess.Popen:
        """The command, in a session of its own."""
        self._job.out.mkdir(exist_ok=True)
        return subprocess.Popen(
            self._peer.command(self._job), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._log.open("ab"),
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def answered(self) -> int:
        """Answers that the endpoint has given."""
        return self.endpoint.stats(detail=False)["completed"]

    def last_words(self) -> str:
        """The last line of what it said."""
        return (self._log.read_text(errors="replace").strip().splitlines() or ["nothing said"])[-1]

    def until(self, process: subprocess.Popen, share: float) -> None:
        """Waits until this share of the rows has been answered, or the process has ended."""
        while self.answered() < share * self.rows and process.poll() is None:
            time.sleep(0.02)

    def end(self, process: subprocess.Popen) -> int | None:
        """Its exit code; None, and no process any more, where it does not end."""
        try:
            return process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            kill(process)
            return None

    def outcome(self, code: int | None) -> Figures:
        """What its files hold, against what was asked; with rows missing, the same command once more."""
        found = self._peer.read(self._job.out)
        lost = self.rows - len(found.made)
        figures: Figures = {
            "exit": code, "lost": lost, "failed": len(found.failed - set(found.made)),
            "doubled": found.made.total() - len(found.made), "truth": (code == 0) == (lost == 0),
        }  # fmt: skip
        if lost and code is not None:
            code = self.end(self.start())
            found = self._peer.read(self._job.out)
            figures["again"] = {"exit": code, "lost": self.rows - len(found.made)}
        return {**figures, "repeated": max(0, self.answered() - len(found.made))}


def steady(play: Play) -> Figures:
    """Undisturbed."""
    before, begun, most, reached = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0, {}
    process = play.start()
    while process.poll() is None and time.monotonic() - begun < LIMIT_SECONDS:
        most, done = max(most, _memory(process.pid)), play.answered()
        for share in (0.25, 0.75):
            if done >= share * play.rows:
                reached.setdefault(share, (time.monotonic(), done))
        time.sleep(0.1)
    code, wall = play.end(process), time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if len(reached) < 2:
        raise Unfit(f"undisturbed, it gave {play.answered()} of {play.rows} answers ({code=}): {play.last_words()}")
    (t0, n0), (t1, n1) = reached[0.25], reached[0.75]
    return {"rows_per_second": (n1 - n0) / (t1 - t0), "wall_seconds": wall, "cpu_ms_a_row": 1000 * cpu / play.rows,
            "memory_mb": most / 1e6, **play.outcome(code)}  # fmt: skip


def killed(play: Play) -> Figures:
    """SIGKILL in the middle, then the same command again."""
    process = play.start()
    play.until(process, 0.5)
    kill(process)
    return play.outcome(play.end(play.start()))


def away(play: Play, seconds: float) -> Figures:
    """The endpoint refuses for a while."""
    process = play.start()
    play.until(process, 0.33)
    play.endpoint.refuse()
    back = threading.Timer(seconds, play.endpoint.accept)
    back.start()
    code = play.end(process)
    back.join()
    return play.outcome(code)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL of its whole group, and of what it started in groups of their own."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _memory(pid: int) -> int:
    total = 0
    try:
        everybody = [me := psutil.Process(pid), *me.children(recursive=True)]
    except psutil.Error:
        return 0
    for one in everybody:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@contextmanager
def _played(peer: Peer, python: str, rows: int) -> Iterator[Play]:
    with tempfile.TemporaryDirectory() as folder, running_simulator(CONFIG) as endpoint:
        if not peer.dialect:
            yield Play(peer, python, Path(folder), rows, endpoint, endpoint.url)
            return
        with vllm_dialect(endpoint.url) as url:
            yield Play(peer, python, Path(folder), rows, endpoint, url)


def compared(name: str, venvs: Path | None, rows: int, away_seconds: float) -> Figures:
    """All plays of one peer, or why there are none."""
    peer = PEERS[name]
    try:
        python = peer.python(venvs)
        title = peer.title.format(peer.version(python))
    except FileNotFoundError as exc:
        return {"title": peer.title.format("").replace("  ", " "), "not_run": str(exc)}
    figures: Figures = {"title": title, "settings": peer.settings}
    for what, play in {"steady": steady, "killed": killed, "away": partial(away, seconds=away_seconds)}.items():
        try:
            with _played(peer, python, rows) as played:
                figures[what] = play(played)
        except Unfit as exc:
            return {"title": title, "not_run": str(exc)}
        print(f"{name:<20}{what:<8}{json.dumps(figures[what])}", flush=True)
    return {**figures, "load": os.getloadavg()[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--away-seconds", type=float, default=30.0)
    parser.add_argument("--venvs", type=Path)
    parser.add_argument("--only", choices=[*PEERS], action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {"peers": {}}
    found = {"rows": arguments.rows, "away_seconds": arguments.away_seconds, "peers": kept["peers"]}
    for name in arguments.only or PEERS:
        found["peers"][name] = compared(name, arguments.venvs, arguments.rows, arguments.away_seconds)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    order = [name for name in PEERS if name in found["peers"]]
    found["peers"] = {name: found["peers"][name] for name in order}
    found["peers"] |= {title: {"title": title, "not_run": why} for title, why in NOT_RUN.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()

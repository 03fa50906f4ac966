"""What a short run costs: when each thing happens from the command to its exit, and what each process takes.

    python -m benchmarks.start [--rows 500] [--concurrency 64] [--workers 1] [--again] [--json FILE]

The endpoint runs so many requests at once, each takes a second. Times are seconds since the command was started, seen
from outside: by requests that arrive, by files, by processes. Most memory of each process (PSS: what is shared is
divided), its CPU, all its children in. --again: the same command once more on the complete run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from app.sglang.client import _CANARY_IDS
from app.sglang.simulator import SimulatorConfig, api, running_simulator, server
from tests.acceptance.harness import IDS, TOKENIZER
from tests.belt import ROOT

_TOKENS, _LOOK_SECONDS = 100, 0.01
_ROLES = {"worker": "worker", "collect": "collector", "produce": "producer", "run": "run"}


class Timeline:
    """What happened when, seconds since the command; each thing once, at its first or last time."""

    def __init__(self):
        self.begun, self.first, self.last = time.monotonic(), {}, {}

    def note(self, what: str) -> None:
        """It happens now."""
        now = time.monotonic() - self.begun
        self.first.setdefault(what, now)
        self.last[what] = now


class _Timed(api.Api):
    """An endpoint that notes when it is asked and when it has answered."""

    timeline: Timeline

    async def handle(self, request):
        self.timeline.note(f"endpoint asked: {request.path}")
        return await super().handle(request)

    async def _answered(self, request, asked, fault):
        if list(asked.asks[0].ids) == list(_CANARY_IDS):
            return await super()._answered(request, asked, fault)
        self.timeline.note("row asked")
        answer = await super()._answered(request, asked, fault)
        self.timeline.note("row answered")
        return answer


class Watched:
    """The processes of a run: when each was there first and last, the most it took."""

    def __init__(self, pid: int, timeline: Timeline):
        self._root, self._timeline = psutil.Process(pid), timeline
        self._roles: dict[int, str] = {}
        self.most: dict[str, dict[str, float]] = {}
        self._measured_at = 0.0

    def look(self) -> None:
        """Cheap; memory and CPU are measured twice a second."""
        measure = time.monotonic() - self._measured_at > 0.5
        if measure:
            self._measured_at = time.monotonic()
        now: dict[str, dict[str, float]] = {}
        try:
            everything = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return
        for process in everything:
            try:
                role = self._role(process)
                self._timeline.note(f"process {role}")
                if measure:
                    figures = now.setdefault(role, {"pss_mb": 0.0, "rss_mb": 0.0, "cpu_seconds": 0.0})
                    memory, cpu = process.memory_full_info(), process.cpu_times()
                    figures["pss_mb"] += memory.pss / 1e6
                    figures["rss_mb"] += memory.rss / 1e6
                    figures["cpu_seconds"] += cpu.user + cpu.system
            except (psutil.Error, IndexError):
                continue
        if measure:
            now["all"] = {name: sum(one[name] for one in now.values()) for name in ("pss_mb", "rss_mb", "cpu_seconds")}
        for role, figures in now.items():
            known = self.most.setdefault(role, dict.fromkeys(figures, 0.0))
            known.update({name: max(known[name], figure) for name, figure in figures.items()})

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self._root.pid:
            return "run"
        if self._roles.get(process.pid, "run") == "run":  # what stands by has the name of `run`
            words = process.cmdline()
            role = next((_ROLES[word] for word in words[3:4] if word in _ROLES), None)
            self._roles[process.pid] = role or ("redis" if "valkey" in words[0] or "redis" in words[0] else "renderer")
        return "standing by" if self._roles[process.pid] == "run" else self._roles[process.pid]


def play(command: list[str], raw: Path, sample: Path) -> tuple[Timeline, Watched, float]:
    """Run it to its end; CPU seconds of all that ended in good order."""
    timeline = _Timed.timeline = Timeline()
    sizes = {raw: 0, sample: 0}
    with tempfile.TemporaryFile() as talk:
        before = psutil.Process().cpu_times()
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk)
        watched = Watched(process.pid, timeline)
        while process.poll() is None:
            watched.look()
            for path, size in sizes.items():
                if path.exists() and path.stat().st_size != size:
                    sizes[path] = path.stat().st_size
                    timeline.note(f"line in {path.name}")
            time.sleep(_LOOK_SECONDS)
        timeline.note("exit")
        after = psutil.Process().cpu_times()
        if process.returncode:
            talk.seek(0)
            raise SystemExit(talk.read().decode())
    return timeline, watched, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = SimulatorConfig(
        **IDS, output_lengths="fixed", output_mean=_TOKENS, step_seconds=0.01, step_seconds_per_token=0.0,
        max_running_requests=arguments.concurrency,
    )  # fmt: skip
    server.Api = _Timed
    with tempfile.TemporaryDirectory() as name, running_simulator(config) as endpoint:
        out, prompts = Path(name) / "out", Path(name) / "rows.jsonl"
        with prompts.open("w") as file:
            file.writelines(f'{{"prompt": "What is {n} plus {n * 7 % 1000}?"}}\n' for n in range(arguments.rows))
        words = ["run", prompts, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--out", out, "--concurrency",
                 arguments.concurrency, "--max-new-tokens", 128, "--workers", arguments.workers]  # fmt: skip
        command = [sys.executable, "-m", "app.cli.main", *map(str, words)]
        found = {}
        for which in ("first", "again")[: 1 + arguments.again]:
            timeline, watched, cpu = play(command, out / "rows/raw_responses.jsonl", out / "rows/tokenized_data.jsonl")
            found[which] = _show(which, timeline, watched, cpu, arguments.rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _show(which: str, timeline: Timeline, watched: Watched, cpu: float, rows: int) -> dict:
    print(f"{which:<44}{'first':>8}{'last':>8}")
    for what, at in sorted(timeline.first.items(), key=lambda one: one[1]):
        print(f"{what:<44}{at:8.2f}{timeline.last[what]:8.2f}")
    print(f"{'':<44}{'PSS MB':>8}{'RSS MB':>8}{'CPU s':>8}")
    for role, most in watched.most.items():
        print(f"{role:<44}{most['pss_mb']:8.1f}{most['rss_mb']:8.1f}{most['cpu_seconds']:8.2f}")
    print(f"CPU altogether {cpu:.2f} s, {1000 * cpu / rows:.1f} ms a row", flush=True)
    return {"first": timeline.first, "last": timeline.last, "most": watched.most, "cpu_seconds": cpu}


if __name__ == "__main__":
    main()

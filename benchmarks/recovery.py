"""Endpoints that are slow, die and return, and a fleet that is down: what the run loses, and what it costs to wait.

    python benchmarks/recovery.py [--rows 2500] [--down-seconds 120] [--only uneven|outage] [--json FILE]

uneven: three endpoints, one ten times slower, one killed when 30 % of the rows are done and started again at 60 %.
    occupancy  running requests ÷ what the endpoints that live can run, from the first full moment until the queue ends
outage: two endpoints, both killed in mid-run, started again DOWN seconds later.
    cpu        of a core, all processes of `headrace run` together, while it waits
busy: seconds from the moment at which a server listens until it runs 75 % of what it can. Real processes throughout:
`headrace run` as its user starts it, servers that are SIGKILLed. Exit 1 if a bar is missed.
"""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.acceptance.harness import IDS, TOKENIZER, Run, run, status, verified  # noqa: E402
from tests.belt import until  # noqa: E402

SLOTS, TOKENS, STEP_SECONDS = 48, 100, 0.02  # a request takes 2 s, a server does 24 rows a second
#: Of what a server can run, from which on it counts as busy.
FULL = 0.75 * SLOTS


@dataclass
class Server:
    """A simulated server in a process of its own, on one port all its life."""

    slow: float = 1.0
    port: int = field(default_factory=lambda: _free_port())
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start it; the moment at which it listens."""
        config = {**IDS, "output_lengths": "fixed", "output_mean": TOKENS, "step_seconds": STEP_SECONDS,
                  "step_seconds_per_request": 0.0, "max_running_requests": SLOTS}  # fmt: skip
        faults = {"slow": self.slow}
        words = ["simulate", "--port", self.port, "--config", json.dumps(config), "--faults", json.dumps(faults)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli.main", *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.process.stdout.readline()
        return time.monotonic()

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait()

    def running(self) -> int | None:
        """Requests it runs; None: it is away."""
        try:
            with urllib.request.urlopen(f"{self.url}/_sim/stats", timeout=5) as answer:
                return json.load(answer)["running"]
        except OSError:
            return None


class Watcher:
    """Looks at servers ten times a second, from a thread."""

    def __init__(self, servers: list[Server]):
        self._servers, self.looks = servers, []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.looks.append((time.monotonic(), [server.running() for server in self._servers]))

    def full_at(self, number: int, since: float) -> float:
        """Seconds from `since` until a server was full; -1: never."""
        return next((round(at - since, 2) for at, n in self.looks if at > since and (n[number] or 0) >= FULL), -1.0)

    def running_at(self, number: int, moment: float) -> int:
        """What a server ran then."""
        return next(n[number] or 0 for at, n in self.looks if at >= moment)

    def occupancy(self, until_moment: float) -> float:
        """Running ÷ slots of those that lived, from the first moment at which all were full."""
        began = next(at for at, n in self.looks if all((one or 0) >= FULL for one in n))
        lived = [one for at, n in self.looks if began <= at < until_moment for one in n if one is not None]
        return sum(lived) / len(lived) / SLOTS


def uneven(rows: int) -> dict[str, float]:
    """Three unequal endpoints, one of which dies and returns."""
    servers = [Server(), Server(slow=10.0), Server()]
    back = 0.0

    def story(started: Run, watcher: Watcher) -> None:
        nonlocal back
        until(lambda: started.lines() > 0.3 * rows, 300, "30 %")
        servers[2].kill()
        until(lambda: started.lines() > 0.6 * rows, 300, "60 %")
        back = servers[2].start()
        until(lambda: started.lines() > rows - 3 * SLOTS - 60, 300, "the end of the queue")

    figures, watcher, ended = play(servers, rows, story)
    return figures | {"occupancy": round(watcher.occupancy(ended), 3), "busy_seconds": watcher.full_at(2, back)}


def outage(rows: int, down_seconds: float) -> dict[str, float]:
    """Everything is down for a while."""
    servers = [Server(), Server()]
    found: dict[str, float] = {}
    back = [0.0, 0.0]

    def story(started: Run, watcher: Watcher) -> None:
        until(lambda: started.lines() > 0.3 * rows, 300, "30 %")
        for server in servers:
            server.kill()
        time.sleep(min(8.0, down_seconds / 4))  # what was in flight fails, and is back in line
        found["cpu"], shares = cpu_of(started, down_seconds - 8.0)
        print("cpu by process:", ", ".join(f"{name} {share:.2%}" for name, share in shares), file=sys.stderr)
        assert "waiting: " in started.log.read_text(), "the run does not say what it waits for"
        for number, server in enumerate(servers):
            back[number] = server.start()
        until(lambda: started.lines() > 0.8 * rows, 300, "it goes on")

    figures, watcher, _ = play(servers, rows, story)
    found["busy_seconds"] = max(watcher.full_at(number, back[number]) for number in range(2))
    found["running_after_half_a_second"] = max(watcher.running_at(n, back[n] + 0.5) for n in range(2))
    return figures | found


def play(servers: list[Server], rows: int, story: Callable) -> tuple[dict[str, float], Watcher, float]:
    """One run over so many rows; what became of them, what was seen, and when the story was over."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "rows.jsonl", Path(folder) / "out"
        data.write_text("".join(json.dumps({"prompt": f"What is {n} times {n + 1}?"}) + "\n" for n in range(rows)))
        words = [word for server in servers for word in ("--endpoint", server.url)]
        try:
            for server in servers:
                server.start()
            words = [data, *words, "--tokenizer", TOKENIZER, "--max-new-tokens", 128]
            with run(out, *words) as started, Watcher(servers) as watcher:
                story(started, watcher)
                ended = time.monotonic()
                assert started.wait(600) in (0, 5), started.text()
            logs = "".join(log.read_text() for log in (out / ".headrace" / "logs").glob("worker-*.log"))
            totals = status(out)["totals"]
            verified(out)
            figures = {"rows": totals["tokenized"], "rejected": totals["rejected"],
                       "charged": len(re.findall(r"charged=True", logs))}  # fmt: skip
            return figures, watcher, ended
        finally:
            for server in servers:
                if server.process is not None:
                    server.process.send_signal(signal.SIGKILL)
                    server.process.wait()


def cpu_of(started: Run, seconds: float) -> tuple[float, list[tuple[str, float]]]:
    """Of a core, in all processes of a run together, and in each."""
    processes = started.everything()
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(seconds)
    shares = [
        (_name(process), (sum(process.cpu_times()[:2]) - spent) / seconds)
        for process, spent in zip(processes, before, strict=True)
    ]
    return round(sum(share for _, share in shares), 4), shares


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((word for word in ("run", "worker", "produce", "collect") if word in words), Path(words[0]).name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


BARS = {
    "uneven": {"rejected": (0, 0), "charged": (0, 0), "occupancy": (0.95, 1.0), "busy_seconds": (0, 5.0)},
    "outage": {"rejected": (0, 0), "charged": (0, 0), "cpu": (0, 0.02), "busy_seconds": (0, 5.0)},
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2500)
    parser.add_argument("--down-seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=list(BARS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    scenes = {
        "uneven": lambda: uneven(arguments.rows), "outage": lambda: outage(arguments.rows, arguments.down_seconds)
    }  # fmt: skip
    found = {name: scene() for name, scene in scenes.items() if arguments.only in (None, name)}
    missed = 0
    for name, figures in found.items():
        for figure, value in figures.items():
            least, most = BARS[name].get(figure, (float("-inf"), float("inf")))
            verdict = "" if figure not in BARS[name] else "ok" if least <= value <= most else "MISSED"
            missed += verdict == "MISSED"
            print(f"{name:<8} {figure:<28} {value:>10,.3f}  {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

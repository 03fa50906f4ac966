"""Real runs in real processes: start one, look into it, kill parts of it."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.sglang.client import _CANARY_IDS
from app.sglang.simulator import RunningSimulator, prompt_hash
from tests.belt import ROOT, until

DEMO = ROOT / "app" / "demo_data"
TOKENIZER = DEMO / "tokenizer"
#: Ids that the demo tokenizer can decode.
IDS = {"id_low": 256, "id_high": 4000, "tokenizer_dir": str(TOKENIZER)}


@dataclass
class Run:
    """A `headrace run` process and its directory."""

    out: Path
    process: subprocess.Popen
    log: Path

    def child(self, *words: str) -> psutil.Process:
        """The child process whose command line holds these words."""
        return until(lambda: self.find(*words), what=f"a child with {words}")

    def find(self, *words: str) -> psutil.Process | None:
        """That child, None if there is none now."""
        for child in self.everything()[1:]:
            try:
                line = " ".join(child.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                return child
        return None

    def everything(self) -> list[psutil.Process]:
        """The process and all below it."""
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.Error:
            return []

    def lines(self, name: str = "raw_responses.jsonl") -> int:
        """Whole lines of a file over all datasets."""
        return sum(path.read_bytes().count(b"\n") for path in self.out.glob(f"*/{name}"))

    def wait(self, seconds: float = 90.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def text(self) -> str:
        """What it said, and its processes' logs."""
        logs = [self.log, *sorted((self.out / ".headrace" / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


@contextmanager
def run(out: Path, *arguments: str, command: str = "run", environment: dict[str, str] | None = None) -> Iterator[Run]:
    """Start `headrace run`; whatever is left of it at the end is killed."""
    with launched(out, command, "--out", out, *arguments, environment=environment) as started:
        yield started


@contextmanager
def launched(out: Path, *words: object, environment: dict[str, str] | None = None) -> Iterator[Run]:
    """Start any command that works on `out`; whatever is left of it at the end is killed."""
    log = out.parent / f"{out.name}.talk"
    with log.open("ab") as talk:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli.main", *map(str, words)], cwd=ROOT,
            stdout=talk, stderr=talk, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "HEADRACE_LOG_LEVEL": "INFO", **(environment or {})},
        )  # fmt: skip
    started = Run(out, process, log)
    try:
        yield started
    finally:
        for left in started.everything():
            try:
                left.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        process.wait()


def headrace(*arguments: object, timeout: float = 60.0) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def ids(out: Path, name: str = "raw_responses.jsonl") -> list[str]:
    """The ids in a file over all datasets, in order."""
    return [json.loads(line)["id"] for path in sorted(out.glob(f"*/{name}")) for line in path.open("rb")]


def verified(out: Path) -> dict:
    """The report of `verify`, which must be clean."""
    done = headrace("verify", out, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def status(out: Path) -> dict:
    """The inventory."""
    done = headrace("status", out, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def extra_requests(*endpoints: RunningSimulator) -> int:
    """Requests beyond the first for each prompt, over all endpoints; canaries are not counted."""
    sent: Counter[str] = Counter()
    for endpoint in endpoints:
        for prompt, counts in endpoint.stats()["prompts"].items():
            sent[prompt] += counts["requests"]
    del sent[prompt_hash(_CANARY_IDS)]
    return sent.total() - len(sent)

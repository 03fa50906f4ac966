"""`--on-down` and `--on-up`: a person's commands when an endpoint is lost, and when it is back.

One process of a run reads the breakers' log of changes: its supervisor, or its collector where workers run elsewhere.
So a change starts a command once, however many workers saw it. Commands for one endpoint run one after the other, in
the order of its changes; nothing waits for them, and a failure is one line of talk.
"""

import logging
import os
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis

from app.store.breaker import Change, ChangeLog
from app.store.connection import AWAY

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OnChange:
    """What to run; None: nothing."""

    down: str | None = None
    up: str | None = None


NOTHING = OnChange()


@dataclass(slots=True)
class ChangeCommands:
    """Starts the commands for one run's endpoints. `heed()` is called every second or so, and never waits."""

    client: redis.Redis
    wanted: OnChange
    log_path: Path  #: their output
    say: Callable[[str], None]
    _log: ChangeLog | None = None
    _due: dict[str, deque[Change]] = field(default_factory=lambda: defaultdict(deque))
    _running: dict[str, tuple[Change, subprocess.Popen]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.wanted != NOTHING:
            self._log = ChangeLog(self.client)  # what happened before is nobody's change

    def heed(self, urls: list[str]) -> None:
        """Start what is due for these endpoints, tell what failed."""
        if self._log is None:
            return
        try:
            for change in self._log.new():
                if change.url in urls and self._command(change):
                    self._due[change.url].append(change)
        except AWAY:
            return  # they are still there when it is back
        for url, (change, process) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[url]
                self._tell(change, process.returncode)
        for url, due in self._due.items():
            if due and url not in self._running:
                self._start(due.popleft())

    def _command(self, change: Change) -> str | None:
        return self.wanted.down if change.is_down else self.wanted.up

    def _start(self, change: Change) -> None:
        environment = {
            "HEADRACE_ENDPOINT": change.url, "HEADRACE_CHANGE": "down" if change.is_down else "up",
            "HEADRACE_EVIDENCE": change.evidence, "HEADRACE_SINCE": f"{change.since:.3f}",
            "HEADRACE_SECONDS": f"{max(0.0, time.time() - change.since):.1f}",
        }  # fmt: skip
        try:
            with self.log_path.open("ab") as output:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command(change)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True, env={**os.environ, **environment},
                )  # fmt: skip
        except OSError as exc:
            self.say(f"{_option(change)} for {change.url} could not be started: {exc.strerror}")
            return
        log.warning("command_started %s for %s, pid %d", _option(change), change.url, process.pid)
        self._running[change.url] = change, process

    def _tell(self, change: Change, status: int) -> None:
        log.warning("command_ended %s for %s: %d", _option(change), change.url, status)
        if status != 0:
            self.say(f"{_option(change)} for {change.url} ended with {status}; its output is in {self.log_path}")


def _option(change: Change) -> str:
    return "--on-down" if change.is_down else "--on-up"

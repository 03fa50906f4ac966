"""The processes of one run on this machine, each started again if it dies, all ended with the supervisor."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.spare import Spare
from app.cli.talk import PREFIX
from app.store.embedded import end_with_parent
from app.store.names import SUPERVISOR

log = logging.getLogger(__name__)
_RESTART_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0)
_CALM_SECONDS = 60.0  # a process that lived this long starts again at once


@dataclass(slots=True)
class Child:
    """One process: what it runs, and how often it had to be started again."""

    name: str
    arguments: list[str]
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)  #: what the command line of a process must not show
    process: subprocess.Popen | Spare | None = None
    started_at: float = 0.0
    deaths: int = 0
    start_at: float = field(default=0.0)

    def start(self, spare: Spare | None = None) -> None:
        """Start it, in a session of its own: Ctrl-C reaches the supervisor alone. spare: a process that can be it."""
        self.started_at = time.monotonic()
        known = {**self.environment, SUPERVISOR: str(os.getpid())}
        with self.log_path.open("ab") as log_file:  # a spare opens it, too, and could tell nobody that it cannot
            if spare is not None and spare.tell(self.arguments, self.log_path, known):
                self.process = spare
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.cli.main", *self.arguments], stdin=subprocess.DEVNULL, stdout=log_file,
                stderr=log_file, start_new_session=True, preexec_fn=end_with_parent(signal.SIGQUIT),
                env={**os.environ, **known},
            )  # fmt: skip

    def ended(self) -> int | None:
        """Exit status, or None while it runs or waits to be started again."""
        return self.process.poll() if self.process is not None else None

    @property
    def running(self) -> bool:
        """Whether there is a process now."""
        return self.process is not None and self.process.poll() is None

    def start_again(self) -> None:
        """After a death: at once the first time, then with growing pauses."""
        now = time.monotonic()
        if self.process is not None:
            if now - self.started_at > _CALM_SECONDS:
                self.deaths = 0
            pause = _RESTART_SECONDS[min(self.deaths, len(_RESTART_SECONDS) - 1)]
            log.warning("process_died %s (%s); starting it again in %g s", self.name, _how(self.process), pause)
            self.deaths += 1
            self.process, self.start_at = None, now + pause
        if now < self.start_at:
            return
        try:
            self.start()
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            log.warning("process_not_started %s: %s", self.name, exc.strerror)
            self.start_at = now + _RESTART_SECONDS[-1]

    def signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.running:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False if it still runs."""
        if self.process is None:
            return True
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """The last line of its log, without our prefix."""
        try:
            lines = self.log_path.read_text("utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].removeprefix(PREFIX) if lines else ""


def _how(process: subprocess.Popen | Spare) -> str:
    status = process.returncode
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}"

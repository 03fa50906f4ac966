"""One holder for a directory, known by name: a second run on it is refused and told who has it.

Invariant: at most one live process holds a lock. `flock` says so on one machine and dies with its process. Where it
does not reach (some network filesystems), the holder's heartbeat does: a younger one than `STALE_SECONDS` from another
host is respected. Ages come from the filesystem's own clock, since clocks of two hosts may differ. A holder that was
stopped for longer, and replaced, finds that out before it writes anything (`refuse_if_lost`).
"""

import fcntl
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from app.errors import StorageError, UsageError

STALE_SECONDS = 60.0  #: a holder on another host that was silent for so long is taken for dead
HEARTBEAT_SECONDS = 15.0  #: how often a holder shows that it lives, by itself
_TRIES, _TRY_SECONDS = 4, 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as it stands in the lock file. Times are ISO 8601, UTC, by the holder's own clock."""

    host: str
    pid: int
    command: str
    purpose: str
    since: str
    heartbeat: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} ({self.command}: {self.purpose}) since {self.since}"


class Held:
    """A lock in our hands; a thread of ours shows that we live, whatever else this process does."""

    def __init__(self, path: Path, fd: int, holder: Holder):
        self._path, self._fd = path, fd
        self.holder = holder

    def touch(self) -> None:
        """Show that we live. Raises UsageError if somebody else has the lock by now."""
        self.refuse_if_lost()
        self._sign()

    def refuse_if_lost(self) -> None:
        """Raise UsageError if somebody else took the lock: we were stopped for long, and taken for dead."""
        try:
            fd = os.open(self._path, os.O_RDONLY)  # by its path: the file may be another one, too
        except OSError:  # moved or removed with its directory: nobody has it
            return
        try:
            found = _read(fd)
        finally:
            os.close(fd)
        if found is not None and replace(found, heartbeat="") != replace(self.holder, heartbeat=""):
            raise UsageError(
                f"{_folder(self._path)} was taken over by {found} while this process stood still; it writes no more"
            )

    def _sign(self) -> None:
        self.holder = replace(self.holder, heartbeat=_now())
        self._write(orjson.dumps(asdict(self.holder)))

    def _beat(self, over: threading.Event, seconds: float) -> None:
        while not over.wait(seconds):
            try:
                self.touch()
            except UsageError as exc:
                log.error("lock_lost: %s", exc)
                return
            except OSError as exc:
                log.warning("lock_heartbeat_missed: %s", exc)

    def _let_go(self) -> None:
        try:
            self.refuse_if_lost()
        except UsageError:
            return  # what stands there is somebody else's
        self._write(b"")

    def _write(self, data: bytes) -> None:
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))
        os.fsync(self._fd)  # on a network filesystem others see it only now


@contextmanager
def hold(path: Path, purpose: str, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> Iterator[Held]:
    """Hold the lock file `path` while the block runs. Raises UsageError that names the holder if there is one.

    `purpose` tells people what it is held for, such as "collecting results".
    """
    try:
        fd = _take(path)
    except OSError as exc:
        raise StorageError(f"{path}: cannot lock: {exc.strerror}") from exc
    try:
        held, over = Held(path, fd, _ourselves(purpose)), threading.Event()
        held._sign()
        thread = threading.Thread(target=held._beat, args=(over, heartbeat_seconds), name="lock", daemon=True)
        thread.start()
        try:
            yield held
        finally:
            over.set()
            thread.join()
            held._let_go()
    finally:
        os.close(fd)


def holder(path: Path) -> Holder | None:
    """Who holds the lock file now; None if nobody does. Takes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = _read(fd)
        alone = found is not None and _flock(fd, fcntl.LOCK_SH)
        return None if found is None or (alone and not respected(found, _age_seconds(fd, path))) else found
    finally:
        os.close(fd)


def respected(found: Holder, age_seconds: float) -> bool:
    """Whether a holder may be alive although `flock` lets us in: on another host, and heard of lately."""
    return found.host != socket.gethostname() and age_seconds < STALE_SECONDS


def _take(path: Path) -> int:
    """An open, locked file, or UsageError. A lock file that was removed under us is made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _refuse_if_held(fd, path)
            if _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _refuse_if_held(fd: int, path: Path) -> None:
    granted = _flock(fd, fcntl.LOCK_EX, tries=_TRIES)
    found = _read(fd)
    if not granted:
        who = found or "another process"
        raise UsageError(f"{_folder(path)} is in use by {who}; wait for it, stop it, or choose another directory")
    if found is None:
        return
    age = _age_seconds(fd, path)
    if respected(found, age):
        raise UsageError(
            f"{_folder(path)} is in use by {found}, heard of {age:.0f} s ago; "
            f"if that is dead, try again in {STALE_SECONDS - age:.0f} s"
        )
    if found.host != socket.gethostname():
        log.warning("lock_taken_over: %s was held by %s, silent for %.0f s", _folder(path), found, age)


def _flock(fd: int, how: int, tries: int = 1) -> bool:
    """Whether the lock was granted. Several tries outlast a `holder` that looks at the same moment."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(_TRY_SECONDS)
    return False


def _read(fd: int) -> Holder | None:
    """The holder in the file; None if it is empty or not ours."""
    try:
        return Holder(**orjson.loads(os.pread(fd, 1 << 16, 0)))
    except (ValueError, TypeError):
        return None


def _age_seconds(fd: int, path: Path) -> float:
    """How long ago the file was written, by the clock of its filesystem: against a file written there now."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as now:
            now.write(b"now")
            now.flush()
            return os.fstat(now.fileno()).st_mtime - os.fstat(fd).st_mtime
    except OSError:  # no right to write, or no room: the host's clock must do
        return datetime.now(UTC).timestamp() - os.fstat(fd).st_mtime


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _folder(path: Path) -> Path:
    """The directory people know: the lock lies in its `.headrace`."""
    return path.parent.parent if path.parent.name == ".headrace" else path.parent


def _ourselves(purpose: str) -> Holder:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])  # the rest may hold API keys
    return Holder(socket.gethostname(), os.getpid(), command, purpose, _now(), _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

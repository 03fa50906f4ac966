"""A Redis of a test's own on a port that stays the same: to be killed, emptied, filled, frozen and started again."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Self

import redis

from app.store.connection import connect
from app.store.embedded import end_with_parent, server_binary
from tests.belt import until


class OwnRedis:
    """A server process; `url` is its address. Use as a context manager."""

    def __init__(self, folder: Path, *options: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder, self._options = folder, options
        self.process: subprocess.Popen | None = None

    def start(self, *, aof: bool = True) -> None:
        """Start it and wait until it answers; without `aof`, what it knew is gone."""
        if not aof:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        words = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
        self.process = subprocess.Popen(
            [server_binary(), *words, *self._options], stdout=subprocess.DEVNULL, preexec_fn=end_with_parent(),
        )  # fmt: skip
        until(self._answers, what="a Redis")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def freeze(self, frozen: bool = True) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self.process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A connection to it."""
        return connect(self.url)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "this Redis ended at once"
        try:
            return bool(self.client().ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

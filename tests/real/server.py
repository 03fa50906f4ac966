"""A real SGLang server on this machine: started, waited for, killed in the ways in which servers die."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.store.embedded import end_with_parent

READY_SECONDS = 300.0  #: importing SGLang takes a busy machine of two cores more than a minute
_ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip
_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--enable-metrics",
          "--sleep-on-idle")  # fmt: skip


class RealServer:
    """One server over its deaths: the port stays. Use `running_server`."""

    def __init__(self, python: Path, model: Path, log: Path, flags: tuple[str, ...]):
        self.model, self.log, self.port = model, log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), *_FLAGS, *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen | None = None
        self._below: list[psutil.Process] = []

    def start(self) -> None:
        """Launch it; it answers some time later."""
        assert self._process is None or self._process.poll() is not None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **_ON_CPU}, preexec_fn=end_with_parent(),
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Until it has generated a token. Raises AssertionError with the end of its log."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers():
            assert self.alive, f"it ended: {self.log.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, f"not ready: {self.log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.5)
        self._below = psutil.Process(self._process.pid).children(recursive=True)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=25).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def alive(self) -> bool:
        """Whether its main process is there."""
        return self._process is not None and self._process.poll() is None

    def kill_scheduler(self) -> None:
        """SIGKILL of the process that generates; the main process notices, stays silent for a while, and ends."""
        for child in self._below:
            if child.is_running() and "scheduler" in " ".join(child.cmdline()):
                child.kill()
                return
        raise AssertionError("no scheduler process")

    def kill(self) -> None:
        """SIGKILL of the main process and of all that is left below it."""
        if self.alive:
            self._process.kill()
        self.reap()

    def terminate(self) -> None:
        """SIGTERM: it finishes what it has, and ends."""
        self._process.send_signal(signal.SIGTERM)

    def wait_gone(self, seconds: float = 120.0) -> int:
        """Its exit status."""
        status = self._process.wait(seconds)
        self.reap()
        return status

    def reap(self) -> None:
        """No process of it is left, so that its port is free."""
        if self._process is not None:
            self._process.wait(120)
        for child in self._below:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(self._below, timeout=30)
        self._below = []


@contextmanager
def running_server(python: Path, model: Path, log: Path, *flags: str, **sizes: int) -> Iterator[RealServer]:
    """A server, ready. sizes: context, kv, running (tokens, tokens, requests)."""
    known = {"context": 2048, "kv": 16_384, "running": 16, **sizes}
    names = {"context": "--context-length", "kv": "--max-total-tokens", "running": "--max-running-requests"}
    limits = [word for name, value in known.items() for word in (names[name], str(value))]
    server = RealServer(python, model, log, (*limits, *flags))
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url: str, path: str, body: dict[str, Any], key: str = "", seconds: float = 120.0) -> httpx.Response:
    """A request as it stands, with none of our own checks."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=seconds)


def get(url: str, path: str, key: str = "") -> httpx.Response:
    """What is there."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}{path}", headers=headers, timeout=30)


def metric(url: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples, of those with a label."""
    lines = get(url, "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{") and label in line)

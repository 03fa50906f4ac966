"""The run under attack: real processes, two simulated servers behind proxies, a small disk; how each fault is done."""

import errno
import itertools
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from redis.exceptions import RedisError

from app.rundir import RAW, RunDir
from app.sglang.simulator import RunningSimulator, SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import noted_address
from app.store.keys import EndpointKeys
from app.urls import endpoint_key
from tests.acceptance.harness import IDS, TOKENIZER, Run, run
from tests.chaos.plan import Fault
from tests.proxy import Proxy, proxy

_MARK = "HEADRACE_CHAOS"  # in the environment of every process of one run: its directory
_GLANCE_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0  # for a victim that is just being started again
_CHILDREN = {"collector": ("collect",), "producer": ("produce",), "redis": ("valkey-server",)}
ENDPOINT = SimulatorConfig(
    **IDS, output_mean=40, step_seconds=0.02, max_total_num_tokens=40_000, disconnect_seconds=0.5, health_seconds=0.01
)


class Scene:
    """One run, started again whenever it was killed."""

    def __init__(self, out: Path, inputs: list[Path], endpoints: list[RunningSimulator], proxies: list[Proxy]):
        self.out, self.endpoints, self._proxies = out, endpoints, proxies
        self._words = [
            *inputs, "--tokenizer", TOKENIZER, "--max-new-tokens", 128, "--workers", 2, "--concurrency", 40,
            *itertools.chain.from_iterable(("--endpoint", one.url) for one in proxies),
        ]  # fmt: skip
        self._stack = ExitStack()
        self._undoing: list[threading.Timer] = []
        self._read: dict[Path, tuple[int, int]] = {}  # file → (bytes read, lines in them)
        self.run: Run | None = None
        self.in_flight_lost = 0  #: requests at the endpoints that faults may have cost, at most
        self.injected: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def start(self) -> None:
        """The same command, first and again."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._stack.close()
        environment = {_MARK: str(self.out)}
        self.run = self._stack.enter_context(run(self.out, *self._words, environment=environment))

    def close(self) -> None:
        """End what is left, and everything that was going to end by itself."""
        for timer in self._undoing:
            timer.join()
        self._stack.close()

    def lines(self) -> int:
        """Raw lines on disk; reads only what is new."""
        for path in self.out.glob(f"*/{RAW}"):
            at, count = self._read.get(path, (0, 0))
            with suppress(OSError), path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < at:
                    at = count = 0  # a torn end was cut
                file.seek(at)
                data = file.read()
                self._read[path] = at + len(data), count + data.count(b"\n")
        return sum(count for _, count in self._read.values())

    def orphans(self) -> list[str]:
        """Processes of this run that live although it has ended."""
        return marked(self.out)

    # --- faults ---

    def inject(self, fault: Fault) -> None:
        """Do it. What lasts ends by itself, other faults may strike meanwhile."""
        done = getattr(self, f"_{fault.action}")(fault)
        (self.skipped if done is False else self.injected)[fault.kind] += 1

    def _kill(self, fault: Fault) -> bool:
        victims = self.run.everything() if fault.target == "everything" else [self._victim(fault)]
        costly = fault.target in ("worker", "everything", "supervisor")
        workers = list(filter(None, (self.run.find(*_worker(n)) for n in range(2))))
        with self._losing(*(self.endpoints if costly else ())):
            for victim in filter(None, victims):
                with suppress(psutil.Error):
                    victim.kill()
            if fault.target == "supervisor":  # its workers send requests until they notice
                psutil.wait_procs(workers, _PATIENCE_SECONDS)
        if fault.target in ("everything", "supervisor"):
            self.run.process.wait()
            self.start()
        return victims != [None]

    def _stop(self, fault: Fault) -> bool:
        victim = self._victim(fault)
        if victim is None:
            return False
        with suppress(psutil.Error):
            victim.suspend()
            self._later(fault.seconds, victim.resume)
        return True

    def _restart(self, fault: Fault) -> bool:
        """In good order, as an administrator does; the supervisor starts it again."""
        victim = self._victim(fault)
        if victim is not None:
            with suppress(psutil.Error):
                victim.terminate()
        return victim is not None

    def _kick(self, fault: Fault) -> bool:
        """All connections to Redis closed, three times within a second."""
        kicked, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
        while kicked < 3 and time.monotonic() < deadline:
            with suppress(RedisError, OSError):
                client = connect(noted_address(RunDir(self.out).redis) or "unix:///nowhere")
                client.client_kill_filter(_type="normal", skipme=True)
                client.close()
                kicked += 1
            time.sleep(0.3)
        return kicked > 0

    def _crash(self, fault: Fault) -> None:
        endpoint = self.endpoints[fault.victim]
        endpoint.faults(freeze_seconds=0.3, down_seconds=fault.seconds)
        with self._losing(endpoint):
            endpoint.crash()

    def _refuse(self, fault: Fault) -> None:
        with self._losing(self.endpoints[fault.victim]):
            self._proxies[fault.victim].refuse()
        self._later(fault.seconds, self._proxies[fault.victim].accept)

    def _cut(self, fault: Fault) -> None:
        with self._losing(self.endpoints[fault.victim]):
            self._proxies[fault.victim].cut()

    def _freeze(self, fault: Fault) -> None:
        self._proxies[fault.victim].freeze()
        self._later(fault.seconds, self._proxies[fault.victim].thaw)

    def _fill(self, fault: Fault) -> bool:
        """Not a byte is left on the small disk, for a while."""
        if not self.out.parent.is_mount():
            return False
        filler = self.out.parent / f"filler-{uuid.uuid4().hex[:8]}"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise
        self._later(fault.seconds, filler.unlink)
        return True

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        def quietly() -> None:
            with suppress(psutil.Error):
                undo()

        timer = threading.Timer(seconds, quietly)
        timer.start()
        self._undoing.append(timer)

    def _victim(self, fault: Fault) -> psutil.Process | None:
        """The process to hit, None if it is not there now (it was just killed, perhaps)."""
        if fault.target == "supervisor":
            return psutil.Process(self.run.process.pid) if self.run.process.poll() is None else None
        words = _CHILDREN.get(fault.target) or _worker(fault.victim)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.run.find(*words)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    @contextmanager
    def _losing(self, *endpoints: RunningSimulator) -> Iterator[None]:
        """Count what is in flight there when the block ends: what was before it, and what was sent meanwhile.

        What was answered and is not published yet is in flight at its worker: it has its lease.
        """
        before = [(endpoint.stats(), self._leases(endpoint)) for endpoint in endpoints]
        yield
        after = [endpoint.stats() for endpoint in endpoints]
        self.in_flight_lost += sum(
            max(was["in_flight"], leases) + now["requests"] - was["requests"]
            for (was, leases), now in zip(before, after, strict=True)
        )

    def _leases(self, endpoint: RunningSimulator) -> int:
        """Leases that live, by the run's Redis; 0 if it does not answer at once."""
        url = self._proxies[self.endpoints.index(endpoint)].url
        with suppress(RedisError, OSError):
            client = connect(noted_address(RunDir(self.out).redis) or "unix:///nowhere", _GLANCE_SECONDS)
            try:
                return client.zcount(EndpointKeys(endpoint_key(url)).leases, time.time() * 1000, "+inf")
            finally:
                client.close()
        return 0


def _worker(number: int) -> tuple[str, str]:
    """Words in the command line of a worker."""
    return "worker", f"-{number + 1} --slots"


@contextmanager
def scene(folder: Path, inputs: list[Path]) -> Iterator[Scene]:
    """Two servers, their proxies, and a run into `folder`/out that is not started yet."""
    with ExitStack() as stack:
        endpoints = [stack.enter_context(running_simulator(ENDPOINT)) for _ in range(2)]
        proxies = [stack.enter_context(proxy(endpoint.url)) for endpoint in endpoints]
        made = Scene(folder / "out", inputs, endpoints, proxies)
        stack.callback(made.close)
        yield made


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A tmpfs on `folder` while the block runs; False where we may not mount."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Let go of a small disk, if one is there."""
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=False)


def marked(folder: Path) -> list[str]:
    """Processes, as `pid command`, of runs in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(_MARK)
            if mark and Path(mark).is_relative_to(folder):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found


def end(pids: list[str]) -> None:
    """Kill orphans, so that one seed does not disturb the next."""
    for line in pids:
        with suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)

"""Processes that stand by, with their imports done, until they are told which of our commands they are.

Each child of `headrace run` is one at its first start: modules that `run` has loaded are shared instead of read again,
others are imported while `run` still checks settings, tokenizer and endpoints. A child that is started again after its
death is a new process, as it is everywhere but on Linux (fork alone is not safe there).

Invariant: one is forked from the main thread, while the lock's heartbeat is the only other one; it keeps nothing of
its parent's open files, and the parent's stack is never unwound in it.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NoReturn

from app.errors import INCOMPLETE, INTERNAL, OK
from app.store.embedded import end_with_parent

AVAILABLE = sys.platform == "linux"
_POLL_SECONDS = 0.005


class Spare:
    """One such process. Once told, it has of subprocess.Popen what we use."""

    def __init__(self, *modules: str):
        """modules: what it imports while it waits."""
        bound, told = os.pipe()
        ends = end_with_parent(signal.SIGQUIT)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # so that the child's collector writes to no page of what it shares
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid, self.returncode = os.fork(), None
            if self.pid == 0:
                _live(bound, modules, ends)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(bound)
        self._told: int | None = told

    def tell(self, arguments: Sequence[str], log_path: Path, environment: dict[str, str]) -> bool:
        """Have it be `headrace ARGUMENTS`, with these variables more, its words in that log. False: it is dead."""
        if self.poll() is not None:
            return False
        words = json.dumps([list(arguments), str(log_path), environment]) + "\n"
        try:
            with open(self._told, "w") as told:
                told.write(words)
        except BrokenPipeError:
            return False
        finally:
            self._told = None
        return True

    def dismiss(self) -> None:
        """It is not needed: nothing, if it was told."""
        if self._told is not None:
            os.close(self._told)
            self._told = None
            self.send_signal(signal.SIGKILL)
            self.wait()

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it lives."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # a signal's handler, which we may be, asks between the answer and our note of it
                return OK
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """If it still lives."""
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def standing_by(modules: Mapping[str, str]) -> Iterator[dict[str, Spare]]:
    """A spare by each name, with its module imported; those that were not told are dismissed at the end."""
    spares: dict[str, Spare] = {}
    try:
        for name, module in modules.items() if AVAILABLE else ():
            spares[name] = Spare(module)
        yield spares
    finally:
        for spare in spares.values():
            spare.dismiss()


def _live(bound: int, modules: Sequence[str], ends) -> NoReturn:
    """The child, from its first moment to its last."""
    code = INTERNAL
    try:
        ends()
        os.setsid()  # Ctrl-C reaches the supervisor alone
        _begin_anew(bound)
        for name in ("app.cli.main", *modules):
            importlib.import_module(name)
        with open(bound) as told:
            words = told.readline()
        code = _be(*json.loads(words)) if words else OK
    except KeyboardInterrupt:  # sent to it alone, or to all before it had its own session
        code = INCOMPLETE
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    finally:
        os._exit(code)


def _begin_anew(bound: int) -> None:
    """As after exec: signals as by default, no files but the standard ones.

    Their numbers stay taken, for the objects that own them here may still be collected, and would close another's.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a live view had its own
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number not in (1, 2, bound, nothing):
            os.dup2(nothing, number, inheritable=number == 0)


def _be(arguments: list[str], log_path: str, environment: dict[str, str]) -> int:
    from app.cli.main import main

    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    _call_ourselves([sys.executable, "-m", "app.cli.main", *arguments])
    try:
        main(arguments)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _call_ourselves(words: Sequence[str]) -> None:
    """What `ps` shows: written over the command line that we were born with, as far as it goes."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    if not 0 < start < end:  # a sandbox's kernel does not tell
        return
    text = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)

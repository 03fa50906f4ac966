"""Named places at which tests kill the process, to prove what a crash there costs; nothing without the variable.

`HEADRACE_TEST_KILL_AT=NAME[:N][@FILE],...`: SIGKILL where NAME is passed for the N-th time (the first). FILE is made
just before, and nobody dies there once it exists: so that what is started again lives. The names of the main path stand
in the table of docs/architecture.md.
"""

import os
import signal


def crash_point(name: str) -> None:
    """The process may end here."""
    if _planned and name in _planned:
        _planned[name].passed()


class _Crash:
    """One death: after how many passes, and the file that says that it has happened."""

    def __init__(self, count: str, file: str):
        self._left, self._file = int(count or 1), file

    def passed(self) -> None:
        """Die, if this is the time."""
        self._left -= 1
        if self._left == 0 and self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        if not self._file:
            return True
        try:
            os.close(os.open(self._file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _read(text: str) -> dict[str, _Crash]:
    planned = {}
    for one in filter(None, text.split(",")):
        place, _, file = one.partition("@")
        name, _, count = place.partition(":")
        planned[name] = _Crash(count, file)
    return planned


_planned = _read(os.environ.get("HEADRACE_TEST_KILL_AT", ""))

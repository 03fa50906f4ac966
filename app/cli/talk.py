"""Talk goes to stderr, a sentence a line, each beginning with `headrace: `; data goes to stdout.

Invariant: a reader who left (`| head`, a closed terminal) never changes what a command does or how it ends.
"""

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

PREFIX = "headrace: "


def speak_utf8() -> None:
    """Both streams take every character, whatever the locale says: names and sentences must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def keep_standard_files() -> None:
    """A standard stream that was closed by whoever started us becomes /dev/null: or the next file to be opened, a lock,
    would get its number, and children would be given it for a stream, and write into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def say(text: str) -> None:
    """A sentence for people. What cannot be said is dropped: work goes on."""
    with contextlib.suppress(OSError):
        _write(sys.stderr, f"{PREFIX}{text}\n")


def show(data: str) -> None:
    """A line or table of data. Raises OSError if it cannot be kept (a full disk), not if its reader left."""
    _write(sys.stdout, data if data.endswith("\n") else data + "\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as exc:
        _to_nowhere(stream)  # else Python fails over the same bytes once more at its end
        if exc.errno not in (errno.EPIPE, errno.EIO):
            raise


def _to_nowhere(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

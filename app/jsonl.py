r"""The format of every file we leave: one JSON object per line, lines end with `\n`, bytes are split at nothing else.

Invariant: no whole line is ever lost, and no two records ever share a line. A crash can only leave a torn end, so the
one writer cuts that before it appends, and readers take whole lines only. Text may hold U+2028 and friends: they are
no line ends here.
"""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from app.errors import StorageError

_BLOCK_BYTES = 1 << 20


class Line(NamedTuple):
    """A whole line: where it starts, where the next one starts, its bytes without the newline."""

    offset: int
    end: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """What opening a file for appending cut off its end: `bytes_cut` bytes from `offset` on."""

    path: Path
    offset: int
    bytes_cut: int

    def __str__(self) -> str:
        return f"{self.path}: cut {self.bytes_cut:,} bytes of an unfinished write at byte {self.offset:,}"


# --- one line ---


def is_blank(raw: bytes) -> bool:
    """Nothing but white space."""
    return not raw.strip()


def has_nul(raw: bytes) -> bool:
    """A raw NUL byte: a torn write on a network filesystem, never JSON."""
    return b"\0" in raw


def parse(raw: bytes) -> dict[str, Any]:
    """The object of a line. Raises ValueError if it is no strict JSON (NaN, bad UTF-8, NUL, torn) or no object."""
    value = orjson.loads(raw)
    if not isinstance(value, dict):
        raise ValueError(f"a line holds one JSON object, this one a {type(value).__name__}")
    return value


def why_no_json(error: orjson.JSONDecodeError) -> str:
    """What a parser refused, for the middle of a sentence. It takes 1,024 levels; more may be valid, and is no chat."""
    if error.msg == "depth limit exceeded":
        return "nested too deeply (more than 1,024 levels)"
    return f"not valid JSON: {error.msg} (column {error.pos + 1})"


def is_whole(raw: bytes) -> bool:
    """Whether the line holds one JSON object."""
    try:
        parse(raw)
    except ValueError:
        return False
    return True


# --- reading ---


def iterate(path: Path, start: int = 0) -> Iterator[Line]:
    r"""The whole lines from byte `start` on; stops before bytes that lack their `\n`. A missing file has no lines.

    Memory: the longest line. Lines may be blank or damaged: that is the caller's business.
    """
    try:
        file = path.open("rb", buffering=_BLOCK_BYTES)
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield Line(start, start := start + len(raw), raw[:-1])


def line_before(path: Path, end: int) -> Line | None:
    """The whole line that ends at byte `end`; None at the beginning of the file."""
    if end <= 0:
        return None
    with path.open("rb") as file:
        start = _newline_before(file.fileno(), end - 1) + 1
        return Line(start, end, os.pread(file.fileno(), end - 1 - start, start))


# --- appending ---


class Appender:
    """The one writer of a file. Creates it and its folders; on opening cuts the torn end off (`cut` says what).

    keep: (path, end of the whole lines) → end of what is to stay, where more than a torn line makes an end unfinished.
    What is appended is seen by readers at once and is safe after `sync`. Use `with`, or `close`.
    """

    def __init__(self, path: Path, keep: Callable[[Path, int], int] | None = None):
        self.path = path
        self._keep = keep
        self.cut: Cut | None = None
        try:
            self._fd = _open_durably(path)
            self._end = self._cut_torn_end()
        except OSError as exc:
            why = "it is a symbolic link; put the file itself there" if exc.errno == errno.ELOOP else exc.strerror
            raise StorageError(f"{path}: cannot open for appending: {why}") from exc

    @property
    def end(self) -> int:
        """Size of the file in bytes: where the next line will start."""
        return self._end

    def append(self, lines: list[bytes]) -> list[int]:
        """Write whole lines (each with its newline) in one go; returns the byte offset of each.

        All or nothing: when the disk refuses, the file is cut back to where it was and StorageError is raised; also
        when the file is no longer what it was after the last append.
        """
        offsets, end = [], self._end
        for line in lines:
            if not line or line.find(b"\n") != len(line) - 1:
                raise ValueError("a line ends with its one newline")
            offsets.append(end)
            end += len(line)
        before = self._refuse_if_replaced()
        try:
            _write_all(self._fd, b"".join(lines))
        except OSError as exc:
            self._undo(before)
            raise StorageError(f"{self.path}: cannot write: {exc.strerror}; {_remedy(exc)}") from exc
        self._end = end
        return offsets

    def sync(self) -> None:
        """Return when everything appended is on the disk. After a failure nothing is known: stop and start again."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise StorageError(f"{self.path}: cannot flush to disk: {exc.strerror}; {_remedy(exc)}") from exc

    def close(self) -> None:
        """Let go of the file. Does not sync; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_if_replaced(self) -> os.stat_result:
        """What stands at the path must still be what we write, and end where we ended. Raises StorageError."""
        try:
            now = os.stat(self.path)
        except OSError as exc:
            raise StorageError(f"{self.path}: moved or removed while it was written ({exc.strerror})") from exc
        if not os.path.samestat(now, os.fstat(self._fd)):
            raise StorageError(f"{self.path}: replaced by another file while it was written")
        if now.st_size != self._end:
            raise StorageError(f"{self.path}: changed by somebody else while it was written")
        return now

    def _undo(self, before: os.stat_result) -> None:
        """As if nothing had been written: the time, too, or the file would pass for one that was edited."""
        try:
            os.ftruncate(self._fd, self._end)
            os.utime(self._fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError:
            pass  # the next opening cuts the torn end

    def _cut_torn_end(self) -> int:
        size = os.fstat(self._fd).st_size
        end = whole_end(self.path, size)
        end = end if self._keep is None else self._keep(self.path, end)
        if end < size:
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
            self.cut = Cut(self.path, end, size - end)
        return end


def whole_end(path: Path, size: int) -> int:
    r"""Byte after the last line, in the first `size` bytes, that ends with `\n` and holds one JSON object.

    What follows it is an unfinished write: bytes without a newline, NULs, half a record, blank lines.
    """
    last = _last_whole(path, size)
    return last.end if last else 0


def first_and_last(path: Path) -> list[dict[str, Any]]:
    """The records of the first line, if it is whole, and of the last whole line of a file; [] if it has none."""
    last = _last_whole(path, path.stat().st_size) if path.exists() else None
    if last is None:
        return []
    first = next(iterate(path))
    return [parse(line.raw) for line in (first, last) if is_whole(line.raw)]


def _last_whole(path: Path, size: int) -> Line | None:
    with path.open("rb") as file:
        end = _newline_before(file.fileno(), size) + 1
        while end:
            start = _newline_before(file.fileno(), end - 1) + 1
            if is_whole(raw := os.pread(file.fileno(), end - start, start)):
                return Line(start, end, raw[:-1])
            end = start
    return None


def _newline_before(fd: int, stop: int) -> int:
    """Offset of the last newline before byte `stop`, -1 if there is none."""
    while stop > 0:
        start = max(0, stop - _BLOCK_BYTES)
        found = os.pread(fd, stop - start, start).rfind(b"\n")
        if found >= 0:
            return start + found
        stop = start
    return -1


def _open_durably(path: Path) -> int:
    """Open for appending; a name that is new is on the disk before we return."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)  # no link leads us elsewhere
    if new:
        for folder in (path.parent, path.parent.parent):
            sync_folder(folder)
    return fd


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """One write; another only for what a short one left over."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _remedy(exc: OSError) -> str:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space and start again: the run resumes"
    return "when it is mended, start again: the run resumes"

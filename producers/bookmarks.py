"""How far the input was read, so that a pass begins behind the rows that the ledger knows already.

Invariant: what stands before a bookmark is byte for byte what was registered. A file is believed unchanged if it is
the same file of the same size, times and reading rules; whatever of that differs, its bytes are compared by hash,
segment by segment, up to the first that is not what it was.
"""

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import app
from app.ledger import Bookmark, Ledger
from app.settings import RunSettings
from producers.catalog import Chunk, interleave, shape_options
from producers.inputs import Dataset
from producers.readers import RawRow, is_plain_lines, read_lines_at

_EVERY_LINES = 50_000
_SETTLED_SECONDS = 2.0  # a file that was just written may be written again without another time to it
_BLOCK_BYTES = 1 << 20


class InputPass:
    """One reading of the input; makes bookmarks while it reads. behind: by dataset, the bookmarks it begins behind."""

    def __init__(self, datasets: Sequence[Dataset], settings: RunSettings, ledger: Ledger):
        self._datasets, self._settings, self._ledger = datasets, settings, ledger
        shapes = shape_options(settings)
        self._reading = repr((app.__version__, shapes, settings.max_row_bytes)).encode()
        self._marking = settings.limit is None  # another limit next time asks for other rows
        marks = {
            one.name: trusted(one.paths, ledger.bookmarks(one.name), self._reading) if self._marking else []
            for one in datasets
        }  # fmt: skip
        ledger.begin_pass(settings.samples, marks)
        self.behind = {name: ledger.begin_behind(name, some) for name, some in marks.items()}

    def begin_before(self, dataset: str, file: int) -> None:
        """Read this file of a dataset and those after it in full, after all."""
        kept = [mark for mark in self.behind[dataset] if mark.file < file]
        self.behind[dataset] = self._ledger.begin_behind(dataset, kept)

    def chunks(self) -> Iterator[tuple[str, Chunk | None]]:
        """As `interleave`. Whoever takes a chunk registers it before the next one."""
        starts = {name: marks[-1] for name, marks in self.behind.items() if marks}
        markers = {one.name: _Marker(one.paths, starts.get(one.name), self._reading) for one in self._datasets}
        for name, chunk in interleave(self._datasets, self._settings, starts):
            yield name, chunk
            for mark in markers[name].passed(chunk) if self._marking else ():
                self._ledger.set_bookmark(name, mark)


class _Marker:
    """Bookmarks of one dataset."""

    def __init__(self, paths: Sequence[Path], start: Bookmark | None, reading: bytes):
        self._paths, self._reading = paths, reading
        self._stamps = [_stamp(path, reading) for path in paths]  # before anything is read
        self._file, self._number, self._offset, self._rows = start[:4] if start else (0, 0, 0, 0)
        self._last = self._number  #: of the last row
        self._lines = is_plain_lines(paths[self._file])
        self._over = False  #: a file was changed while it was read

    def passed(self, chunk: Chunk | None) -> Iterator[Bookmark]:
        """The bookmarks that are due when these rows (None: the last ones) are registered."""
        for file, some in itertools.groupby(chunk or (), key=lambda row: row[0]):
            while self._file < file:
                yield from self._at_end()
                self._file, self._number, self._offset = self._file + 1, 0, 0
                self._lines = is_plain_lines(self._paths[self._file])
            rows = list(some)
            self._rows += len(rows)
            self._last = rows[-1][1].number
            if self._lines and self._last - self._number >= _EVERY_LINES:
                yield from self._at_line(self._last)
        if chunk is None:
            yield from self._at_end()

    def _at_line(self, number: int) -> Iterator[Bookmark]:
        end, line = self._offset, b""
        with self._paths[self._file].open("rb") as file:
            file.seek(end)
            for line in itertools.islice(file, number - self._number):
                end += len(line)
        if line.endswith(b"\n"):  # one without it is the last, and may go on one day
            yield from self._mark(number, end, whole=False)

    def _at_end(self) -> Iterator[Bookmark]:
        """What follows the last bookmark of a file."""
        path = self._paths[self._file]
        size = path.stat().st_size
        if size == self._offset:
            return
        with path.open("rb") as file:
            file.seek(size - 1)
            ended = self._lines and file.read(1) == b"\n"
            file.seek(self._offset)
            number = self._number + sum(1 for _ in file) if self._lines else self._last
        yield from self._mark(number, size, whole=not ended)

    def _mark(self, number: int, end: int, *, whole: bool) -> Iterator[Bookmark]:
        path, stamp = self._paths[self._file], self._stamps[self._file]
        digest = _digest(path, self._offset, end, self._reading)
        if self._over or _stamp(path, self._reading) != stamp:
            self._over = True
            return
        self._number, self._offset = number, end
        yield Bookmark(self._file, number, end, self._rows, whole, digest, stamp if _is_settled(path) else "")


def rows_at(
    path: Path, numbers: Iterable[int], marks: Iterable[Bookmark], max_row_bytes: int
) -> Iterator[RawRow]:
    """The rows at these lines of a JSON Lines file, each read for from the bookmark before it. marks: of this file."""
    starts = [(0, 0), *((mark.number, mark.offset) for mark in marks if not mark.whole)]

    def start_of(number: int) -> tuple[int, int]:
        return starts[bisect_left(starts, (number,)) - 1]

    for (number, offset), some in itertools.groupby(sorted(numbers), key=start_of):
        yield from read_lines_at(path, set(some), max_row_bytes, offset, number)


def trusted(paths: Sequence[Path], bookmarks: Sequence[Bookmark], reading: bytes) -> list[Bookmark]:
    """The bookmarks, from the first on, before which the files are what they were; with their stamps of today."""
    found: list[Bookmark] = []
    for mark in bookmarks:
        last = found[-1] if found else None
        if mark.file >= len(paths) or not _follows(mark, last, paths):
            break
        path, start = paths[mark.file], last.offset if last and last.file == mark.file else 0
        stamp, size = _stamp(path, reading), path.stat().st_size
        if mark.stamp != stamp:
            if mark.whole and size != mark.offset:
                break
            if _digest(path, start, mark.offset, reading) != mark.digest:
                break
        found.append(mark._replace(stamp=stamp if _is_settled(path) else ""))
    return found


def _follows(mark: Bookmark, last: Bookmark | None, paths: Sequence[Path]) -> bool:
    """Whether no byte of the input is left out between two bookmarks."""
    if last is None:
        return mark.file == 0
    return mark.file == last.file or (mark.file == last.file + 1 and last.offset == paths[last.file].stat().st_size)


def _stamp(path: Path, reading: bytes) -> str:
    """What changes whenever a file is written, or is read by other rules."""
    is_now = path.stat()
    rules = blake2b(reading, digest_size=8).hexdigest()
    return f"{rules} {is_now.st_dev} {is_now.st_ino} {is_now.st_size} {is_now.st_mtime_ns} {is_now.st_ctime_ns}"


def _is_settled(path: Path) -> bool:
    return time.time() - path.stat().st_ctime > _SETTLED_SECONDS


def _digest(path: Path, start: int, end: int, reading: bytes) -> bytes:
    """Hash of the bytes between two places, and of the rules by which they were read."""
    digest = blake2b(reading, digest_size=16)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end and (block := file.read(min(_BLOCK_BYTES, end - start))):
            digest.update(block)
            start += len(block)
    return digest.digest()

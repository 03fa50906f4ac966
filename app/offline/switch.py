"""Several files of a run replaced as one.

New contents are written beside the old ones (`<name>.new`) and synced. One journal in OUT/.headrace then names them:
the moment it is there, the change has happened; until then, nothing has. What follows (renames, the ledger reading
the files anew, removing the journal) can be done any number of times, so whoever comes next finishes it:
`finish_switch` stands at the start of every command that uses the files. Who looks without it may see the half.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from app.allowances import RETRIED
from app.crash import crash_point
from app.errors import StorageError
from app.jsonl import sync_folder
from app.ledger import Ledger
from app.lock import hold
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED, RunDir

_JOURNAL = "switch.json"
_NEW = ".new"


@contextmanager
def alone(rundir: RunDir, purpose: str) -> Iterator[bool]:
    """Hold a run so that nobody else works on it or writes its files; True if a change cut short was finished first.

    Raises UsageError that names who has it.
    """
    with hold(rundir.lock, purpose), hold(rundir.writer_lock, purpose):
        yield _finish(rundir)


def finish_switch(rundir: RunDir) -> None:
    """Finish a change of files that was cut short, if there is one. Raises UsageError while another is at it."""
    if _journal(rundir).exists():
        with hold(rundir.writer_lock, "finishing a change of its files"):
            _finish(rundir)


class Switch:
    """One change of some of a run's files. A context manager, inside `alone`; nothing happens before `commit`."""

    def __init__(self, rundir: RunDir):
        self._rundir = rundir
        self._paths: list[Path] = []
        self._datasets: set[str] = set()

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_: object) -> None:
        """What was not committed is removed."""
        if not _journal(self._rundir).exists():
            for path in self._paths:
                _new(path).unlink(missing_ok=True)

    def stage(self, path: Path, dataset: str = "") -> "Staged":
        """The new content of a file, to be written. dataset: whose lines the ledger has to read anew."""
        self._paths.append(path)
        if dataset:
            self._datasets.add(dataset)
        return Staged(_new(path))

    def commit(self) -> None:
        """Make it happen, as a whole. Raises StorageError."""
        crash_point("staged")
        names = [path.relative_to(self._rundir.out).as_posix() for path in self._paths]
        journal = _journal(self._rundir)
        try:
            for folder in {path.parent for path in self._paths}:
                sync_folder(folder)
            _write(_new(journal), {"files": names, "datasets": sorted(self._datasets)})
            _new(journal).replace(journal)
            sync_folder(journal.parent)
        except OSError as exc:
            raise _refused(journal, exc) from exc
        crash_point("journal")
        _finish(self._rundir)


class Staged:
    """A file on its way in. Use as a context manager: what is written is on the disk when it ends well."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> "Staged":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=1 << 20)
        except OSError as exc:
            raise _refused(self._path, exc) from exc
        return self

    def write(self, data: bytes) -> None:
        """Append bytes: whole lines, newline included."""
        try:
            self._file.write(data)
        except OSError as exc:
            raise _refused(self._path, exc) from exc

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as exc:
            raise _refused(self._path, exc) from exc


def _finish(rundir: RunDir) -> bool:
    """Whether there was anything to finish."""
    journal = _journal(rundir)
    try:
        said = orjson.loads(journal.read_bytes())
    except FileNotFoundError:
        _remove_strays(rundir)
        return False
    except ValueError as exc:
        raise StorageError(f"{journal} is damaged ({exc}); move it and the *{_NEW} files away.") from exc
    try:
        for number, name in enumerate(said["files"]):
            _rename(rundir.out / name)
            crash_point(f"renamed {number + 1}")
        with Ledger.open(rundir) as ledger:
            ledger.read_anew(said["datasets"])
            ledger.catch_up(rundir)
        crash_point("ledger")
        journal.unlink()
        sync_folder(journal.parent)
    except OSError as exc:
        raise _refused(journal, exc) from exc
    return True


def _rename(path: Path) -> None:
    """Put a new content in its place; one that is there already is left."""
    try:
        _new(path).replace(path)
    except FileNotFoundError:
        if not path.exists():
            raise StorageError(f"{path} and {_new(path)} are gone: the directory was changed from outside.") from None
        return
    sync_folder(path.parent)


def _remove_strays(rundir: RunDir) -> None:
    """Contents that were never committed."""
    ours = [path for name in (RAW, TOKENIZED, REJECTED, SUPERSEDED) for path in rundir.out.glob(f"*/{name}{_NEW}")]
    for path in (rundir.run_json, rundir.out / RETRIED, rundir.put_aside, _journal(rundir)):
        ours.append(_new(path))
    for path in ours:
        path.unlink(missing_ok=True)


def _write(path: Path, value: object) -> None:
    with path.open("wb") as file:
        file.write(orjson.dumps(value))
        file.flush()
        os.fsync(file.fileno())


def _journal(rundir: RunDir) -> Path:
    return rundir.private / _JOURNAL


def _new(path: Path) -> Path:
    return path.with_name(path.name + _NEW)


def _refused(path: Path, exc: OSError) -> StorageError:
    return StorageError(f"{path}: {exc.strerror}; nothing is lost: mend it and give the same command again.")

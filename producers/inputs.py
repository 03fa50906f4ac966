"""`[NAME=]PATH` arguments: which files make which dataset.

NAME defaults to the file's name without the extensions we know. A NAME may be given several paths; two inputs that
would share a default NAME are an error, and so is a file whose bytes are already in the run under another name.
"""

import os
import re
import shlex
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path

from app.errors import UsageError
from app.manifest import InputFile
from producers.readers import read_records

_EXTENSIONS = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".txt", ".gz", ".zst")
_TAKEN = ("run.json", "run.json.tmp")  # files of ours that a dataset's folder would collide with
_START_BYTES = 1 << 20
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A named set of input files, in the order given."""

    name: str
    paths: tuple[Path, ...]


def parse_inputs(arguments: Iterable[str]) -> list[Dataset]:
    """Datasets of the command line. Raises UsageError for a bad name, or a file without a readable row."""
    paths: dict[str, list[Path]] = defaultdict(list)
    by_default: dict[str, Path] = {}
    seen: dict[tuple[int, int], Path] = {}
    for argument in arguments:
        name, path = _split(argument)
        check_file(path)
        _refuse_repeated(path, seen)
        if name is None:
            name = default_name(path)
            if name in by_default or name in paths:
                other = by_default.get(name) or paths[name][0]
                raise UsageError(
                    f"{other} and {path} would both be dataset {name}; "
                    f"name them: {name}_a={other} {name}_b={path} (one name for both makes them one dataset)."
                )
            by_default[name] = path
        elif name in by_default:
            raise UsageError(f"Dataset {name} is named by {by_default[name]} already; give that one a NAME= too.")
        _refuse_unsafe(name, path)
        paths[name].append(path)
    _refuse_same_folder(paths)
    return [Dataset(name, tuple(files)) for name, files in paths.items()]


def _refuse_same_folder(names: Iterable[str]) -> None:
    """`Chat` and `chat` are one folder on a filesystem that ignores case."""
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(name.casefold(), name)
        if other != name:
            raise UsageError(f"Datasets {other} and {name} differ only in case, and would share a folder; rename one.")


def default_name(path: Path) -> str:
    """`kimi-k2.5_sft.jsonl.gz` → `kimi-k2.5_sft`."""
    name = path.name
    while (suffix := Path(name).suffix.lower()) in _EXTENSIONS and len(name) > len(suffix):
        name = name[: -len(suffix)]
    return name


def check_file(path: Path) -> None:
    """Raises UsageError unless there is a readable file with a row in it."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a directory; name the files in it.")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is no regular file, and a run reads its input more than once; save it to a file.")
        next(iter(read_records(path)), None)
    except FileNotFoundError:
        raise UsageError(f"No such file: {path}.") from None
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the name
        raise UsageError(f"Cannot read {path}: {getattr(exc, 'strerror', None) or exc}.") from exc


def describe(datasets: list[Dataset], before: list[InputFile]) -> list[InputFile]:
    """The files of a run, for run.json. Raises UsageError for bytes that stand under two names, now or before.

    Only files of equal size and start are hashed here, so that a huge dataset starts at once.
    """
    files = [
        InputFile(dataset=dataset.name, path=str(path.absolute()), size_bytes=path.stat().st_size)
        for dataset in datasets
        for path in dataset.paths
    ]
    sizes = Counter(file.size_bytes for file in files)
    starts = {file.path: _start_of(file) for file in files if sizes[file.size_bytes] > 1}
    alike, before_sizes = Counter(starts.values()), {file.size_bytes for file in before}
    hashed = [
        with_digest(file) if file.size_bytes in before_sizes or alike[starts.get(file.path)] > 1 else file
        for file in files
    ]
    known = {file.sha256: file for file in before if file.sha256}
    for file in hashed:
        other = known.setdefault(file.sha256, file) if file.sha256 else file
        if other.dataset != file.dataset or (other is not file and other.path != file.path and other in hashed):
            raise UsageError(
                f"{file.path} (dataset {file.dataset}) holds the same bytes as {other.path} (dataset {other.dataset}); "
                "one of the two is enough."
            )
    return hashed


def with_digest(file: InputFile) -> InputFile:
    """The same file with its sha256."""
    with open(file.path, "rb") as handle:
        return file.model_copy(update={"sha256": file_digest(handle, "sha256").hexdigest()})


def _start_of(file: InputFile) -> tuple[int, bytes]:
    """Equal for equal files, and different for most others."""
    with open(file.path, "rb") as handle:
        return file.size_bytes, sha256(handle.read(_START_BYTES)).digest()


def _split(argument: str) -> tuple[str | None, Path]:
    """NAME and PATH; an argument that is a path with `=` in it wins over a name."""
    name, equals, rest = argument.partition("=")
    if not equals or os.path.exists(argument) or ("/" in name and not os.path.exists(rest)):
        return None, Path(argument)
    return name, Path(rest)


def _refuse_repeated(path: Path, seen: dict[tuple[int, int], Path]) -> None:
    """The same file twice would be each of its rows twice. Raises UsageError."""
    status = path.stat()
    other = seen.setdefault((status.st_dev, status.st_ino), path)
    if other is not path:
        raise UsageError(f"{path} is given twice (it is the same file as {other}); once is enough.")


def _refuse_unsafe(name: str, path: Path) -> None:
    """A name is a folder in OUT. Raises UsageError."""
    if not _SAFE_NAME.fullmatch(name) or name in _TAKEN:
        raise UsageError(
            f"Dataset name {name!r} is no safe folder name; name it with letters, digits, . _ -: "
            f"{shlex.quote(f'NAME={path}')}."
        )

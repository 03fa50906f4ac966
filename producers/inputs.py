"""`[NAME=]PATH` arguments: which files make which dataset.

NAME defaults to the file's name without the extensions we know. A NAME may be given several paths; two inputs that
would share a default NAME are an error, and so is a file whose bytes are already in the run under another name.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from app.errors import UsageError
from app.manifest import InputFile

_EXTENSIONS = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".txt", ".gz", ".zst")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A named set of input files, in the order given."""

    name: str
    paths: tuple[Path, ...]


def parse_inputs(arguments: Iterable[str]) -> list[Dataset]:
    """Datasets of the command line. Raises UsageError for a bad name, a missing, empty or unreadable file."""
    paths: dict[str, list[Path]] = defaultdict(list)
    by_default: dict[str, Path] = {}
    for argument in arguments:
        name, path = _split(argument)
        if name is None:
            name = default_name(path)
            if name in by_default or name in paths:
                other = by_default.get(name) or paths[name][0]
                raise UsageError(
                    f"{other} and {path} would both be dataset {name}; "
                    f"name them: {name}_a={other} {name}_b={path} (or one name for both, {name}={path})."
                )
            by_default[name] = path
        elif name in by_default:
            raise UsageError(f"Dataset {name} is named by {by_default[name]} already; give that one a NAME= too.")
        if not _SAFE_NAME.fullmatch(name):
            raise UsageError(
                f"Dataset name {name!r} is no safe folder name; use letters, digits, . _ - (as NAME={path})."
            )
        check_file(path)
        paths[name].append(path)
    return [Dataset(name, tuple(files)) for name, files in paths.items()]


def default_name(path: Path) -> str:
    """`kimi-k2.5_sft.jsonl.gz` → `kimi-k2.5_sft`."""
    name = path.name
    while (suffix := Path(name).suffix.lower()) in _EXTENSIONS and len(name) > len(suffix):
        name = name[: -len(suffix)]
    return name


def check_file(path: Path) -> None:
    """Raises UsageError unless there is a readable, non-empty file."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory; name the files in it.")
        with path.open("rb") as file:
            if not file.read(1):
                raise UsageError(f"{path} is empty: there is no row in it.")
    except FileNotFoundError:
        raise UsageError(f"No such file: {path}.") from None
    except OSError as exc:
        raise UsageError(f"Cannot read {path}: {exc.strerror}.") from exc


def describe(datasets: list[Dataset], before: list[InputFile]) -> list[InputFile]:
    """The files of a run, for run.json. Raises UsageError for bytes that stand under two names, now or before.

    Only files of equal size are hashed here, so that a huge dataset starts at once.
    """
    files = [
        InputFile(dataset=dataset.name, path=str(path.absolute()), size_bytes=path.stat().st_size)
        for dataset in datasets
        for path in dataset.paths
    ]
    by_size: dict[int, list[InputFile]] = defaultdict(list)
    for file in [*files, *before]:
        by_size[file.size_bytes].append(file)
    hashed = [with_digest(file) if len(by_size[file.size_bytes]) > 1 else file for file in files]
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


def _split(argument: str) -> tuple[str | None, Path]:
    """NAME and PATH; an argument that is a path with `=` in it wins over a name."""
    name, equals, rest = argument.partition("=")
    if not equals or "/" in name or Path(argument).exists():
        return None, Path(argument)
    return name, Path(rest)

"""A directory that another script left: its files, the lines in them as someone would count them by hand, and what a
line says under our names for its fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from app.errors import UsageError
from app.jsonl import is_blank
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED
from producers.inputs import Dataset, default_name
from producers.shapes import OWN_IDS
from producers.shapes.fields import at_path

#: sampling parameters that lines say by themselves, outside `sampling_params`
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
#: our field → where scripts put it, as dotted paths; the first that is there counts
NAMES: dict[str, tuple[str, ...]] = {
    "prompt_token_ids": ("prompt_token_ids", "prompt_ids", "input_token_ids"),
    "output_ids": ("output_ids", "output_token_ids", "completion_token_ids", "completion_ids", "response_token_ids"),
    "text": ("text", "output_text", "response", "completion", "generated_text", "output"),
    "finish_reason": ("finish_reason.type", "finish_reason", "meta_info.finish_reason.type", "meta_info.finish_reason"),
    "matched": ("matched", "finish_reason.matched", "meta_info.finish_reason.matched"),
    "num_prompt_tokens": ("num_prompt_tokens", "prompt_tokens", "meta_info.prompt_tokens", "usage.prompt_tokens"),
    "num_output_tokens": ("num_output_tokens", "completion_tokens", "output_tokens", "meta_info.completion_tokens",
                          "usage.completion_tokens"),
    "max_new_tokens": ("max_new_tokens", "sampling_params.max_new_tokens", "max_tokens"),
    "sampling": ("sampling_params", "sampling"),
    **{name: (name,) for name in SAMPLING},
    "dataset": ("dataset",),
    "turn": ("turn",),
    "turns": ("turns",),
    "recipe": ("recipe",),
    "row_id": ("row_id",),
    "source_id": ("source_id", *OWN_IDS),
    "completion_index": ("completion_index", "sample_index"),
    "model": ("model", "meta_info.model"),
    "endpoint": ("endpoint", "base_url"),
    "started_at": ("started_at", "created_at"),
    "latency_seconds": ("latency_seconds", "latency", "meta_info.e2e_latency"),
    "meta_info": ("meta_info",),
}  # fmt: skip
#: what a line may say in several places, which must all agree
_STATED = ("num_prompt_tokens", "num_output_tokens", "finish_reason")
_NOT_RESPONSES = (TOKENIZED, REJECTED, SUPERSEDED)


@dataclass(slots=True)
class ForeignFile:
    """A file of the directory, as someone would count it by hand."""

    path: Path
    dataset: str  #: of the input; "" where only the lines can tell
    is_read: bool  #: holds responses, as far as its name says
    lines: int = 0
    blank: int = 0
    bytes: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)  #: what the proof said of its lines


@dataclass(frozen=True, slots=True)
class ForeignLine:
    """One line. said: its fields by our names; stated: counts and ending, each in all the places that state it."""

    file: ForeignFile
    number: int
    said: dict[str, Any]
    stated: dict[str, list[Any]]


def find_files(directory: Path, datasets: list[Dataset]) -> list[ForeignFile]:
    """The JSON Lines files below a directory. Files named raw_responses are read; where there are none, all but those
    of the input and ours that are derived. Raises UsageError if there is nothing to read."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; name the one that holds the other script's files.")
    paths = sorted(path for path in directory.rglob("*.jsonl") if path.is_file() and ".headrace" not in path.parts)
    raw = [path for path in paths if path.stem.startswith(Path(RAW).stem)]
    inputs = {path.resolve() for dataset in datasets for path in dataset.paths}
    read = set(raw or [p for p in paths if p.name not in _NOT_RESPONSES and p.resolve() not in inputs])
    if not read:
        raise UsageError(f"{directory} holds no *.jsonl file with responses.")
    names = [dataset.name for dataset in datasets]
    return [
        ForeignFile(path, _dataset_of(path, directory, names), path in read, bytes=path.stat().st_size)
        for path in paths
    ]


def count_by_hand(file: ForeignFile) -> None:
    """Lines as `wc -l` counts them (and a last one without its end), blank ones apart."""
    with file.path.open("rb") as handle:
        for raw in handle:
            file.lines += 1
            file.blank += is_blank(raw)


def lines_of(file: ForeignFile, names: Mapping[str, tuple[str, ...]]) -> Iterator[ForeignLine | int]:
    """The lines of a file that hold something; of one that is no JSON object, its number."""
    with file.path.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            if is_blank(raw):
                continue
            value = _object(raw)
            yield number if value is None else ForeignLine(file, number, *_named(value, names))


def with_map(pairs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """NAMES with `ours=theirs` pairs put first. Raises UsageError for a field that is not ours."""
    names = dict(NAMES)
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals or not theirs or ours not in NAMES:
            raise UsageError(f"--map {pair}: write OURS=THEIRS, with OURS one of {', '.join(NAMES)}.")
        names[ours] = (theirs,)
    return names


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(raw)
        if isinstance(value, dict) and isinstance(value.get("meta_info"), str):
            value["meta_info"] = orjson.loads(value["meta_info"])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _named(value: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    found = {
        ours: [one for path in theirs if _is_said(one := at_path(value, path)) and not _holds_others(ours, path, one)]
        for ours, theirs in names.items()
    }
    said = {ours: values[0] for ours, values in found.items() if values}
    return said, {name: found[name] for name in _STATED}


def _holds_others(ours: str, path: str, value: Any) -> bool:
    """An object or a list where scripts put a plain value is no such value: it holds other fields (`response.text`)."""
    wants_one = NAMES[ours] != (ours,) and ours not in ("prompt_token_ids", "output_ids", "sampling", "meta_info")
    return wants_one and (path != ours or ours == "finish_reason") and isinstance(value, dict | list)


def _is_said(value: Any) -> bool:
    return value is not None and value != ""


def _dataset_of(path: Path, directory: Path, datasets: list[str]) -> str:
    """The dataset that a file's folder or name stands for; the only one if there is but one."""
    folders = path.relative_to(directory).parts[:-1]
    for name in (default_name(path), *reversed(folders), directory.name):
        if name in datasets:
            return name
    return datasets[0] if len(datasets) == 1 else ""

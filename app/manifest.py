"""What a run is: its recipe, and what workers on any host must know of it.

run.json in the output directory is the lasting form; the manifest in Redis is its copy for the workers, put there by
the producer and put again when Redis forgot it. Neither holds a secret: API keys come from each process's environment.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from app.errors import RecipeChanged, StorageError, UsageError
from app.identity import fingerprint


class Strict(BaseModel):
    """Frozen, and unknown fields are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Recipe(Strict):
    """All that we decide about the answer. Its fingerprint is part of every task key."""

    tokenizer: dict[str, Any]  #: contents of tokenizer, template and code by hash, special tokens, template options
    rendering: dict[str, Any]  #: turns, prefill, system text, fields; date and form of tools, pinned at the first start
    sampling: dict[str, Any]  #: every sampling parameter, explicit, max_new_tokens included

    @property
    def fingerprint(self) -> str:
        """16 hex digits."""
        return fingerprint(self.model_dump())

    def differences(self, other: "Recipe") -> list[str]:
        """One line per field that differs, `section.field: mine → other's`."""
        lines = []
        for section in ("tokenizer", "rendering", "sampling"):
            mine, theirs = getattr(self, section), getattr(other, section)
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    lines.append(f"{section}.{name}: {_short(mine.get(name))} → {_short(theirs.get(name))}")
        return lines


#: A server clips an answer silently that would end closer than this to its context (seen on 0.5.17 and 0.5.23).
CONTEXT_MARGIN_TOKENS = 2


class Limits(Strict):
    """How much an endpoint takes; None where it does not say."""

    context_tokens: int | None = None  #: prompt and answer together
    prompt_tokens: int | None = None  #: the prompt alone (a small KV pool limits it)

    def output_room(self, num_prompt_tokens: int) -> int | None:
        """Tokens that an answer to this prompt can have here; None: no limit known; below 1: the prompt is too long."""
        if self.prompt_tokens is not None and num_prompt_tokens >= self.prompt_tokens:
            return 0
        return None if self.context_tokens is None else self.context_tokens - CONTEXT_MARGIN_TOKENS - num_prompt_tokens

    def fits(self, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether the prompt and its whole allowance fit."""
        room = self.output_room(num_prompt_tokens)
        return room is None or room >= max_new_tokens


class RunManifest(Strict):
    """What a worker needs to know of a run."""

    run_id: str
    recipe: str  #: fingerprint
    sampling: dict[str, Any]
    endpoints: list[str]  #: normalised URLs
    vocab_size: int  #: every prompt id lies below it
    output_vocab_size: int  #: every returned id lies below it (models pad their vocabulary beyond the tokenizer's)
    server: dict[str, Any] = Field(default_factory=dict)  #: what must be the same at every endpoint (app/drift.py)
    required: dict[str, str] = Field(default_factory=dict)  #: --require: field of a server → value
    limits: dict[str, Limits] = Field(default_factory=dict)  #: per endpoint, where it was asked
    concurrency: int = -1  #: ceilings of requests per endpoint; -1: none
    short_concurrency: int = -1
    long_concurrency: int = -1
    requests_per_minute: int = -1  #: per endpoint, over all workers; -1: no limit
    request_timeout_seconds: float = 3600.0
    stage_tokens: int | None = None  #: most that one request asks for; None: all that its answer may get
    stop_ids: list[int] = Field(default_factory=list)  #: at which an answer ends, as far as tokenizer and recipe say

    @property
    def max_new_tokens(self) -> int:
        """The allowance asked for."""
        return int(self.sampling["max_new_tokens"])

    def endpoints_for(self, num_prompt_tokens: int, max_new_tokens: int) -> list[str]:
        """Endpoints whose context takes this; those that were never asked count as able."""
        return [url for url in self.endpoints if self.limits.get(url, Limits()).fits(num_prompt_tokens, max_new_tokens)]

    def output_room(self, num_prompt_tokens: int) -> int | None:
        """The most that any endpoint could answer; None if one tells no limit."""
        rooms = [self.limits.get(url, Limits()).output_room(num_prompt_tokens) for url in self.endpoints]
        return None if None in rooms else max(rooms)


class InputFile(Strict):
    """A file of a dataset, as it was when it was read to its end."""

    dataset: str
    path: str
    size_bytes: int
    sha256: str = ""  #: "" until read to its end


#: Of run.json; a newer one is refused.
_FORMAT = 1


class RunFile(Strict):
    """run.json: written at start, completed as the run learns more."""

    format: Literal[1] = _FORMAT
    run_id: str
    created_at: str
    headrace: str
    recipe: Recipe
    recipe_fingerprint: str
    datasets: list[InputFile] = Field(default_factory=list)
    samples: int = 1
    filters: dict[str, Any] = Field(default_factory=dict)  #: what the samples on file were made with; {}: not said yet
    tokenizer: str = ""  #: where it came from; of one on the hub, name and commit, for all later starts
    parity: dict[str, Any] = Field(default_factory=dict)  #: our prompt ids against the servers' own, at the last start
    retries: list[dict[str, Any]] = Field(default_factory=list)  #: completions asked again, and with what allowance
    versions: dict[str, str] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)  #: the model guarded beside the recipe (app/drift.py)
    accepted_drift: list[str] = Field(default_factory=list)  #: guarded fields that --allow-drift ever let differ
    required: dict[str, str] = Field(default_factory=dict)  #: what --require asked of servers, at the last start
    servers: dict[str, dict[str, Any]] = Field(default_factory=dict)  #: server fingerprint → what it said of itself


def read_run_file(path: Path) -> RunFile | None:
    """The run.json there, or None. Raises UsageError if it is none of ours."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return RunFile.model_validate_json(data)
    except ValueError as exc:
        raise UsageError(_newer(path, data) or (
            f"{path} is damaged, or was written by another version of Headrace; "
            "put a sound copy back, or use another --out."
        )) from exc  # fmt: skip


def _newer(path: Path, data: bytes) -> str:
    """What to do about a run.json of a format to come; "" if it is none."""
    with contextlib.suppress(ValueError):
        found = orjson.loads(data)
        if isinstance(found, dict) and isinstance(found.get("format"), int) and found["format"] > _FORMAT:
            by = found.get("headrace", "version unknown")
            return f"{path} was written by a newer Headrace ({by}); resume the run with that, or use another --out."
    return ""


def write_run_file(path: Path, run: RunFile) -> None:
    """Replace run.json as a whole: a crash leaves the old or the new one."""
    temporary = path.with_suffix(".json.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps(run.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:
        raise StorageError(f"Cannot write {path}: {exc.strerror}.") from exc


def refuse_other_recipe(started_with: RunFile, now: Recipe, out: Path) -> None:
    """Raises RecipeChanged with the difference if a directory belongs to another recipe."""
    if started_with.recipe_fingerprint == now.fingerprint:
        return
    changes = "\n  ".join(started_with.recipe.differences(now))
    raise RecipeChanged(
        f"{out} was started with another recipe, and one run never mixes two:\n  {changes}\n"
        "Use the old settings to resume it, or another --out."
    )


def _short(value: object) -> str:
    text = orjson.dumps(value).decode() if value is not None else "(none)"
    return text if len(text) <= 60 else text[:57] + "…"


"""The settings of a run, checked once at the start and handed to each of its processes as one file.

OUT/.headrace/settings.json holds them for the children of `headrace run`; it holds no secret.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.errors import UsageError


class RunSettings(BaseModel):
    """Everything a user can say about a run. Units stand in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[str] = Field(min_length=1)
    out: Path
    endpoints: list[str] = Field(min_length=1)
    tokenizer: str
    # the recipe
    max_new_tokens: int = Field(default=4096, ge=1, le=1_000_000)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    sampling: dict[str, Any] = Field(default_factory=dict)
    turns: Literal["last", "all"] = "last"
    system: str | None = None
    chat_template: Path | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = False
    prompt_field: str | None = None
    messages_field: str | None = None
    fit_output: bool = False
    vocab_size: int | None = Field(default=None, ge=1)
    # how many
    samples: int = Field(default=1, ge=1, le=10_000)
    limit: int | None = Field(default=None, ge=1)
    # how
    redis: str | None = None
    workers: int = Field(default=1, ge=0, le=1000)
    slots: int = Field(default=1000, ge=1, le=10_000)
    concurrency: int = Field(default=-1, ge=-1)
    short_concurrency: int = Field(default=-1, ge=-1)
    long_concurrency: int = Field(default=-1, ge=-1)
    request_timeout_seconds: float = Field(default=3600.0, gt=0)
    endpoint_wait_seconds: float = Field(default=60.0, ge=0)
    limit_seconds: float | None = Field(default=None, gt=0)
    drain_seconds: float = Field(default=30.0, ge=0)
    high_water: int = Field(default=5000, ge=10)  #: queued tasks per lane above which the producer waits
    max_row_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_sample_tokens: int | None = Field(default=None, ge=1)
    truncated: Literal["keep", "drop"] = "keep"


def settings_of(values: dict[str, Any]) -> RunSettings:
    """Checked settings. Raises UsageError naming the option that is wrong."""
    try:
        return RunSettings(**values)
    except ValidationError as exc:
        first = exc.errors()[0]
        option = "--" + str(first["loc"][0]).removesuffix("_seconds").replace("_", "-") if first["loc"] else "settings"
        raise UsageError(f"{option}: {first['msg']} (given: {first.get('input')!r}).") from exc


def save_settings(path: Path, settings: RunSettings) -> None:
    """Write them for the run's other processes."""
    path.write_text(settings.model_dump_json(indent=2))


def load_settings(path: Path) -> RunSettings:
    """Read them back."""
    return RunSettings(**json.loads(path.read_text()))


def json_option(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object given on the command line. Raises UsageError for anything else."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise UsageError(f"{option} is no valid JSON ({exc}); give an object such as '{{\"min_p\": 0.05}}'.") from exc
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, not {type(value).__name__}.")
    return value

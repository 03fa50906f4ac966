"""The settings of a run, checked once at the start and handed to each of its processes as one file.

OUT/.headrace/settings.json holds them for the children of `headrace run`; it holds no API key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.errors import StorageError, UsageError

_YEAR_SECONDS = 366 * 24 * 3600.0  # beyond any wait; larger numbers break timers


class RunSettings(BaseModel):
    """Everything a user can say about a run. Units stand in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
    prefill: bool = False  #: a last answer is continued, not made again
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
    skip_parity: bool = False  #: go on where the server's own prompt ids differ
    redis: str | None = None
    workers: int = Field(default=1, ge=0, le=1000)
    slots: int = Field(default=1000, ge=1, le=10_000)
    concurrency: int = Field(default=-1, ge=-1)
    short_concurrency: int = Field(default=-1, ge=-1)
    long_concurrency: int = Field(default=-1, ge=-1)
    requests_per_minute: int = Field(default=-1, ge=-1)  #: per endpoint, over all workers; -1: no limit
    allow_drift: list[str] = Field(default_factory=list)  #: guarded fields of a server that may differ (app/drift.py)
    require: list[str] = Field(default_factory=list)  #: FIELD=VALUE that every server must have
    request_timeout_seconds: float = Field(default=3600.0, gt=0, le=_YEAR_SECONDS)
    stage_tokens: int | None = Field(default=None, ge=1)  #: most that one request asks for; None: whole answers
    endpoint_wait_seconds: float = Field(default=60.0, ge=0, le=_YEAR_SECONDS)
    drift_wait_seconds: float = Field(default=600.0, ge=0, le=_YEAR_SECONDS)
    limit_seconds: float | None = Field(default=None, gt=0, le=_YEAR_SECONDS)
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    flower: bool = False
    drain_seconds: float = Field(default=30.0, ge=0, le=_YEAR_SECONDS)
    high_water: int = Field(default=5000, ge=10)  #: queued tasks per lane above which the producer waits
    max_row_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_sample_tokens: int | None = Field(default=None, ge=1)
    truncated: Literal["keep", "drop"] = "keep"
    unclosed_thinking: Literal["keep", "drop"] = "keep"
    max_repeat: int | None = Field(default=None, ge=2)


def settings_of(values: dict[str, Any]) -> RunSettings:
    """Checked settings. Raises UsageError naming the option that is wrong."""
    _refuse_broken_text(values)
    try:
        settings = RunSettings(**values)
    except ValidationError as exc:
        raise UsageError(_sentence(exc.errors()[0])) from exc
    _refuse_contradictions(settings)
    return settings


def save_settings(path: Path, settings: RunSettings) -> None:
    """Write them for the run's other processes."""
    try:
        path.touch(mode=0o600)  # a Redis URL may hold a password
        path.write_text(settings.model_dump_json(indent=2), encoding="utf-8")
    except OSError as exc:
        raise StorageError(f"Cannot write {path}: {exc.strerror}.") from exc


def load_settings(path: Path) -> RunSettings:
    """Read them back. Raises UsageError with the remedy if they are missing or damaged."""
    try:
        return RunSettings(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as exc:
        raise UsageError(
            f"{path} is missing or damaged; the `headrace run` or `headrace enqueue` of this run writes it anew."
        ) from exc


def json_option(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object given on the command line. Raises UsageError for anything else."""
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as exc:
        raise UsageError(f"{option} is no valid JSON ({exc}); give an object such as '{{\"name\": 0.05}}'.") from exc
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object such as '{{\"name\": 0.05}}', not {_shown(value)}.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_contradictions(settings: RunSettings) -> None:
    """Settings that are fine one by one. Raises UsageError."""
    for name in ("max_new_tokens", "temperature", "top_p", "top_k"):
        inner, option = settings.sampling.get(name), getattr(settings, name)
        if inner is not None and option not in (inner, RunSettings.model_fields[name].default):
            raise UsageError(f"--sampling says {name} {inner!r} and {_option(name)} {option!r}; say it once.")
    if settings.prefill and settings.turns == "all":
        raise UsageError("--prefill continues a given answer, and --turns all drops them; give one of the two.")
    if settings.workers == 0 and settings.redis is None:
        raise UsageError("--workers 0 needs --redis URL: no worker elsewhere can reach the private Redis.")


def _refuse_broken_text(values: Mapping[str, Any]) -> None:
    """Text that UTF-8 cannot hold: it could be neither hashed nor written. Raises UsageError."""
    for name, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as exc:
            odd = exc.object[exc.start]
            if "\udc80" <= odd <= "\udcff":  # how Python keeps a byte of the command line that is no UTF-8
                raise UsageError(f"{_option(name)} is not valid UTF-8; correct it, or use a UTF-8 LANG.") from None
            half = f"\\u{ord(odd):04x}"
            raise UsageError(f"{_option(name)} holds {half}, half a surrogate pair, which is no text.") from None


_OPTION_OF = {
    "endpoints": "endpoint", "request_timeout_seconds": "request_timeout", "endpoint_wait_seconds": "endpoint_wait",
    "drift_wait_seconds": "drift_wait",
}  # fmt: skip
_MUST = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
}


def _sentence(error: Mapping[str, Any]) -> str:
    """What pydantic found, in our words."""
    place = str(error["loc"][0]) if error["loc"] else "settings"
    option = _option(place)
    must = _MUST.get(error["type"])
    what = must.format(**error.get("ctx", {})) if must else f"is wrong: {error['msg']}"
    return f"{option} {what}, not {_shown(error.get('input'))}."


def _option(name: str) -> str:
    return "DATA" if name == "inputs" else "--" + _OPTION_OF.get(name, name).replace("_", "-")


def _shown(value: object) -> str:
    return repr(value)[:60]

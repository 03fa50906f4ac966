"""What happened to a run's parts, a JSON line each, for `headrace report` and for people. Nothing depends on it."""

import contextlib
from datetime import UTC, datetime

import orjson

from app.rundir import RunDir


def note(rundir: RunDir, event: str, *, endpoint: str = "", detail: str = "") -> None:
    """Append one event (endpoint_down, endpoint_up). A line that cannot be written is dropped."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    told = {"at": at, "event": event, "endpoint": endpoint, "detail": detail}
    line = {name: value for name, value in told.items() if value}
    with contextlib.suppress(OSError), rundir.events.open("ab") as file:
        file.write(orjson.dumps(line) + b"\n")

"""Logs: one line an event, as text or as JSON. A line begins with the event's name; names are stable (docs/reference.md)."""  # noqa: E501

import logging
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import orjson

from app.errors import UsageError

#: An event's name, at the beginning of its line.
EVENT = re.compile(r"[a-z]+(?:_[a-z]+)+")
FORMATS = ("text", "json")


class JSONFormatter(logging.Formatter):
    """`at` (ISO 8601, UTC), `level`, `logger`, `event` ("" from libraries), `text`; `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        text = record.getMessage()
        event = EVENT.match(text)
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname, "logger": record.name, "event": event.group() if event else "", "text": text,
        }  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to(path: Path | None) -> None:
    """Logs go to stderr, or into a file (those of `run` and its children: OUT/.headrace/logs).

    HEADRACE_LOG_LEVEL: DEBUG, INFO, WARNING (the default) or ERROR. HEADRACE_LOG_FORMAT: text (the default) or json.
    Raises UsageError for anything else.
    """
    handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter())
    logging.raiseExceptions = False  # a log on a full disk is the least of it
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = os.environ.get("HEADRACE_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise UsageError(f"HEADRACE_LOG_LEVEL={level} is no level; take DEBUG, INFO, WARNING or ERROR.")
    root.setLevel(level)


def _formatter() -> logging.Formatter:
    kind = os.environ.get("HEADRACE_LOG_FORMAT", "text").lower()
    if kind not in FORMATS:
        raise UsageError(f"HEADRACE_LOG_FORMAT={kind} is no format; take {' or '.join(FORMATS)}.")
    if kind == "json":
        return JSONFormatter()
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter

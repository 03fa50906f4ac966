"""`headrace watch`: the live view of a run from outside, on any host; `--json` gives a line a look for machines."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from app.cli.talk import show
from app.cli.view import View, line
from app.cli.watching import Far, Near, sight_of
from app.errors import OK, Incomplete, StorageError
from app.inventory import UNKNOWN
from app.snapshot import Snapshot

_LOOK_SECONDS = 0.5
_STILL_SECONDS, _AWAY_SECONDS = 5.0, 60.0  # a run may be started again, a Redis may come back


def watch_command(
    out: Path | None, redis_url: str | None, run_id: str | None, as_json: bool, every_seconds: float | None
) -> int:
    """Look until the run is complete, or Ctrl-C. every_seconds: between lines (default: 30; on a terminal it draws).

    Raises Incomplete if nobody works on the run, StorageError if nothing is known of it any more.
    """
    every = every_seconds or 30.0
    with sight_of(out, redis_url, run_id) as sight:
        try:
            if as_json or not sys.stdout.isatty():
                return _look_on(sight, every, lambda seen: show(_as_line(seen, as_json)))
            from rich.console import Console

            with View(every, Console()) as view:
                return _look_on(sight, _LOOK_SECONDS, view.show)
        except KeyboardInterrupt:
            return OK


def _as_line(seen: Snapshot, as_json: bool) -> str:
    return json.dumps(seen.to_json(), ensure_ascii=False) if as_json else line(seen)


def _look_on(sight: Near | Far, every_seconds: float, show_it: Callable[[Snapshot], None]) -> int:
    """Show it so often, and look oftener whether there is still something to be seen."""
    good_at, show_at = time.monotonic(), 0.0
    while True:
        seen, now = sight.take(), time.monotonic()
        if now >= show_at or seen.complete:
            show_at = now + every_seconds
            show_it(seen)
        if seen.complete:
            return OK
        still, away = seen.inventory["run"]["state"] == "stopped", seen.memory_bytes == UNKNOWN
        if not still and not away:
            good_at = now
        elif still and now - good_at >= _STILL_SECONDS:
            pending = f"{seen.inventory['totals']['pending']:,} rows pending"
            raise Incomplete(f"The run stands still, with {pending}; the command that began it resumes it.")
        elif isinstance(sight, Far) and now - good_at >= _AWAY_SECONDS:  # nearby its lock tells that it goes on
            raise StorageError(f"Nothing was heard of the run for {now - good_at:.0f} s: {seen.waiting_for}.")
        time.sleep(min(_LOOK_SECONDS, every_seconds))

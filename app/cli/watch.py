"""`headrace watch`: the live view of a run from outside, on any host; `--json` gives a line a look for machines."""

import json
import sys
import time
from pathlib import Path

from app.cli.talk import say, show
from app.cli.view import View, line
from app.cli.watching import sight_of
from app.errors import OK

_LOOK_SECONDS = 0.5
_STOPPED = "nobody works on this run now; the command that began it resumes it (Ctrl-C ends the watching)"


def watch_command(
    out: Path | None, redis_url: str | None, run_id: str | None, as_json: bool, every_seconds: float | None
) -> int:
    """Look until the run is complete, or Ctrl-C. every_seconds: between lines (default: 30; on a terminal it draws)."""
    every = every_seconds or 30.0
    with sight_of(out, redis_url, run_id) as sight:
        try:
            if as_json or not sys.stdout.isatty():
                return _lines(sight, as_json, every)
            from rich.console import Console

            with View(every, Console()) as view:
                if (seen := sight.take()).inventory["run"]["state"] == "stopped":
                    view.say(_STOPPED)
                while True:
                    seen = sight.take()
                    view.show(seen)
                    if seen.complete:
                        return OK
                    time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            return OK


def _lines(sight, as_json: bool, every_seconds: float) -> int:
    if sight.take().inventory["run"]["state"] == "stopped":
        say(_STOPPED)
    while True:
        seen = sight.take()
        show(json.dumps(seen.to_json(), ensure_ascii=False) if as_json else line(seen))
        if seen.complete:
            return OK
        time.sleep(every_seconds)

"""The commands that serve what others look at: `metrics` for Prometheus, `flower` for the tasks."""

import time
from pathlib import Path

from app.cli.talk import say
from app.cli.watching import sight_of
from app.errors import OK

_LOOK_SECONDS = 2.0


def metrics_command(out: Path | None, redis_url: str | None, run_id: str | None, address: str, port: int) -> int:
    """`headrace metrics`: until it is stopped; after the end of the run the last numbers stay."""
    from app.metrics import Exporter, serve

    exporter = Exporter()
    with sight_of(out, redis_url, run_id) as sight:
        exporter.show(sight.take(), sight.redis.histograms())
        say(f"metrics at http://{address}:{serve(exporter, address, port)}/metrics")
        try:
            while True:
                time.sleep(_LOOK_SECONDS)
                exporter.show(sight.take(), sight.redis.histograms())
        except KeyboardInterrupt:
            return OK

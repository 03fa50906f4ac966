"""The commands that serve what others look at: `metrics` for Prometheus, `flower` for the tasks."""

import os
import secrets
import signal
import time
from pathlib import Path

from app.cli.inspect import redis_of
from app.cli.talk import say
from app.cli.watching import sight_of
from app.errors import OK, UsageError
from app.store.connection import check, connect, translated

FLOWER_PORT = 5555
#: Environment variable with "user:password"; without it one is made up.
FLOWER_AUTH = "HEADRACE_BASIC_AUTH"
_LOOK_SECONDS = 2.0


def metrics_command(out: Path | None, redis_url: str | None, run_id: str | None, address: str, port: int) -> int:
    """`headrace metrics`: until it is stopped; after the end of the run the last numbers stay."""
    from app.metrics import Exporter, serve

    exporter = Exporter()
    with sight_of(out, redis_url, run_id) as sight:
        exporter.show(sight.take(), sight.redis.histograms())
        say(f"metrics at http://{address}:{serve(exporter, address, port)}/metrics")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                time.sleep(_LOOK_SECONDS)
                exporter.show(sight.take(), sight.redis.histograms())
        except KeyboardInterrupt:
            return OK


def flower_command(out: Path | None, redis_url: str | None, address: str, port: int, basic_auth: str | None) -> int:
    """`headrace flower`: until it is stopped."""
    url = redis_of(out, redis_url)
    login = basic_auth or os.environ.get("FLOWER_BASIC_AUTH") or made_up_login()
    if not all(login.partition(":")):
        raise UsageError("--basic-auth must be USER:PASSWORD, both with something in them.")
    with translated(url):
        check(client := connect(url), url)
    client.close()
    from app.flower_server import serve_flower

    known = basic_auth or os.environ.get("FLOWER_BASIC_AUTH")
    said = "" if known else f" · user and password {login.replace(':', ' ')}"
    serve_flower(url, address, port, login, lambda port: say(f"Flower at http://{address}:{port}{said}"))
    return OK


def made_up_login() -> str:
    """A user and a password that nobody has used before."""
    return f"headrace:{secrets.token_urlsafe(12)}"

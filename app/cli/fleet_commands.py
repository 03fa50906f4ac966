"""`headrace endpoints …`: options and examples alone."""

from pathlib import Path

import click

from app.cli.options import Group, api_key_option, json_flag, option, out_or_redis_argument, redis_option

_words = click.argument("words", nargs=-1, required=True, metavar="[OUT] URL...")


@click.group(cls=Group)
def endpoints() -> None:
    """Look at the endpoints of runs that go on; add, drain and remove them meanwhile.

    OUT is the directory of a run on this machine; with --redis and without OUT, all runs of that Redis are meant.
    Workers follow within seconds. A later start of a run takes its endpoints from its own command line.

    \b
    headrace endpoints list out
    headrace endpoints add out http://gpu3:30000
    headrace endpoints drain --redis redis://box:6379/0 http://gpu1:30000
    """


@endpoints.command("list")
@out_or_redis_argument
@redis_option
@json_flag
def list_(out: Path | None, redis: str | None, as_json: bool) -> int:
    """State, evidence, requests in flight, KV used and budget, learned f, served model.

    \b
    headrace endpoints list out
    headrace endpoints list --redis redis://box:6379/0 --json
    """
    from app.cli.fleet import list_command

    return list_command(out, redis, as_json)


@endpoints.command()
@_words
@redis_option
@api_key_option
@option("--endpoint-wait", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS",
        help="How long to wait for one that does not answer.")
def add(words: tuple[str, ...], redis: str | None, api_key: str | None, endpoint_wait: float) -> int:
    """Use more endpoints, or drained ones again. Each is proven first: it generates, and serves the run's model.

    \b
    headrace endpoints add out http://gpu3:30000
    """
    from app.cli.fleet import add_command

    return add_command(words, redis, api_key, endpoint_wait)


@endpoints.command()
@_words
@redis_option
def drain(words: tuple[str, ...], redis: str | None) -> int:
    """Send nothing new; what runs there finishes. `add` ends it.

    \b
    headrace endpoints drain out http://gpu3:30000
    """
    from app.cli.fleet import drain_command

    return drain_command(words, redis)


@endpoints.command()
@_words
@redis_option
@click.option("--no-wait", is_flag=True, help="Do not wait for the requests that run there.")
def remove(words: tuple[str, ...], redis: str | None, no_wait: bool) -> int:
    """Drain, wait until nothing runs there, forget it. Not the last one of a run.

    \b
    headrace endpoints remove out http://gpu3:30000
    """
    from app.cli.fleet import remove_command

    return remove_command(words, redis, not no_wait)


def add_to(group: click.Group) -> None:
    """Make it a command of `headrace`."""
    group.add_command(endpoints)

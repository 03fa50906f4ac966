"""Options that several commands share, how one is read from the environment, and a group that knows near misses."""

import difflib
import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem


class Group(click.Group):
    """A group that suggests the command that was meant."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        """Name near misses."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near:
                raise click.UsageError(f"No such command {args[0]!r}; did you mean {near[0]!r}?", ctx) from exc
            raise


class Urls(click.ParamType):
    """URLs; several in one environment variable stand apart by spaces or commas."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As given: what is an URL is decided with the other settings."""
        return str(value)

    def split_envvar_value(self, rv: str) -> list[str]:
        """`http://a:1 http://b:2` or `http://a:1,http://b:2`."""
        return [url for url in re.split(r"[\s,]+", rv) if url]


class Directory(click.Path):
    """A directory, there or not; a shell completes it as one. What else it may be is told by who reads it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Directories."""
        return [CompletionItem(incomplete, type="dir")]


class Data(click.ParamType):
    """`[NAME=]PATH` or a place of files; a shell completes the path."""

    name = "data"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files."""
        return [CompletionItem(incomplete, type="file")]


class NumberOrOff(click.ParamType):
    """A whole number, or `off` (None)."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Whether the number makes sense is decided with the other settings."""
        if value is None or str(value).lower() == "off":
            return None
        return click.INT.convert(value, param, ctx)


def option(*names: str, **attributes: Any):
    """An option that can also come from HEADRACE_<NAME>."""
    long = max((name.split("/")[0] for name in names if name.startswith("--")), key=len)
    attributes.setdefault("envvar", "HEADRACE_" + long.removeprefix("--").replace("-", "_").upper())
    attributes.setdefault("show_envvar", False)
    return click.option(*names, **attributes)


def options(*decorators):
    """Several options as one decorator, shown in this order."""

    def decorate(function):
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


redis_option = option(
    "--redis", metavar="URL", help="Redis, as redis://host:6379/0. Without it `run` has its own, and OUT tells of it."
)
shared_redis_option = option(
    "--redis", metavar="URL", help="The Redis that producer, collector and workers share, as redis://host:6379/0."
)
api_key_option = option("--api-key", metavar="KEY", help="Key for the endpoints; better set HEADRACE_API_KEY.")
json_flag = option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
change_options = options(
    option("--on-down", metavar="CMD", help="Run this once when an endpoint is lost; see docs/operating/endpoints.md."),
    option("--on-up", metavar="CMD", help="Run this once when it is back."),
)
out_argument = click.argument("out", type=Directory())
out_or_redis_argument = click.argument("out", type=Directory(), required=False)
run_id_option = option("--run", "run_id", metavar="ID", help="Which run, where a Redis has several.")

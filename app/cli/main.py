"""`headrace`: every command, its options and examples. stdout is data, stderr is talk.

Heavy imports happen inside the commands, so that `--help` is instant.
"""

import difflib
import errno
import gc
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from app import __version__
from app.cli import advice_commands, fleet_commands, looking_commands, offline_commands
from app.cli.options import (
    Directory,
    Group,
    api_key_option,
    change_options,
    json_flag,
    option,
    out_argument,
    redis_option,
    shared_redis_option,
)
from app.cli.run_options import machine_options, run_options
from app.cli.sections import Sectioned
from app.cli.talk import keep_standard_files, say, show, speak_utf8
from app.errors import INCOMPLETE, STORAGE, USAGE, HeadraceError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_NO_PROCESS = (errno.EAGAIN, errno.ENOMEM)
_SETTINGS_FILE = "headrace.toml"
_GC_THRESHOLD = 10_000, 10, 10  # imports make many objects and drop none: a tenth of a start was looking for garbage
#: What the settings file speaks to.
SETTABLE = (
    "run", "enqueue", "worker", "collect", "status", "watch", "metrics", "flower", "verify", "workers", "endpoints",
    "doctor",
)  # fmt: skip


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="headrace")
@click.option("--settings", "settings_file", type=click.Path(path_type=Path), envvar="HEADRACE_SETTINGS",
              help=f"Settings file (default: {_SETTINGS_FILE} here, if there is one).")
@click.pass_context
def cli(ctx: click.Context, settings_file: Path | None) -> None:
    """Regenerate training data with a teacher LLM on SGLang servers.

    \b
    headrace demo
    headrace run B1=data/glaive.jsonl B2=data/code.parquet --endpoint http://gpu1:30000 \\
             --tokenizer /models/Kimi-K2.5 --out runs/kimi
    headrace status runs/kimi

    Every option can also stand in the environment (--max-new-tokens as HEADRACE_MAX_NEW_TOKENS) or in a settings
    file (max-new-tokens = 8192; endpoint = ["http://gpu1:30000", "http://gpu2:30000"]). The command line wins over
    the environment, the environment over the file.
    """
    path = settings_file or Path(_SETTINGS_FILE)
    if settings_file is None and not path.exists():
        return
    from app.cli.settings_file import defaults_from

    ctx.default_map = defaults_from(path, {name: cli.commands[name] for name in SETTABLE})


@cli.command(cls=Sectioned)
@run_options
@machine_options
@change_options
def run(**values: Any) -> int:
    """Take datasets through SGLang into training data; the same command again resumes.

    \b
    headrace run prompts.jsonl --endpoint http://localhost:30000 --tokenizer /models/teacher --out out
    headrace run B1=a.jsonl B2=b.parquet --endpoint http://gpu1:30000 --endpoint http://gpu2:30000 \\
             --tokenizer /models/teacher --max-new-tokens 8192 --temperature 0.6 --out out
    headrace run prompts.jsonl --endpoint http://gpu1:30000 --tokenizer /models/teacher --out out \\
             --on-down 'ssh gpu1 systemctl restart sglang' --on-up 'echo "$HEADRACE_ENDPOINT is back" | mail me'
    """
    from app.cli.run import run_command

    return run_command(values)


@cli.command()
@click.option("--out", type=Directory(), help="Keep the files here (default: a new temporary folder).")
def demo(out: Path | None) -> int:
    """The main job on bundled prompts and simulated servers: no GPU, no network, under a minute.

    \b
    headrace demo
    """
    from app.cli.demo import run_demo

    return run_demo(out)


@cli.command(cls=Sectioned)
@run_options
@option("--no-wait", is_flag=True, help="Leave when everything is enqueued, instead of staying until complete.")
def enqueue(no_wait: bool, **values: Any) -> int:
    """The producer alone: fill the queues of a Redis that workers elsewhere serve.

    \b
    headrace enqueue data.jsonl --redis redis://box:6379/0 --endpoint http://gpu1:30000 \\
             --tokenizer /models/teacher --out out
    """
    from app.cli.run import enqueue_command

    return enqueue_command(values, wait=not no_wait)


@cli.command(hidden=True)
@out_argument
@redis_option
def produce(out: Path, redis: str) -> int:
    """The producer as a child of `run`: settings and run.json are in OUT."""
    from app.cli.run import produce_command

    return produce_command(out, redis)


@cli.command()
@shared_redis_option
@option("--name", metavar="NAME", help="Name of this worker; the host is added (default: made up).")
@option("--slots", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="Tasks it holds at once.")
@option("--lane", "lanes", multiple=True, type=click.Choice(["short", "long"]), help="Lanes it serves (default: both).")
@option("--drain-seconds", type=click.FloatRange(0, 1e7), default=30.0, show_default=True,
        help="Time for running requests when stopping.")
@api_key_option
def worker(redis: str | None, name: str | None, slots: int, lanes: tuple[str, ...], drain_seconds: float,
           api_key: str | None) -> int:  # fmt: skip
    """A worker: takes tasks of all runs from Redis to their endpoints. Start as many as you like, on any host.

    \b
    headrace worker --redis redis://box:6379/0
    HEADRACE_API_KEY=... headrace worker --redis redis://box:6379/0 --lane short --slots 500
    """
    from app.cli.hands import worker_command

    return worker_command(redis, name, slots, lanes, drain_seconds, api_key)


@cli.command()
@out_argument
@shared_redis_option
@change_options
@option("--run-wait", "run_wait_seconds", type=click.FloatRange(0, 1e7), default=0.0, metavar="SECONDS",
        help="How long to wait for a run in OUT, where this starts before its producer.")
def collect(out: Path, redis: str | None, on_down: str | None, on_up: str | None, run_wait_seconds: float) -> int:
    """The collector: the one process that writes the files of the run in OUT.

    \b
    headrace collect out --redis redis://box:6379/0
    headrace collect out --redis redis://box:6379/0 --on-down './restart.sh "$HEADRACE_ENDPOINT"'
    """
    from app.cli.hands import collect_command

    return collect_command(out, redis, on_down, on_up, run_wait_seconds)


@cli.command()
@out_argument
@redis_option
@json_flag
def status(out: Path, redis: str | None, as_json: bool) -> int:
    """The inventory of a run: rows = tokenized + rejected + pending.

    \b
    headrace status out
    headrace status out --json
    """
    from app.cli.inspect import status_command

    return status_command(out, redis, as_json)


@cli.command()
@out_argument
@json_flag
def verify(out: Path, as_json: bool) -> int:
    """Read every line of a run and prove its promises; exit 0 only if all hold, else 7.

    For a run that is complete or stopped: what is just being written can look like damage.

    \b
    headrace verify out
    """
    from app.cli.inspect import verify_command

    return verify_command(out, as_json)


@cli.command()
@click.option("--port", type=click.IntRange(0, 65535), default=30000, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--config", metavar="JSON", help="Fields of the simulator's configuration, as an object.")
@click.option("--faults", metavar="JSON", help="Faults from the start, as an object.")
def simulate(port: int, host: str, config: str | None, faults: str | None) -> int:
    """A simulated SGLang server: real wire bodies, a KV pool that fills, faults on demand.

    \b
    headrace simulate --port 30000
    headrace simulate --config '{"max_total_num_tokens": 231120}' --faults '{"crash_above_running": 100}'
    """
    from app.cli.inspect import simulate_command

    return simulate_command(host, port, config, faults)


fleet_commands.add_to(cli)
looking_commands.add_to(cli)
offline_commands.add_to(cli)
advice_commands.add_to(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: exit codes of design, one sentence and no traceback for a foreseeable fault."""
    gc.set_threshold(*_GC_THRESHOLD)
    keep_standard_files()
    speak_utf8()
    try:
        code = cli.main(arguments, prog_name="headrace", standalone_mode=False)
    except click.exceptions.Abort:
        say("stopped")
        code = INCOMPLETE
    except click.exceptions.NoArgsIsHelpError as exc:
        show(exc.format_message())
        code = USAGE
    except click.ClickException as exc:
        say(_usage_sentence(exc))
        code = USAGE
    except HeadraceError as exc:
        say(str(exc))
        code = exc.exit_code
    except OSError as exc:
        if exc.filename is None and exc.errno not in (*_DISK, *_NO_PROCESS):
            raise  # the network's have their own words where they happen: this one is a bug
        why = "no further process can be started (`ulimit -u`, memory): " if exc.errno in _NO_PROCESS else ""
        say(f"{why}{exc.strerror}{f': {exc.filename}' if exc.filename else ''}; mend it and repeat the command.")
        code = STORAGE
    sys.exit(code if isinstance(code, int) else 0)


def _usage_sentence(exc: click.ClickException) -> str:
    """click's message with the nearest option that exists, and where to read more."""
    message = exc.format_message()
    if isinstance(exc, click.NoSuchOption):
        near = f"; did you mean {exc.possibilities[0]!r}?" if exc.possibilities else ""
        message = f"No such option {exc.option_name!r}{near}"
    context = getattr(exc, "ctx", None)
    parameter = getattr(exc, "param", None)
    if parameter and isinstance(parameter.type, click.Choice):
        given = re.search(r"'([^']*)' is not one of", message)
        near = difflib.get_close_matches(given[1], parameter.type.choices, n=1) if given else []
        message = f"{message.removesuffix('.')}; did you mean {near[0]!r}?" if near else message
    if context and parameter and context.get_parameter_source(parameter.name) is ParameterSource.ENVIRONMENT:
        message = f"{message.removesuffix('.')} (from {parameter.envvar})"
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end} See `{context.command_path if context else 'headrace'} --help`."


if __name__ == "__main__":
    main()

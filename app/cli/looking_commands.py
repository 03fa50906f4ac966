"""The commands for who looks at a run and runs its workers: watch, metrics, flower, workers. Options and examples."""

from pathlib import Path

import click

from app.cli.options import Directory, Group, json_flag, option, out_or_redis_argument, redis_option, run_id_option


@click.command()
@out_or_redis_argument
@redis_option
@run_id_option
@option("--every", "every_seconds", type=click.FloatRange(0.1, 86_400), metavar="SECONDS",
        help="Between lines where stdout is no terminal, and with --json (default: 30).")
@json_flag
def watch(out: Path | None, redis: str | None, run_id: str | None, every_seconds: float | None, as_json: bool) -> int:
    """The live view of a run, from any host, until it is complete or stands still (exit 3); Ctrl-C leaves it alone.

    \b
    headrace watch out
    headrace watch --redis redis://box:6379/0
    headrace watch out --json --every 10
    """
    from app.cli.watch import watch_command

    return watch_command(out, redis, run_id, as_json, every_seconds)


@click.command()
@out_or_redis_argument
@redis_option
@run_id_option
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="0: any that is free.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0: everywhere.")
def metrics(out: Path | None, redis: str | None, run_id: str | None, port: int, address: str) -> int:
    """Every number of a run for Prometheus, from any host; deploy/ has a dashboard and alerts.

    \b
    headrace metrics out
    headrace metrics --redis redis://box:6379/0 --address 0.0.0.0
    """
    from app.cli.serve import metrics_command

    return metrics_command(out, redis, run_id, address, port)


@click.command()
@out_or_redis_argument
@redis_option
@click.option("--port", type=click.IntRange(0, 65535), default=5555, show_default=True, help="0: any that is free.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0: everywhere.")
@option("--basic-auth", metavar="USER:PASSWORD", help="Better set HEADRACE_BASIC_AUTH; else one is made up and told.")
def flower(out: Path | None, redis: str | None, port: int, address: str, basic_auth: str | None) -> int:
    """Flower on the tasks, lanes and workers of a run, behind a password.

    \b
    headrace flower out
    HEADRACE_BASIC_AUTH=me:secret headrace flower --redis redis://box:6379/0 --port 8080
    """
    from app.cli.serve import flower_command

    return flower_command(out, redis, address, port, basic_auth)


@click.group(cls=Group)
def workers() -> None:
    """The workers on a Redis: list, scale, stop. OUT: the directory of a run on this host; else --redis.

    \b
    headrace workers list out
    headrace workers scale 4000 --redis redis://box:6379/0
    headrace workers stop a1.short-long@gpu7 --redis redis://box:6379/0
    """


@workers.command("list")
@out_or_redis_argument
@redis_option
@json_flag
def workers_list(out: Path | None, redis: str | None, as_json: bool) -> int:
    """Who gave a sign within the last seconds, with its lanes, slots and tasks.

    \b
    headrace workers list out
    """
    from app.cli.workers import list_command

    return list_command(out, redis, as_json)


@workers.command("scale")
@click.argument("total", type=click.IntRange(1, 10_000_000), metavar="N")
@out_or_redis_argument
@redis_option
@json_flag
def workers_scale(total: int, out: Path | None, redis: str | None, as_json: bool) -> int:
    """N slots (tasks held at once) altogether, spread evenly over the workers there are, at once.

    Growing takes effect with the next tasks; what runs when a pool shrinks is finished. A worker that is started again
    has the --slots it was started with. More processes: `headrace worker`, on any host.

    \b
    headrace workers scale 4000 out
    """
    from app.cli.workers import scale_command

    return scale_command(total, out, redis, as_json)


@workers.command("stop")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--out", type=Directory(), help="Directory of a run on this host, instead of --redis.")
@redis_option
def workers_stop(names: tuple[str, ...], out: Path | None, redis: str | None) -> int:
    """Drain workers, wherever they are: what waits goes back at once, what generates has the worker's --drain-seconds.

    A worker of `headrace run` is started again by it.

    \b
    headrace workers stop a1.short-long@gpu7 --redis redis://box:6379/0
    """
    from app.cli.workers import stop_command

    return stop_command(names, out, redis)


def add_to(group: click.Group) -> None:
    """Make them commands of `headrace`."""
    for command in (watch, metrics, flower, workers):
        group.add_command(command)

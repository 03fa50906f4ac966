"""The commands that begin a run or go on with it: run, enqueue, produce. Each only puts the parts together."""

import os
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.cli.changes import OnChange
from app.cli.limits import limits_sentence, slots_within_limits
from app.cli.logs import log_to
from app.cli.stopping import patient, stop_event, stop_like_ctrl_c
from app.cli.talk import say, show
from app.errors import OK, SOME_REJECTED, Incomplete, UsageError
from app.lock import hold
from app.rundir import RunDir
from app.settings import json_option, load_settings, settings_of

_END_SECONDS = 30.0  # a producer that was told to stop looks every second, and finishes a chunk


def run_command(values: dict[str, Any], line_seconds: float = 30.0) -> int:
    """`headrace run`: everything on this machine. line_seconds: between lines where stderr is no terminal."""
    stop_like_ctrl_c()
    api_key, dry = take_api_key(values), values.pop("dry_run", False)
    on_change = OnChange(values.pop("on_down", None), values.pop("on_up", None))
    settings = checked(values)  # before the imports below: a wrong option is told at once
    if dry:
        return _dry_run(settings)
    from app.cli.prepare import check_cheaply, gone_if_refused, make_directory, prepare, record_digests
    from app.cli.spare import standing_by
    from app.cli.supervise import Supervisor
    from app.cli.view import View
    from app.inventory import render_table
    from app.offline.torn import mend_if_free
    from app.store.embedded import end_leftover
    from producers.remaining import is_complete

    check_cheaply(settings)
    if (slots := slots_within_limits(settings.slots)) < settings.slots:
        say(limits_sentence(settings.slots, slots))
        settings = settings.model_copy(update={"slots": slots})
    new = not settings.out.exists()
    rundir = make_directory(settings.out)
    log_to(rundir.logs / "run.log")
    with hold(rundir.lock, "running this directory") as held, standing_by(_early_children(rundir, settings)) as spares:
        end_leftover(rundir.redis)
        with gone_if_refused(rundir, new=new):
            prepared = prepare(settings)
        if mended := str(mend_if_free(rundir, prepared.run_file)):
            say(mended)
        if is_complete(settings, prepared.datasets, prepared.run_file.recipe_fingerprint):
            return _show_complete(prepared)
        with View(line_seconds) as view:
            supervisor = Supervisor(prepared, view, held, api_key, on_change, spares)
            code = supervisor.run()
        record_digests(prepared.rundir)
        show(render_table(supervisor.final))
        return code


def _early_children(rundir: RunDir, settings) -> dict[str, str]:
    """Children that can be started before all is checked, each with what it imports; none where all may be done."""
    from app.ledger import Ledger

    if rundir.ledger.exists():
        with Ledger.open(rundir) as ledger:
            if ledger.is_complete():
                return {}
    workers = {f"worker-{n}": "workers.process" for n in range(1, settings.workers + 1)}
    return workers | {"collector": "workers.collector"}


def _dry_run(settings) -> int:
    from app.cli.dry_run import dry_run

    return dry_run(settings)


def _show_complete(prepared) -> int:
    """A run with nothing left to do: its inventory, and the same exit code as when it was completed."""
    from app.cli.watching import inventory_of
    from app.inventory import render_table

    shown = inventory_of(prepared.rundir, prepared.run_file, None)
    show(render_table(shown))
    return SOME_REJECTED if shown["totals"]["rejected"] else OK


def enqueue_command(values: dict[str, Any], *, wait: bool) -> int:
    """`headrace enqueue`: the producer alone, on a Redis that others use too."""
    stop_like_ctrl_c()
    api_key, dry = take_api_key(values), values.pop("dry_run", False)
    settings = checked(values)
    if dry:
        return _dry_run(settings)
    if settings.redis is None:
        raise UsageError("headrace enqueue needs --redis URL: the Redis that the workers use.")
    if settings.turns == "all" and not wait:
        raise UsageError("--turns all needs an enqueue that stays, to make each next turn's prompt; drop --no-wait.")
    from app.cli.meet import meet_endpoints, record_servers
    from app.cli.prepare import check_cheaply, gone_if_refused, make_directory, prepare, record_digests
    from app.offline.torn import mend_if_free
    from app.store.connection import check, connect, translated

    log_to(None)
    check_cheaply(settings)
    new = not settings.out.exists()
    rundir = make_directory(settings.out)
    with hold(rundir.lock, "enqueueing this directory"):
        with gone_if_refused(rundir, new=new):
            prepared = prepare(settings)
        if mended := str(mend_if_free(rundir, prepared.run_file)):
            say(mended)
        client = connect(settings.redis)
        with translated(settings.redis):
            check(client, settings.redis)
        prepared, manifest = meet_endpoints(prepared, client, settings.redis, api_key, say)
        say(f"enqueueing {', '.join(one.name for one in prepared.datasets)}" + (
            "; stays until the run is complete (`headrace collect` and workers do the rest)" if wait else ""
        ))  # fmt: skip
        code = _produce(settings, prepared.run_file, manifest, client, settings.redis, wait=wait)
        record_digests(prepared.rundir)
        record_servers(prepared.rundir, client, manifest, say)
        say(f"{'complete' if wait else 'everything is enqueued'}; `headrace status {settings.out}` shows the counts")
        return code


def produce_command(out: Path, redis_url: str) -> int:
    """The producer as a child of `run`, which has prepared everything."""
    from app.manifest import RunManifest, read_run_file
    from app.store.connection import connect
    from app.store.keys import RunKeys

    log_to(None)
    settings = load_settings(RunDir(out).private / "settings.json")
    run_file = read_run_file(RunDir(out).run_json)
    client = connect(redis_url)
    data = patient(lambda: client.get(RunKeys(run_file.run_id).manifest))
    if data is None:
        raise UsageError(f"Redis knows no run {run_file.run_id}; start it with `headrace run` or `headrace enqueue`.")
    return _produce(settings, run_file, RunManifest.model_validate_json(data), client, redis_url, wait=True)


def _produce(settings, run_file, manifest, client, redis_url: str, *, wait: bool) -> int:
    from app.celery_app import make_app
    from app.cli.prepare import render_options
    from producers.conveyor import Stopped
    from producers.enqueue import Producer
    from producers.inputs import parse_inputs

    stop = stop_event(_END_SECONDS)
    options = render_options(settings, run_file.recipe.rendering, manifest.vocab_size)
    producer = Producer(
        settings, parse_inputs(settings.inputs), manifest, options, client, make_app(redis_url), stop.is_set
    )
    try:
        producer.run(wait=wait)
    except Stopped:
        raise Incomplete("The producer was stopped with rows pending; the same command resumes.") from None
    if not wait:
        return OK
    return SOME_REJECTED if producer.rejected() else OK


def checked(values: dict[str, Any]):
    """Settings from the command line."""
    values = dict(values)
    values["inputs"], values["endpoints"] = list(values["inputs"]), list(values["endpoints"])
    values["sampling"] = json_option("--sampling", values.get("sampling"))
    values["template_kwargs"] = json_option("--template-kwargs", values.get("template_kwargs"))
    return settings_of(values)


def take_api_key(values: dict[str, Any]) -> SecretStr | None:
    """Take the key out of the settings and into the environment of the children: never an argument of theirs."""
    key = checked_key(values.pop("api_key", None))
    if key is not None:
        os.environ["HEADRACE_API_KEY"] = key.get_secret_value()
    return key


def checked_key(text: str | None) -> SecretStr | None:
    """A key that can stand in an HTTP header. Raises UsageError, without the key in it."""
    key = (text or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("--api-key holds characters that no HTTP header can carry; give the key alone.")
    return SecretStr(key) if key else None

"""The commands that work on what a producer sends, on this host or another: worker and collect."""

import math
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from app.cli.changes import OnChange
from app.cli.limits import limits_sentence, slots_within_limits
from app.cli.logs import log_to
from app.cli.run import checked_key
from app.cli.stopping import patient, stop_event
from app.cli.talk import say
from app.errors import OK, Incomplete, UsageError
from app.lock import Held, hold
from app.rundir import RunDir


def worker_command(
    redis_url: str | None, name: str | None, slots: int, lanes: tuple[str, ...], drain_seconds: float,
    api_key: str | None,
) -> int:  # fmt: skip
    """`headrace worker`."""
    from app.lanes import Lane
    from app.store.connection import await_trusted, connect
    from app.store.names import worker_name
    from workers.context import WorkerSettings
    from workers.process import run_worker

    if not redis_url:
        raise UsageError("headrace worker needs --redis URL: the Redis that the producer uses.")
    log_to(None)
    if (held := slots_within_limits(slots)) < slots:
        say(limits_sentence(slots, held))
        slots = held
    key = checked_key(api_key)
    with connect(redis_url) as client:
        await_trusted(client, redis_url, _told_once(time.sleep))
    lanes = lanes or tuple(lane.value for lane in Lane)
    full_name = worker_name(name or uuid.uuid4().hex[:8], lanes)
    served = " and ".join(lanes)
    say(f"worker {full_name} serves the lanes {served} until it is stopped (SIGTERM drains, SIGQUIT stops at once)")
    return run_worker(
        WorkerSettings(
            redis_url=redis_url, name=full_name, slots=slots, lanes=lanes, drain_seconds=drain_seconds, api_key=key
        )
    )  # fmt: skip


def collect_command(
    out: Path, redis_url: str | None, on_down: str | None = None, on_up: str | None = None,
    run_wait_seconds: float = 0.0,
) -> int:  # fmt: skip
    """`headrace collect`: under the writer lock, until told to stop."""
    from app.cli.inspect import existing_run
    from app.offline.switch import finish_switch
    from app.samples import SampleFilters
    from app.store.connection import await_trusted, connect
    from workers.collector import Collector

    if not redis_url:
        raise UsageError("headrace collect needs --redis URL: the Redis that the workers use.")
    log_to(None)
    stop = stop_event()
    if not _await_run(RunDir(out.absolute()), run_wait_seconds, stop):
        return OK
    finish_switch(RunDir(out.absolute()))
    rundir, run_file = existing_run(out)
    filters = SampleFilters.from_json(run_file.filters)
    with ExitStack() as stack:
        held = _hold_patiently(stack, lambda: hold(rundir.writer_lock, "writing its files"), stop)
        await_trusted(client := connect(redis_url), redis_url, _told_once(stop.wait))
        collector = Collector(rundir, client, run_file.run_id, filters)
        collector.stopping, collector.refuse_if_lost = stop, held.refuse_if_lost
        if on_down or on_up:
            _heed_changes(rundir, redis_url, run_file.run_id, OnChange(on_down, on_up), stop)
        say(f"writing the files of {out} until it is stopped (SIGTERM)")
        collector.run()
    return OK


def _heed_changes(rundir: RunDir, redis_url: str, run_id: str, wanted: OnChange, stop: threading.Event) -> None:
    """Beside the collector, in a thread: it sleeps nearly always, and the files wait for no command."""
    from app.cli.changes import ChangeCommands
    from app.store.connection import connect
    from app.store.fleet import run_at

    client = connect(redis_url)
    commands = patient(lambda: ChangeCommands(client, wanted, rundir.logs / "commands.log", say))

    def heed() -> None:
        while not stop.wait(1.0):
            run = patient(lambda: run_at(client, run_id), math.inf)
            commands.heed(run.endpoints if run else [])

    threading.Thread(target=heed, name="changes", daemon=True).start()


def _told_once(wait: Callable[[float], object]) -> Callable[[str], None]:
    """A pause that says why, the first time. wait: for so many seconds; true if we are to stop."""
    told = False

    def pause(trouble: str) -> None:
        nonlocal told
        if not told:
            told = True
            say(f"{trouble.removesuffix('.')}; waiting for it")
        if wait(1.0):
            raise Incomplete("Stopped while Redis was waited for.")

    return pause


def _await_run(rundir: RunDir, seconds: float, stop: threading.Event) -> bool:
    """Wait until a producer has made the run, so long at most; False if told to stop meanwhile."""
    deadline, told = time.monotonic() + seconds, False
    while not (rundir.private / "settings.json").exists() and time.monotonic() < deadline:
        if not told:
            told = True
            say(f"waiting for `headrace enqueue` to make a run in {rundir.out}")
        if stop.wait(0.5):
            return False
    if not rundir.out.exists():
        raise UsageError(f"No such directory: {rundir.out}; `headrace enqueue` makes it (--run-wait SECONDS waits).")
    return True


def _hold_patiently(stack: ExitStack, lock: Callable, stop: threading.Event) -> Held:
    """A collector that was killed a moment ago may still be going: give it some seconds."""
    deadline = time.monotonic() + 15.0
    while True:
        try:
            return stack.enter_context(lock())
        except UsageError:
            if time.monotonic() > deadline or stop.wait(0.2):
                raise

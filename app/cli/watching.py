"""Looking at a run from outside: the ledger for what is on file, Redis (if it can be found) for what is under way.

With OUT on this host both are used; from another host the collector's report stands for the ledger.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from app.cli.inspect import existing_run, redis_in
from app.errors import UsageError
from app.inventory import RunFacts
from app.ledger import Ledger
from app.lock import holder
from app.manifest import RunFile
from app.rundir import RunDir
from app.settings import load_settings
from app.snapshot import COLLECTOR_SECONDS, Snapshot, snapshot
from app.store.connection import connect, safe_url, translated
from app.store.live import EndpointNow, RunNow, histograms, look, reports_at
from app.store.report import Report

_AGAIN_SECONDS = 2.0


class _Redis:
    """The run's Redis, wherever it is now: the private one has another socket after every start."""

    def __init__(self, run_id: str, where: Callable[[], str | None]):
        self._run_id, self._where = run_id, where
        self._client: redis.Redis | None = None
        self._url: str | None = None
        self._again_at = 0.0

    def look(self, datasets: list[str]) -> RunNow | None:
        """None while Redis is away, or does not know the run."""
        if time.monotonic() < self._again_at or (url := self._where()) is None:
            return None
        if self._client is None or url != self._url:
            self.close()
            self._client, self._url = connect(url), url
        try:
            return look(self._client, self._run_id, datasets)
        except (RedisError, OSError):
            self._again_at = time.monotonic() + _AGAIN_SECONDS
            return None

    def histograms(self) -> dict[tuple, float]:
        """Empty while Redis is away."""
        try:
            return histograms(self._client, self._run_id) if self._client is not None else {}
        except (RedisError, OSError):
            return {}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Near:
    """A run whose OUT is on this host."""

    def __init__(self, rundir: RunDir, run_file: RunFile, redis_url: str | None):
        self._rundir, self._run_file = rundir, run_file
        self.redis = _Redis(run_file.run_id, lambda: redis_url or redis_in(rundir))
        self._names = sorted({file.dataset for file in run_file.datasets})
        self._ledger = Ledger.open(rundir)
        self._ledger.catch_up()
        if holder(rundir.lock) is None and not any(one.rows for one in self._ledger.counts()):
            _read_input_again(rundir, self._ledger)

    def take(self) -> Snapshot:
        """Everything known now. A Redis that is away is no error."""
        now = self.redis.look(self._names)
        if now is None or now.report is None or now.at - now.report.at > COLLECTOR_SECONDS:
            self._ledger.catch_up()  # nobody else does
        state = "running" if is_worked_on(now) else None  # its producer may have left: `enqueue --no-wait`
        return snapshot(facts_of(self._rundir, self._run_file, state), self._ledger.counts(), now)

    def close(self) -> None:
        """Let go of ledger and connection."""
        self._ledger.close()
        self.redis.close()


class Far:
    """A run of which this host has the Redis alone."""

    def __init__(self, run_id: str, report: Report, redis_url: str):
        self._run_id, self._report = run_id, report
        self.redis = _Redis(run_id, lambda: redis_url)

    def take(self) -> Snapshot:
        """Everything known now. A Redis that is away is no error."""
        now = self.redis.look([])
        if now is not None and now.report is not None:
            self._report = now.report
        said = self._report
        silent = now is not None and now.at - said.at > COLLECTOR_SECONDS
        state = "running" if (said.producing and not silent) or is_worked_on(now) else None
        facts = RunFacts(said.out, self._run_id, said.recipe, state)
        return snapshot(facts, said.counts, now)

    def close(self) -> None:
        """Let go of the connection."""
        self.redis.close()


@contextmanager
def sight_of(out: Path | None, redis_url: str | None, run_id: str | None = None) -> Iterator[Near | Far]:
    """A run in sight, to `take()` as often as you like: by its directory, or by its Redis from any host.

    Raises UsageError, StorageError.
    """
    sight = _far(redis_url, run_id, out) if out is None or not out.exists() else Near(*existing_run(out), redis_url)
    try:
        yield sight
    finally:
        sight.close()


def _far(redis_url: str | None, run_id: str | None, out: Path | None) -> Far:
    if redis_url is None:
        raise UsageError(
            f"No such directory: {out}; on another host than the run's give --redis URL." if out else
            "Give the run's directory, or --redis URL."
        )  # fmt: skip
    client = connect(redis_url)
    with translated(redis_url):
        known = {run: report for run, report in reports_at(client).items() if report is not None}
    client.close()
    wanted = {run: report for run, report in known.items() if run_id in (None, run) and _is_at(report, out)}
    if len(wanted) > 1:  # finished ones are of less interest
        wanted = {run: report for run, report in wanted.items() if report.producing} or wanted
    if not known:
        raise UsageError(f"Redis at {safe_url(redis_url)} knows no run; correct --redis, or `headrace enqueue` first.")
    if len(wanted) != 1:
        names = "; ".join(f"{run} ({report.out})" for run, report in sorted((wanted or known).items()))
        raise UsageError(f"Redis at {safe_url(redis_url)} knows these runs: {names}. Say which with --run ID.")
    return Far(*wanted.popitem(), redis_url)


def _is_at(report: Report, out: Path | None) -> bool:
    return out is None or report.out == str(out) or report.out == str(out.absolute())


def _read_input_again(rundir: RunDir, ledger: Ledger) -> None:
    """A ledger that was lost has what the files say; which rows the input has, only the input says."""
    from producers.catalog import rows_of
    from producers.inputs import parse_inputs

    with contextlib.suppress(UsageError):  # the input is gone: the counts of the files are what is left
        settings = load_settings(rundir.private / "settings.json")
        for _ in rows_of(parse_inputs(settings.inputs), settings, ledger):
            pass


def is_worked_on(now: RunNow | None) -> bool:
    """Whether workers hold tasks of the run."""
    return now is not None and any(now.in_flight.values())


def facts_of(rundir: RunDir, run_file: RunFile, state: str | None = None) -> RunFacts:
    """What run.json and the lock say; `state` if the caller knows it better."""
    if state is None and holder(rundir.lock) is not None:
        state = "running"
    return RunFacts(out=str(rundir.out), id=run_file.run_id, recipe=run_file.recipe_fingerprint, state=state)


def inventory_of(rundir: RunDir, run_file: RunFile, redis_url: str | None) -> dict[str, Any]:
    """The inventory of a run, running or not; the ledger mends itself on the way."""
    with contextlib.closing(Near(rundir, run_file, redis_url)) as sight:
        return sight.take().inventory


def troubles(endpoints: Sequence[EndpointNow]) -> str:
    """Lines about endpoints that get nothing now, for people; "" if there are none."""
    away = [endpoint for endpoint in endpoints if endpoint.open_since is not None]
    lines = [f"{one.url} is {'held' if one.differs else 'away'}: {one.evidence}\n" for one in away]
    return "".join(["\n", *lines]) if lines else ""

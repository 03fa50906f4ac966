"""`headrace run`: private Redis, collector, producer and workers of one run, watched until it is complete.

Whatever dies is started again; what it held is found again by the others. The supervisor itself decides nothing about
rows: it looks at the ledger and at Redis, shows what it sees, and ends with the exit code that says how it ended.
"""

import contextlib
import logging
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import redis

from app.cli.changes import NOTHING, ChangeCommands, OnChange
from app.cli.crew import KILL_SECONDS, Crew
from app.cli.meet import meet_endpoints, record_servers
from app.cli.prepare import Prepared
from app.cli.spare import Spare
from app.cli.view import View
from app.cli.watching import facts_of
from app.errors import OK, SOME_REJECTED, Incomplete, StorageError, error_of
from app.ledger import Ledger
from app.lock import Held
from app.manifest import RunManifest
from app.snapshot import Snapshot, snapshot
from app.store.connection import AWAY, check, connect
from app.store.embedded import PrivateServer
from app.store.fleet import run_at
from app.store.holders import forget_all
from app.store.live import RunNow, look

log = logging.getLogger(__name__)
_LOOK_SECONDS, _LOOK_WAITING_SECONDS = 0.5, 1.0
_GLANCE_SECONDS = 0.03  # whether the ledger was written to
_NOW_AND_THEN_SECONDS = 15.0
_ANSWER_SECONDS = 5.0  # a Redis that is silent for longer is said not to answer
_LEAST_DISK_BYTES = 256 * 1024
_REDIS_PAUSE_SECONDS = 2.0
_NOTHING_SENT = "Stopped before anything was sent; the same command starts it."
_MOST_DEATHS = 20


@dataclass
class Supervisor:
    """One run on this machine. `run()` returns its exit code."""

    prepared: Prepared
    view: View
    lock: Held
    api_key: object = None
    on_change: OnChange = NOTHING
    spares: dict[str, Spare] = field(default_factory=dict)  #: by name of a child
    wanted_stops: int = 0  #: 1: drain, 2: at once
    final: dict[str, Any] | None = None  #: the inventory of a complete run
    _server: PrivateServer | None = None
    _crew: Crew | None = None
    _client: redis.Redis | None = None
    _url: str = ""
    _manifest: RunManifest | None = None
    _done_at: float = 0.0
    _redis_deaths: int = 0  #: in a row, while it was being started
    _redis_at: float = 0.0  #: when to try again
    _commands: ChangeCommands | None = None
    _stop_by: float = float("inf")  #: whoever was told to stop and runs still then is killed
    _to_say: list[str] = field(default_factory=list)  #: by signal handlers, which may interrupt whoever speaks
    _started: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Start everything, watch it, end everything."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        try:
            self._start_redis()
            self.prepared, self._manifest = meet_endpoints(
                self.prepared, self._client, self._url, self.api_key, self.view.say
            )
            if self.wanted_stops:  # whatever ran when the signal came kept the exception to itself
                raise Incomplete(_NOTHING_SENT)
            self._crew = Crew(self.prepared, self._client, self._url, self.spares, self.view.say)
            self._crew.start()
            return self._watch()
        finally:
            self._end_crew()
            if self._server is not None:
                self._server.stop()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.wanted_stops += 1
        if self._crew is None or not self._crew.is_there:
            raise Incomplete(_NOTHING_SENT)
        drain = self.prepared.settings.drain_seconds
        if self.wanted_stops == 1:
            self._stop_by = time.monotonic() + drain + 3 * KILL_SECONDS
            self._to_say.append(f"stopping: what generates has {drain:g} s to finish; once more to stop at once")
            self._crew.drain()
        else:
            self._stop_by = min(self._stop_by, time.monotonic() + KILL_SECONDS)
            self._to_say.append("stopping at once")
            self._crew.stop_at_once()

    def _start_redis(self) -> None:
        settings = self.prepared.settings
        if settings.redis is None:
            self._server = PrivateServer(self.prepared.rundir.redis)
            self._server.start()
            self._url = self._server.url
        else:
            self._url = settings.redis
        self._client = connect(self._url, _ANSWER_SECONDS)
        check(self._client, self._url)
        if self._server is not None:
            forget_all(self._client)
        log_path = self.prepared.rundir.logs / "commands.log"
        self._commands = ChangeCommands(self._client, self.on_change, log_path, self.view.say)

    def _watch(self) -> int:
        with Ledger.open(self.prepared.rundir) as ledger:
            while True:
                while self._to_say:
                    self.view.say(self._to_say.pop(0))
                self._refuse_lost_directory()
                now = self._look()
                seen = self._snapshot(ledger, now)
                self.view.show(seen)
                if seen.complete:
                    self._record_servers()
                    self.final = seen.inventory
                    return SOME_REJECTED if self.final["totals"]["rejected"] else OK
                if now is not None and now.halt is not None:
                    raise error_of(now.halt["exit_code"], now.halt["message"])
                if self._stopped():
                    raise Incomplete("Stopped with rows pending; the same command resumes.")
                self._commands.heed(self._manifest.endpoints)
                if not self.wanted_stops:
                    self._revive_redis()
                    self._crew.revive()
                self._now_and_then()
                if seen.waiting_for:
                    time.sleep(_LOOK_WAITING_SECONDS)
                else:
                    self._rest(ledger, _LOOK_SECONDS)

    def _rest(self, ledger: Ledger, seconds: float) -> None:
        """Until the next look is due; at once where the last completion is on file."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE_SECONDS))
            if ledger.has_changed() and ledger.is_complete():
                return

    def _refuse_lost_directory(self) -> None:
        if not self.prepared.rundir.run_json.exists():
            raise StorageError(
                f"{self.prepared.settings.out} was moved or removed while the run went on; put it back and resume."
            )

    def _now_and_then(self) -> None:
        """What need not be done at every look."""
        if time.monotonic() - self._done_at >= _NOW_AND_THEN_SECONDS:
            self._done_at = time.monotonic()
            self.lock.refuse_if_lost()
            self._record_servers()

    def _record_servers(self) -> None:
        with contextlib.suppress(*AWAY):
            record_servers(self.prepared.rundir, self._client, self._manifest, self.view.say)

    def _look(self) -> RunNow | None:
        names = [dataset.name for dataset in self.prepared.datasets]
        try:
            self._manifest = run_at(self._client, self._manifest.run_id) or self._manifest
            return look(self._client, self._manifest.run_id, names, time.monotonic() - self._started)
        except AWAY:
            return None

    def _snapshot(self, ledger: Ledger, now: RunNow | None) -> Snapshot:
        state = "draining" if self.wanted_stops else "running"
        facts = facts_of(self.prepared.rundir, self.prepared.run_file, state)
        return snapshot(facts, ledger.counts(), now, self._trouble())

    def _trouble(self) -> str:
        """What only this host knows to be amiss, in a sentence."""
        out = self.prepared.rundir.out
        full = shutil.disk_usage(out).free < _LEAST_DISK_BYTES
        return f"the disk of {out} is full; free some space" if full else ""

    def _stopped(self) -> bool:
        """Whether all that was asked to end has ended or had its time (a run that is out of time asks by itself)."""
        limit = self.prepared.settings.limit_seconds
        if limit is not None and not self.wanted_stops and time.monotonic() - self._started > limit:
            self.view.say(f"--limit-seconds {limit:g} is over")
            os.kill(os.getpid(), signal.SIGTERM)
            return False
        if not self.wanted_stops:
            return False
        return time.monotonic() > self._stop_by or not self._crew.works

    def _end_crew(self) -> None:
        """When all is on file, what workers and producer still hold is in our own Redis alone, and of no use."""
        if self._crew is None:
            return
        deadline = min(self._stop_by, time.monotonic() + self.prepared.settings.drain_seconds + KILL_SECONDS)
        needless = self.final is not None and self._server is not None
        self._crew.end(deadline, KILL_SECONDS * (1 if self.wanted_stops > 1 else 3), needless=needless)

    def _revive_redis(self) -> None:
        """It may die again while it starts, or find the disk full: tried again, as everything else is."""
        if self._server is None or self._server.alive() or time.monotonic() < self._redis_at:
            return
        self.view.say("the private Redis died; starting it again on its AOF")
        try:
            self._server.start()
        except StorageError as exc:
            self._redis_deaths += 1
            if self._redis_deaths >= _MOST_DEATHS:
                raise
            self.view.say(str(exc))
            self._redis_at = time.monotonic() + _REDIS_PAUSE_SECONDS
        else:
            self._redis_deaths = 0

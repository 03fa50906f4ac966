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
from app.cli.children import Child
from app.cli.meet import meet_endpoints, record_servers
from app.cli.prepare import Prepared
from app.cli.serve import FLOWER_AUTH, FLOWER_PORT, made_up_login
from app.cli.spare import AVAILABLE, Spare
from app.cli.view import View
from app.cli.watching import facts_of
from app.errors import (
    INTERNAL,
    OK,
    RECIPE_CHANGED,
    SOME_REJECTED,
    STORAGE,
    USAGE,
    Incomplete,
    StorageError,
    error_of,
)
from app.ledger import Ledger
from app.lock import Held
from app.manifest import RunManifest
from app.snapshot import Snapshot, snapshot
from app.store.connection import AWAY, check, connect
from app.store.embedded import PrivateServer
from app.store.fleet import run_at
from app.store.holders import forget_all, forget_worker
from app.store.live import RunNow, look
from app.store.names import worker_name

log = logging.getLogger(__name__)
_LOOK_SECONDS, _LOOK_WAITING_SECONDS = 0.5, 1.0
_GLANCE_SECONDS = 0.03  # whether the ledger was written to
_NOW_AND_THEN_SECONDS = 15.0
_ANSWER_SECONDS = 5.0  # a Redis that is silent for longer is said not to answer
_LEAST_DISK_BYTES = 256 * 1024
_KILL_SECONDS = 10.0
_REDIS_PAUSE_SECONDS = 2.0
_MOST_DEATHS = 20
_ONLOOKERS = ("metrics", "flower")
_MOST_INTERNAL = 4  # an error of ours repeats itself


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
    _children: dict[str, Child] = field(default_factory=dict)
    _client: redis.Redis | None = None
    _url: str = ""
    _manifest: RunManifest | None = None
    _done_at: float = 0.0
    _given_up: set[str] = field(default_factory=set)
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
            self._start_children()
            return self._watch()
        finally:
            self._end_children()
            if self._server is not None:
                self._server.stop()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.wanted_stops += 1
        if self._manifest is None or not self._children:
            raise Incomplete("Stopped before anything was sent; the same command starts it.")
        drain = self.prepared.settings.drain_seconds
        if self.wanted_stops == 1:
            self._stop_by = time.monotonic() + drain + 3 * _KILL_SECONDS
            self._to_say.append(f"stopping: what generates has {drain:g} s to finish; once more to stop at once")
            for name, child in self._children.items():
                if name.startswith(("worker", "producer")):
                    child.signal(signal.SIGTERM)
        else:
            self._stop_by = min(self._stop_by, time.monotonic() + _KILL_SECONDS)
            self._to_say.append("stopping at once")
            for name, child in self._children.items():
                if name.startswith("worker"):
                    child.signal(signal.SIGQUIT)

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

    def _start_children(self) -> None:
        out, settings = str(self.prepared.rundir.out), self.prepared.settings
        commands = {
            "collector": ["collect", out],
            "producer": ["produce", out],
        }
        for n in range(1, settings.workers + 1):
            commands[f"worker-{n}"] = [
                "worker", "--name", f"{self.prepared.run_file.run_id}-{n}",
                "--slots", str(settings.slots), "--drain-seconds", str(settings.drain_seconds),
            ]  # fmt: skip
        if settings.metrics_port is not None:
            commands["metrics"] = ["metrics", out, "--port", str(settings.metrics_port)]
        if settings.flower:
            commands["flower"] = ["flower", out]
        for name, arguments in commands.items():
            log_path = self.prepared.rundir.logs / f"{name}.log"
            self._children[name] = Child(name, arguments, log_path, self._environment(name))
            self._children[name].start(self._spare(name))

    def _spare(self, name: str) -> Spare | None:
        """Who stands by to be this child. The producer shares the tokenizer that was loaded here meanwhile."""
        if AVAILABLE and name == "producer":
            return Spare("producers.enqueue", "app.celery_app")
        return self.spares.get(name)

    def _environment(self, name: str) -> dict[str, str]:
        """What a child must know and its command line must not show. Onlookers need no key to the endpoints."""
        known = {"HEADRACE_REDIS": self._url}
        if name in _ONLOOKERS:
            known["HEADRACE_API_KEY"] = ""
        if name == "flower":
            login = os.environ.get(FLOWER_AUTH) or made_up_login()
            known[FLOWER_AUTH] = login
            words = f"as {FLOWER_AUTH} says" if FLOWER_AUTH in os.environ else login.replace(":", " ")
            self.view.say(f"Flower at http://127.0.0.1:{FLOWER_PORT} · user and password {words}")
        return known

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
                self._revive()
                self._now_and_then()
                self._rest(ledger, _LOOK_WAITING_SECONDS if seen.waiting_for else _LOOK_SECONDS)

    def _rest(self, ledger: Ledger, seconds: float) -> None:
        """Until the next look is due; at once where the last completion is on file."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE_SECONDS))
            if ledger.has_changed() and not ledger.pending_total():
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
        asked = [child for name, child in self._children.items() if name.startswith(("worker", "producer"))]
        return time.monotonic() > self._stop_by or not any(child.running for child in asked)

    def _revive(self) -> None:
        if self.wanted_stops:
            return
        self._revive_redis()
        for child in self._children.values():
            if child.process is not None and child.ended() is None:
                continue
            if child.name == "producer" and child.ended() == 0:
                continue
            if child.name not in _ONLOOKERS:
                _refuse_hopeless(child)
            elif child.ended() is not None and child.deaths >= _MOST_INTERNAL:
                self._give_up(child)
                continue
            if child.process is not None:
                self.view.say(f"{child.name} ended; starting it again")
                self._end_holds(child)
            child.start_again()

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

    def _give_up(self, child: Child) -> None:
        """Nobody needs it for the run to go on."""
        if child.name not in self._given_up:
            self._given_up.add(child.name)
            self.view.say(f"{child.name} does not stay up, and the run goes on without it: {child.last_words()}")

    def _end_holds(self, child: Child) -> None:
        """We saw it die: its tasks need not wait until claims and leases expire."""
        if not child.name.startswith("worker"):
            return
        names = [dataset.name for dataset in self.prepared.datasets]
        with contextlib.suppress(*AWAY):  # then they expire by themselves
            forget_worker(self._client, worker_name(self._short_name(child)), self._manifest.run_id, names)

    def _short_name(self, child: Child) -> str:
        return f"{self.prepared.run_file.run_id}-{child.name.removeprefix('worker-')}"

    def _end_children(self) -> None:
        """Workers and producer first, then the collector, which writes what they published. When all is on file, what
        they still hold is in our own Redis alone, and needed by nobody: they are not asked for it."""
        done = self.final is not None and self._server is not None
        workers = [child for name, child in self._children.items() if name != "collector"]
        for child in workers:
            child.signal(signal.SIGKILL if done and child.name not in _ONLOOKERS else signal.SIGTERM)
        deadline = min(self._stop_by, time.monotonic() + self.prepared.settings.drain_seconds + _KILL_SECONDS)
        for child in workers:
            if not child.wait(deadline - time.monotonic()):
                child.signal(signal.SIGKILL)
        if (collector := self._children.get("collector")) is not None:
            collector.signal(signal.SIGTERM)
            if not collector.wait(_KILL_SECONDS * (1 if self.wanted_stops > 1 else 3)):
                collector.signal(signal.SIGKILL)


def _refuse_hopeless(child: Child) -> None:
    """Raise what a child said if starting it again cannot help: what a person must change, or many deaths in a row."""
    status = child.ended()
    if status in (USAGE, RECIPE_CHANGED):
        raise error_of(status, child.last_words())
    if status == STORAGE:  # Redis or the disk is full or away: it is tried again until it is mended
        return
    if status is not None and child.deaths >= (_MOST_INTERNAL if status == INTERNAL else _MOST_DEATHS):
        times = f"{child.name} ended {child.deaths + 1} times in a row"
        raise error_of(status, f"{times} ({child.last_words()}); see {child.log_path}.")

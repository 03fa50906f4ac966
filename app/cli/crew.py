"""The children of one run: collector, producer, workers and onlookers. Whatever dies is started again."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import redis

from app.cli.children import Child
from app.cli.prepare import Prepared
from app.cli.serve import FLOWER_AUTH, FLOWER_PORT, made_up_login
from app.cli.spare import AVAILABLE, Spare
from app.errors import INTERNAL, RECIPE_CHANGED, STORAGE, USAGE, error_of
from app.store.connection import AWAY
from app.store.holders import forget_worker
from app.store.names import worker_name

KILL_SECONDS = 10.0  #: from the end of its time to SIGKILL
_MOST_DEATHS = 20
_ONLOOKERS = ("metrics", "flower")
_MOST_INTERNAL = 4  # an error of ours repeats itself


class Crew:
    """One run's. Made when its Redis answers; `say` gets what a person should know."""

    def __init__(
        self, prepared: Prepared, client: redis.Redis, url: str, spares: dict[str, Spare], say: Callable[[str], None]
    ):  # fmt: skip
        """spares: those that stand by, by the name of the child that each is to be."""
        self._prepared, self._client, self._url, self._spares, self._say = prepared, client, url, spares, say
        self._children: dict[str, Child] = {}
        self._given_up: set[str] = set()
        self._told: dict[str, int] = {}  # signals by kind, for whoever starts later too

    @property
    def is_there(self) -> bool:
        """Whether one of them was started."""
        return bool(self._children)

    @property
    def works(self) -> bool:
        """Whether somebody who takes or makes tasks runs still."""
        return any(child.running for child in self._some("worker", "producer"))

    def start(self) -> None:
        """Start all of them."""
        out, settings = str(self._prepared.rundir.out), self._prepared.settings
        commands = {"collector": ["collect", out], "producer": ["produce", out]}
        for n in range(1, settings.workers + 1):
            commands[f"worker-{n}"] = [
                "worker", "--name", f"{self._prepared.run_file.run_id}-{n}",
                "--slots", str(settings.slots), "--drain-seconds", str(settings.drain_seconds),
            ]  # fmt: skip
        if settings.metrics_port is not None:
            commands["metrics"] = ["metrics", out, "--port", str(settings.metrics_port)]
        if settings.flower:
            commands["flower"] = ["flower", out]
        for name, arguments in commands.items():
            log_path = self._prepared.rundir.logs / f"{name}.log"
            child = self._children[name] = Child(name, arguments, log_path, self._environment(name))
            child.start(self._spare(name))
            self._remind(child)

    def drain(self) -> None:
        """Have workers finish what generates, and the producer send nothing more."""
        self._tell({"worker": signal.SIGTERM, "producer": signal.SIGTERM})

    def stop_at_once(self) -> None:
        """Have workers hand back everything now."""
        self._tell({"worker": signal.SIGQUIT})

    def revive(self) -> None:
        """Start again whatever died. Raises what a child said if that cannot help."""
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
                self._say(f"{child.name} ended; starting it again")
                self._end_holds(child)
            child.start_again()
            self._remind(child)

    def end(self, deadline: float, collector_seconds: float, *, needless: bool) -> None:
        """Workers and producer first, then the collector, which writes what they published. deadline: their last
        moment, time.monotonic(). needless: nobody needs what they hold, so they are not asked for it."""
        others = [child for name, child in self._children.items() if name != "collector"]
        for child in others:
            child.signal(signal.SIGKILL if needless and child.name not in _ONLOOKERS else signal.SIGTERM)
        for child in others:
            if not child.wait(deadline - time.monotonic()):
                child.signal(signal.SIGKILL)
        for collector in self._some("collector"):
            collector.signal(signal.SIGTERM)
            if not collector.wait(collector_seconds):
                collector.signal(signal.SIGKILL)

    def _tell(self, numbers: dict[str, int]) -> None:
        self._told |= numbers
        for child in list(self._children.values()):
            self._remind(child)

    def _remind(self, child: Child) -> None:
        """Signals come at any moment: one that was being started when the others were told is told now."""
        if number := self._told.get(child.name.split("-")[0]):
            child.signal(number)

    def _some(self, *names: str) -> list[Child]:
        return [child for name, child in self._children.items() if name.startswith(names)]

    def _spare(self, name: str) -> Spare | None:
        """Who stands by to be this child. The producer shares the tokenizer that was loaded here meanwhile."""
        if AVAILABLE and name == "producer":
            return Spare("producers.enqueue", "app.celery_app")
        return self._spares.get(name)

    def _environment(self, name: str) -> dict[str, str]:
        """What a child must know and its command line must not show. Onlookers need no key to the endpoints."""
        known = {"HEADRACE_REDIS": self._url}
        if name in _ONLOOKERS:
            known["HEADRACE_API_KEY"] = ""
        if name == "flower":
            login = os.environ.get(FLOWER_AUTH) or made_up_login()
            known[FLOWER_AUTH] = login
            words = f"as {FLOWER_AUTH} says" if FLOWER_AUTH in os.environ else login.replace(":", " ")
            self._say(f"Flower at http://127.0.0.1:{FLOWER_PORT} · user and password {words}")
        return known

    def _give_up(self, child: Child) -> None:
        """Nobody needs it for the run to go on."""
        if child.name not in self._given_up:
            self._given_up.add(child.name)
            self._say(f"{child.name} does not stay up, and the run goes on without it: {child.last_words()}")

    def _end_holds(self, child: Child) -> None:
        """We saw it die: its tasks need not wait until claims and leases expire."""
        if not child.name.startswith("worker"):
            return
        names = [dataset.name for dataset in self._prepared.datasets]
        run_id = self._prepared.run_file.run_id
        name = worker_name(f"{run_id}-{child.name.removeprefix('worker-')}")
        with contextlib.suppress(*AWAY):  # then they expire by themselves
            forget_worker(self._client, name, run_id, names)


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

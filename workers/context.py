"""One worker process: its connections, what it holds, and the loops that keep both alive."""

import asyncio
import logging
import os
import signal
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from pydantic import SecretStr

from app.manifest import RunManifest
from app.sglang.client import SGLangClient
from app.store import keys
from app.store.courier import Courier
from app.store.keys import RunKeys
from workers.admission import Admission
from workers.endpoints import Endpoints
from workers.holdings import HEARTBEAT_SECONDS, Holdings
from workers.observer import Observer
from workers.refusals import RefusalBook
from workers.watch import Watch

log = logging.getLogger(__name__)
_MANIFEST_SECONDS = 5.0
_IDLE_RUN_SECONDS = 120.0  #: a run of which nothing came for so long is over, or will be told again


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker is started."""

    redis_url: str
    name: str  #: Celery's node name, host included
    slots: int = 1000  #: tasks it holds at once, waiting or generating
    lanes: tuple[str, ...] = ("short", "long")
    drain_seconds: float = 30.0
    api_key: SecretStr | None = None


class WorkerContext:
    """Built on the worker's event loop; closed when the worker stops."""

    def __init__(self, settings: WorkerSettings):
        self.settings = settings
        self.courier = Courier(settings.redis_url)
        self.client = SGLangClient(api_key=settings.api_key)
        self.holdings = Holdings(self.courier)
        ourselves = f"{settings.name}:{uuid.uuid4().hex[:8]}"  # two workers may have been given the same name
        self.endpoints = Endpoints(self.courier, self.client, ourselves)
        self.admission = Admission(self.courier, self.holdings, self.endpoints, ourselves, self.run)
        self.observer = Observer(self.courier, self.client, self.endpoints, self.holdings, ourselves)
        self.watch = Watch(self.courier, self.client, self.endpoints, self.holdings, ourselves)
        self.refusals = RefusalBook(self.courier)
        self.stop_ids: dict[str, set[int]] = defaultdict(set)  #: per run, ids at which answers were seen to stop
        self.draining = False
        self.slots: Callable[[], int] = lambda: settings.slots  #: as many as the pool has now
        self._runs: dict[str, tuple[float, RunManifest]] = {}
        self._loops: list[asyncio.Task] = []

    async def start(self) -> None:
        """Start the loops: heartbeat, admission, endpoints, observer, watch."""
        self._loops = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in (
                ("heartbeat", self._heartbeat()),
                ("admission", self.admission.run_forever()),
                ("endpoints", self.endpoints.run_forever()),
                ("observer", self.observer.run_forever()),
                ("watch", self.watch.run_forever()),
            )
        ]
        for task in self._loops:
            task.add_done_callback(_end_if_broken)

    async def run(self, run_id: str) -> RunManifest | None:
        """The manifest of a run, at most a few seconds old; the last known one if Redis forgot it."""
        known = self._runs.get(run_id)
        if known is not None and time.monotonic() - known[0] < _MANIFEST_SECONDS:
            return known[1]
        data = await self.courier.command("GET", RunKeys(run_id).manifest)
        if data is None:
            return known[1] if known else None
        manifest = RunManifest.model_validate_json(data)
        self._runs[run_id] = (time.monotonic(), manifest)
        self.endpoints.use(manifest)
        return manifest

    def leave_idle_runs(self, now: float) -> None:
        """Forget runs of which nothing is here and nothing came for long. now: time.monotonic()."""
        here = {claim.run_id for claim in self.holdings.claims}
        for run_id in [run_id for run_id, (at, _) in self._runs.items() if now - at > _IDLE_RUN_SECONDS]:
            if run_id not in here:
                del self._runs[run_id]
                self.stop_ids.pop(run_id, None)
                self.endpoints.leave(run_id)

    async def drain(self) -> None:
        """Hand back at once what only waits, let what generates finish within drain_seconds, hand back the rest."""
        self.draining = True
        for work in list(self.holdings.claims.values()):
            if work.lease is None:
                work.task.cancel("draining")
        deadline = time.monotonic() + self.settings.drain_seconds
        while (left := self._tasks()) and time.monotonic() < deadline:
            await asyncio.wait(left, timeout=deadline - time.monotonic())
        for task in self._tasks():
            task.cancel("drain time is over")

    def _tasks(self) -> list[asyncio.Task]:
        return [work.task for work in self.holdings.claims.values()]

    async def close(self) -> None:
        """End the loops and connections."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, self.endpoints.close(), return_exceptions=True)
        await self.courier.command("HDEL", keys.WORKER_INFO, self.settings.name)
        await self.client.aclose()
        await self.courier.close()

    async def _heartbeat(self) -> None:
        while True:
            await self.holdings.renew()
            await self._heed_halts()
            self.leave_idle_runs(time.monotonic())
            await self._sign()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _heed_halts(self) -> None:
        """Tasks of a halted run wait for nothing: they go back, and their redelivery ends without work."""
        runs = {claim.run_id for claim in self.holdings.claims}
        halted = {run for run in runs if await self.courier.command("EXISTS", RunKeys(run).halt)}
        for claim, work in list(self.holdings.claims.items()):
            if claim.run_id in halted and work.lease is None:
                work.task.cancel("the run is halted")

    async def _sign(self) -> None:
        seconds, microseconds = await self.courier.command("TIME")  # clocks of hosts differ
        at = int(seconds) + int(microseconds) / 1e6
        info = {
            "slots": self.slots(), "lanes": self.settings.lanes, "at": at,
            "claims": len(self.holdings.claims), "leases": len(self.holdings.leases),
            "waiting": self.admission.waiting, "draining": self.draining, "oldest": self.holdings.oldest(at),
        }  # fmt: skip
        await self.courier.command("HSET", keys.WORKER_INFO, self.settings.name, orjson.dumps(info))


def _end_if_broken(task: asyncio.Task) -> None:
    """A worker without one of its loops would hold tasks for ever: better that it ends and is started again."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("worker_loop_broken %s", task.get_name(), exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)

"""Starting and stopping one worker process: Celery around the story of workers/generate.py.

Stopping: the first SIGTERM drains (what waits goes back at once, what generates has drain_seconds); SIGQUIT, or a
second Ctrl-C, stops at once. Either way everything unfinished is back in the queue and aborted at its endpoint.
"""

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
import time
import warnings

from celery import Celery, signals
from celery.exceptions import CPendingDeprecationWarning, Reject, SecurityWarning

from app.celery_app import GENERATE_TASK, make_app
from app.lanes import Lane
from app.store.names import SUPERVISOR
from workers import control  # noqa: F401 - registers our remote control
from workers.context import WorkerContext, WorkerSettings
from workers.delivery import Delivery
from workers.generate import HandBack, generate
from workers.lanegate import lane_gate
from workers.pool import LoopPool, loop, wait_for

log = logging.getLogger(__name__)


#: A worker that cannot hand back what it holds (Redis is gone, too) ends all the same after this long.
_GIVE_UP_SECONDS = 10.0


def run_worker(settings: WorkerSettings) -> int:
    """Run a worker until it is told to stop. Returns its exit code."""
    logging.getLogger("celery.app.trace").setLevel(logging.ERROR)  # a task handed back is no news
    logging.getLogger("kombu.transport.virtual.base").setLevel(logging.ERROR)  # nor is one that met a closing lane
    celery = make_app(settings.redis_url)
    celery.steps["consumer"].add(Delivery)
    context = asyncio.run_coroutine_threadsafe(_make_context(settings), loop()).result()
    celery.steps["consumer"].add(lane_gate(context.admission, settings.lanes))
    _register_task(celery, context)

    @signals.worker_shutting_down.connect(weak=False)
    def _drain(sig: str, how: str, exitcode: int, **_: object) -> None:
        warm = how.lower() == "warm"
        _end_at_last(_GIVE_UP_SECONDS + (settings.drain_seconds if warm else 0.0))
        if warm:
            asyncio.run_coroutine_threadsafe(context.drain(), loop())
        else:
            context.draining = True

    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # a lost terminal drains too
    warnings.filterwarnings("ignore", category=SecurityWarning)  # containers run as root; messages are JSON, not pickle
    worker = celery.Worker(
        hostname=settings.name, pool=LoopPool, concurrency=settings.slots,
        queues=[Lane(lane).queue for lane in settings.lanes], loglevel="WARNING", task_events=False,
        without_mingle=True, without_gossip=True, quiet=True, optimization="fair",
    )  # fmt: skip
    # Only now, for Celery has just asked for all of these: what a lost Redis does here is decided.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    context.slots = lambda: worker.pool.limit
    threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
    try:
        worker.start()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told to stop twice: it does, and ends with its own code
        closing = asyncio.run_coroutine_threadsafe(context.close(), loop())
        concurrent.futures.wait([closing], timeout=_GIVE_UP_SECONDS)
    return worker.exitcode or 0


def _end_with_supervisor() -> None:
    """Celery's handlers can fail when Redis went with the supervisor; whoever outlives it ends all the same."""
    supervisor = os.environ.get(SUPERVISOR)
    while supervisor is not None and os.getppid() == int(supervisor):
        time.sleep(1.0)
    if supervisor is not None:
        _end_at_last(_GIVE_UP_SECONDS)


def _end_at_last(seconds: float) -> None:
    """Celery waits for a lost broker without end, and so would a worker whose supervisor and Redis are gone."""

    def end() -> None:
        log.error("worker_gives_up: it could not hand back everything within %g s", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


async def _make_context(settings: WorkerSettings) -> WorkerContext:
    context = WorkerContext(settings)
    await context.start()
    return context


def _register_task(celery: Celery, context: WorkerContext) -> None:
    @celery.task(name=GENERATE_TASK, ignore_result=True, acks_late=True)
    def generate_task(run_id: str, dataset: str, key: str) -> str:
        try:
            return wait_for(generate(context, run_id, dataset, key))
        except (concurrent.futures.CancelledError, HandBack):
            raise Reject("handed back", requeue=True) from None

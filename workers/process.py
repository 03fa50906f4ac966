"""Starting and stopping one worker process: Celery around the story of workers/generate.py.

Stopping: the first SIGTERM drains (what waits goes back at once, what generates has drain_seconds); SIGQUIT, or a
second Ctrl-C, stops at once. Either way everything unfinished is back in the queue and aborted at its endpoint.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import resource
import signal
import warnings

from celery import Celery, signals
from celery.exceptions import Reject, SecurityWarning

from app.celery_app import GENERATE_TASK, make_app
from app.lanes import Lane
from workers.context import WorkerContext, WorkerSettings
from workers.delivery import Delivery
from workers.generate import HandBack, generate
from workers.lanegate import lane_gate
from workers.pool import LoopPool, loop, wait_for

log = logging.getLogger(__name__)


_OTHER_FILES = 100  # Redis, logs, the loop: everything that is no connection to an endpoint


def open_files_for(slots: int) -> int:
    """Raise the limit of open files as far as `slots` connections need; returns the slots that are possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = slots + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return slots
    possible = max(1, soft - _OTHER_FILES)
    log.warning("slots_lowered from %d to %d: this machine allows %d open files (ulimit -n)", slots, possible, soft)
    return possible


def run_worker(settings: WorkerSettings) -> int:
    """Run a worker until it is told to stop. Returns its exit code."""
    settings = dataclasses.replace(settings, slots=open_files_for(settings.slots))
    logging.getLogger("celery.app.trace").setLevel(logging.ERROR)  # a task handed back is no news
    celery = make_app(settings.redis_url)
    celery.steps["consumer"].add(Delivery)
    context = asyncio.run_coroutine_threadsafe(_make_context(settings), loop()).result()
    celery.steps["consumer"].add(lane_gate(context.admission, settings.lanes))
    _register_task(celery, context)

    @signals.worker_shutting_down.connect(weak=False)
    def _drain(sig: str, how: str, exitcode: int, **_: object) -> None:
        if how.lower() == "warm":
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
    try:
        worker.start()
    finally:
        asyncio.run_coroutine_threadsafe(context.close(), loop()).result(timeout=10)
    return worker.exitcode or 0


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

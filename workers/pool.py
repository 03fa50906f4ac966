"""The worker's pool: threads that wait for coroutines on one shared asyncio loop.

Celery's threads pool cannot grow, shrink, revoke or stop cold; this one can. A task's thread does nothing but wait, so
a thousand requests in flight cost one core a fifth of its time. Private attributes of Celery and concurrent.futures
that are touched here are pinned by tests/unit/test_celery_pins.py.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future

import uvloop
from celery.concurrency.base import apply_target
from celery.concurrency.thread import ApplyResult
from celery.concurrency.thread import TaskPool as ThreadPool

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()
_waiting_for: dict[int, Future] = {}


def loop() -> asyncio.AbstractEventLoop:
    """The process's one event loop, running in a thread of its own."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = uvloop.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="loop", daemon=True).start()
    return _loop


def wait_for(coroutine: Coroutine) -> object:
    """Run a coroutine on the loop and wait for it in this thread.

    Raises concurrent.futures.CancelledError when the job is terminated or its task cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop())
    me = threading.get_ident()
    _waiting_for[me] = future
    try:
        return future.result()
    finally:
        _waiting_for.pop(me, None)


class LoopPool(ThreadPool):
    """Celery's threads pool, with the parts that live operation needs."""

    def on_apply(self, target, args=None, kwargs=None, callback=None, accept_callback=None, **_) -> ApplyResult:
        """Start a task; its job id is the thread that waits for it."""
        return ApplyResult(
            self.executor.submit(
                apply_target, target, args, kwargs, callback, accept_callback, getpid=threading.get_ident
            )
        )

    def grow(self, n: int = 1) -> None:
        """`pool_grow`: n more slots, at once."""
        self.limit += n
        self.executor._max_workers = max(self.executor._max_workers, self.limit)

    def shrink(self, n: int = 1) -> None:
        """`pool_shrink`: n fewer; running tasks finish, the prefetch window does the limiting."""
        self.limit = max(1, self.limit - n)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Cancel the coroutine that this thread waits for (cold stop, revoke with terminate)."""
        future = _waiting_for.get(pid)
        if future is not None:
            future.cancel()

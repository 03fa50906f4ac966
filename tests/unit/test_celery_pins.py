"""Private attributes of Celery, kombu and concurrent.futures that the worker's modules touch.

Each test fails when an upgrade changes what we lean on; then workers/pool.py or workers/delivery.py must follow.
"""

import inspect
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import celery
import celery.worker.request
import kombu.transport.redis
import kombu.transport.virtual
from celery.concurrency.base import apply_target
from celery.concurrency.thread import ApplyResult, TaskPool
from redis._parsers.hiredis import _HiredisParser
from redis._parsers.resp2 import _RESP2Parser

from app.store.connection import AWAY, DiskFull
from workers.pool import LoopPool

ROOT = Path(__file__).parent.parent.parent


def test_the_celery_that_was_measured_is_the_one_installed():
    """Delivery was measured on 5.7; another minor version needs measuring again."""
    assert celery.VERSION[:2] == (5, 7)


def test_the_threads_pool_submits_to_an_executor_whose_size_can_grow():
    """LoopPool extends TaskPool.executor and sets ThreadPoolExecutor._max_workers."""
    assert "self.executor.submit(apply_target" in re.sub(r"\s+", " ", inspect.getsource(TaskPool.on_apply))
    with ThreadPoolExecutor(1) as executor:
        executor._max_workers = 2
        barrier = threading.Barrier(2, timeout=10)
        assert all(f.result() in (0, 1) for f in [executor.submit(barrier.wait) for _ in range(2)])


def test_apply_target_takes_the_job_id_as_getpid():
    """The job id Celery hands to terminate_job is the thread that waits."""
    assert {"target", "args", "kwargs", "callback", "accept_callback", "getpid"} <= set(
        inspect.signature(apply_target).parameters
    )
    assert ApplyResult.__init__.__code__.co_argcount == 2


def test_a_request_is_terminated_by_the_id_its_acceptance_reported():
    """Request.on_accepted(pid) keeps it as worker_pid; cancel and terminate pass it to the pool."""
    source = inspect.getsource(celery.worker.request.Request)
    assert "self.worker_pid = pid" in source
    assert "pool.terminate_job(self.worker_pid, signal)" in source


def test_unacknowledged_messages_are_where_the_visibility_heartbeat_looks():
    """qos._delivered minus qos._dirty are a channel's unacknowledged tags; their ages lie in unacked_index_key."""
    base = inspect.getsource(kombu.transport.virtual.QoS)
    assert "self._delivered = OrderedDict()" in base
    assert "self._dirty = set()" in base
    assert "if not self.restore_at_shutdown or not self.channel.do_restore" in base
    assert "self.closed = True" in inspect.getsource(kombu.transport.virtual.Channel.close)
    source = inspect.getsource(kombu.transport.redis.QoS)
    assert "self.unacked_index_key" in source
    assert "zadd" in source


def test_acknowledging_is_what_workers_delivery_does_for_many_at_once():
    """Two removals from Redis, then the tag is dirty; clients are made by channel._create_client(asynchronous)."""
    source = re.sub(r"\s+", " ", inspect.getsource(kombu.transport.redis.QoS))
    assert "self._remove_from_indices(delivery_tag).execute() super().ack(delivery_tag)" in source
    removal = "pipe.zrem(self.unacked_index_key, delivery_tag) \\ .hdel(self.unacked_key, delivery_tag)"
    assert removal in source
    assert "self._quick_ack = self._dirty.add" in inspect.getsource(kombu.transport.virtual.QoS)
    channel = inspect.getsource(kombu.transport.redis.Channel)
    assert "def _create_client(self, asynchronous=False)" in channel
    assert "yield self._create_client()" in channel


def test_nobody_else_touches_private_attributes():
    """Outside workers/pool.py and workers/delivery.py, no code of ours reaches into another library's underscores."""
    allowed = {"pool.py", "delivery.py"}
    offenders = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("app", "workers", "producers")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in allowed
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\b(celery|kombu|qos|consumer|channel|executor)\._[a-z]", line)
    ]
    assert offenders == []


def test_a_pool_grows_and_shrinks_live():
    """pool_grow and pool_shrink change the number of slots at once."""
    pool = LoopPool(limit=1)
    pool.grow(2)
    assert pool.limit == 3
    barrier = threading.Barrier(3, timeout=10)
    futures = [pool.executor.submit(barrier.wait) for _ in range(3)]
    assert sorted(f.result(10) for f in futures) == [0, 1, 2]
    pool.shrink(5)
    assert pool.limit == 1
    pool.executor.shutdown()


def test_a_redis_that_cannot_write_its_aof_is_one_that_is_away():
    """redis-py turns the error word MISCONF into our class, by a private table."""
    for parser in (_RESP2Parser, _HiredisParser):
        assert isinstance(parser.parse_error("MISCONF Errors writing to the AOF file"), DiskFull)
    assert DiskFull in AWAY

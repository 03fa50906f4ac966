"""What Celery's delivery over Redis needs to be safe for long tasks; three measured mends in one consumer step.

A visibility heartbeat: kombu returns a message to the queue once it is older than the visibility timeout, although its
task still runs; with the heartbeat only a dead worker's messages return, so the timeout can be short.
No restoring at a lost connection: kombu would queue the messages of running tasks again, over the connection that was
just lost, and the error ends the worker.
No acknowledging over a closed channel: it raises what Celery does not expect, and ends the worker, too. The message
returns by its timeout, and the claim or the missing payload tells that it is done.

Touches kombu's private `qos._delivered` and `qos._dirty`; pinned by tests/unit/test_celery_pins.py.
"""

import logging
from collections.abc import Callable
from time import time

from celery import bootsteps
from redis.exceptions import RedisError

from app.celery_app import VISIBILITY_TIMEOUT_SECONDS
from app.crash import crash_point

log = logging.getLogger(__name__)


class Delivery(bootsteps.StartStopStep):
    """A consumer step: runs each time the worker has (re)connected."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer, **kwargs):
        super().__init__(consumer, **kwargs)
        self._entry = None

    def start(self, consumer) -> None:
        """Mend the new channel, and begin touching its messages, four times per timeout."""
        channel = consumer.task_consumer.channel
        channel.do_restore = False
        channel.qos.ack = unless_closed(channel, channel.qos.ack)
        channel.qos.reject = unless_closed(channel, channel.qos.reject)
        self._entry = consumer.timer.call_repeatedly(VISIBILITY_TIMEOUT_SECONDS / 4, touch, (channel,))

    def stop(self, consumer) -> None:
        """End with the connection."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None


def unless_closed(channel, method: Callable) -> Callable:
    """The method, doing nothing once the channel is closed."""

    def call(*args, **kwargs) -> None:
        if channel.closed:
            log.info("message_left: it returns after its visibility timeout, its connection is gone")
        else:
            method(*args, **kwargs)
            crash_point("message_acknowledged")

    return call


def touch(channel) -> None:
    """Set the age of every unacknowledged message to zero; a message acknowledged meanwhile stays gone (XX)."""
    qos = channel.qos
    now = time()
    ages = {tag: now for tag in list(qos._delivered) if tag not in qos._dirty}
    if not ages:
        return
    try:
        # Not `channel.client`: its one connection waits in BRPOP, and our reply would be taken for a message.
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, ages, xx=True)
    except (RedisError, OSError) as exc:
        log.warning("visibility_heartbeat_missed: %s", exc)

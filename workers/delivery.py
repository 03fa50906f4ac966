"""What Celery's delivery over Redis needs to be safe for long tasks, and cheap; five measured mends in one step.

A visibility heartbeat: kombu returns a message to the queue once it is older than the visibility timeout, although its
task still runs; with the heartbeat only a dead worker's messages return, so the timeout can be short.
No restoring at a lost connection: kombu would queue the messages of running tasks again, over the connection that was
just lost, and the error ends the worker.
No acknowledging over a closed channel: it raises what Celery does not expect, and ends the worker, too. The message
returns by its timeout, and the claim or the missing payload tells that it is done.
Acknowledging together: what was acknowledged in one turn of the hub leaves in one command, not in a transaction each.
One client for a channel: kombu makes a new one for every message that comes and every one that goes.

Touches kombu's private `qos._delivered`, `qos._dirty` and `channel._create_client`; pinned by
tests/unit/test_celery_pins.py. The gains: docs/decisions/0013-what-a-row-costs.md.
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
        self._entry = self._done = None

    def start(self, consumer) -> None:
        """Mend the new channel, and begin touching its messages, four times per timeout."""
        channel = consumer.task_consumer.channel
        channel.do_restore = False
        _share_client(channel)
        self._done = Acknowledged(channel)
        channel.qos.ack = unless_closed(channel, self._done.add)
        channel.qos.reject = unless_closed(channel, channel.qos.reject)
        consumer.hub.on_tick.add(self._done.send)
        self._entry = consumer.timer.call_repeatedly(VISIBILITY_TIMEOUT_SECONDS / 4, touch, (channel,))

    def stop(self, consumer) -> None:
        """End with the connection."""
        if self._entry is not None:
            self._entry.cancel()
            consumer.hub.on_tick.discard(self._done.send)
            self._done.send()
            self._entry = self._done = None


class Acknowledged:
    """Messages acknowledged in one turn of the hub: forgotten here at once, by Redis together at the turn's end."""

    def __init__(self, channel):
        self._channel = channel
        self._tags: list[str] = []

    def add(self, tag: str) -> None:
        """Acknowledge one."""
        self._channel.qos._dirty.add(tag)  # what kombu's own ack does after its round trip
        self._tags.append(tag)

    def send(self) -> None:
        """Tell Redis; what it does not hear of returns after the visibility timeout, finds no payload, and ends."""
        if not self._tags or self._channel.closed:
            return
        tags, self._tags = self._tags, []
        try:
            with self._channel.conn_or_acquire() as client:
                pipeline = client.pipeline(transaction=False)
                pipeline.zrem(self._channel.unacked_index_key, *tags)
                pipeline.hdel(self._channel.unacked_key, *tags)
                pipeline.execute()
        except (RedisError, OSError) as exc:
            log.warning("messages_left %d: they return after their visibility timeout: %s", len(tags), exc)
        else:
            crash_point("message_acknowledged")


def _share_client(channel) -> None:
    make, shared = channel._create_client, channel._create_client()
    channel._create_client = lambda asynchronous=False: make(True) if asynchronous else shared


def unless_closed(channel, method: Callable) -> Callable:
    """The method, doing nothing once the channel is closed."""

    def call(*args, **kwargs) -> None:
        if channel.closed:
            log.info("message_left: it returns after its visibility timeout, its connection is gone")
        else:
            method(*args, **kwargs)

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

"""Keeps a living worker's messages invisible, so that the visibility timeout can be short.

Without it, kombu returns a message to the queue once it is older than the timeout, although its task still runs; with
it, only a dead worker's messages return, after VISIBILITY_TIMEOUT_SECONDS. Touches kombu's private
`qos._delivered` and `qos._dirty`; pinned by tests/unit/test_celery_pins.py.
"""

import logging
from time import time

from celery import bootsteps
from redis.exceptions import RedisError

from app.celery_app import VISIBILITY_TIMEOUT_SECONDS

log = logging.getLogger(__name__)


class VisibilityHeartbeat(bootsteps.StartStopStep):
    """A consumer step that touches the worker's unacknowledged messages four times per timeout."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer, **kwargs):
        super().__init__(consumer, **kwargs)
        self._entry = None

    def start(self, consumer) -> None:
        """Begin touching, each time the worker (re)connects."""
        self._entry = consumer.timer.call_repeatedly(VISIBILITY_TIMEOUT_SECONDS / 4, touch, (consumer,))

    def stop(self, consumer) -> None:
        """End with the connection."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None


def touch(consumer) -> None:
    """Set the age of every unacknowledged message to zero; a message acknowledged meanwhile stays gone (XX)."""
    channel = consumer.task_consumer.channel
    qos = channel.qos
    now = time()
    ages = {tag: now for tag in list(qos._delivered) if tag not in qos._dirty}
    if not ages:
        return
    try:
        channel.client.zadd(channel.unacked_index_key, ages, xx=True)
    except (RedisError, OSError) as exc:
        log.warning("visibility_heartbeat_missed: %s", exc)

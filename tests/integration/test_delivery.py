"""The consumer step against a real Redis, on the very connection state that made it lose messages once."""

from kombu import Consumer, Queue

from app.celery_app import make_app
from app.lanes import Lane
from app.store.keys import CELERY_PREFIX
from workers.delivery import touch, unless_closed

QUEUE = Lane.SHORT.queue


def test_a_heartbeat_does_not_take_the_reply_that_the_consumer_waits_for(redis_client, redis_url):
    """While BRPOP waits on the channel's own connection, the heartbeat uses another: the message arrives."""
    with make_app(redis_url).connection() as connection:
        channel = connection.default_channel
        arrived = []
        consumer = Consumer(channel, [Queue(QUEUE, routing_key=QUEUE)], on_message=arrived.append, no_ack=True)
        consumer.consume()
        redis_client.zadd(CELERY_PREFIX + "unacked_index", {"tag": 1.0})
        channel.qos._delivered["tag"] = object()
        channel.client.connection = channel.client.connection_pool.get_connection()
        channel._brpop_start(timeout=3)
        touch(channel)
        connection.Producer(channel).publish({}, routing_key=QUEUE, declare=[Queue(QUEUE, routing_key=QUEUE)])
        assert channel._brpop_read()
        assert len(arrived) == 1
        assert redis_client.zscore(CELERY_PREFIX + "unacked_index", "tag") > 1.0
        channel.qos._delivered.clear()


def test_nothing_is_acknowledged_over_a_closed_channel():
    """The message returns by its timeout; raising would end the worker."""

    class Channel:
        closed = False

    calls: list[str] = []
    acknowledge = unless_closed(Channel, calls.append)
    acknowledge("open")
    Channel.closed = True
    acknowledge("closed")
    assert calls == ["open"]

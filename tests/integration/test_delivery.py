"""The consumer step against a real Redis, on the very connection state that made it lose messages once."""

from kombu import Consumer, Queue

from app.celery_app import make_app
from app.lanes import Lane
from app.store.keys import CELERY_PREFIX
from workers.delivery import Acknowledged, touch, unless_closed

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


def test_what_was_acknowledged_in_one_turn_is_gone_with_one_command(redis_client, redis_url):
    """A message that is still worked on stays; the prefetch window has room again before Redis is told."""
    keys = {name: CELERY_PREFIX + name for name in ("unacked", "unacked_index")}
    with make_app(redis_url).connection() as connection:
        channel = connection.default_channel
        for tag in ("a", "b", "c"):
            redis_client.zadd(keys["unacked_index"], {tag: 1.0})
            redis_client.hset(keys["unacked"], tag, "message")
            channel.qos._delivered[tag] = object()
        channel.qos.prefetch_count = 3
        done = Acknowledged(channel)
        done.add("a")
        done.add("c")
        assert channel.qos.can_consume()
        assert redis_client.hlen(keys["unacked"]) == 3
        commands = redis_client.info("commandstats")
        done.send()
        assert redis_client.hkeys(keys["unacked"]) == redis_client.zrange(keys["unacked_index"], 0, -1) == [b"b"]
        after = redis_client.info("commandstats")
        assert _calls(after, "zrem") - _calls(commands, "zrem") == _calls(after, "hdel") - _calls(commands, "hdel") == 1
        done.send()
        assert _calls(redis_client.info("commandstats"), "zrem") == _calls(after, "zrem")
        channel.qos._delivered.clear()


def _calls(stats: dict, command: str) -> int:
    return stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]

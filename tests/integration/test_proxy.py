"""The proxy that other tests trust: it passes, cuts, freezes, delays and refuses."""

import time

import pytest
from redis.exceptions import ConnectionError, TimeoutError

from app.store.connection import connect
from tests.proxy import proxy


def test_it_passes_cuts_freezes_delays_and_refuses(redis_url):
    """A Redis client sees each of them, and is served again afterwards."""
    with proxy(redis_url) as between:
        client = connect(between.url)
        client.set("a", 1)
        assert client.get("a") == b"1"
        pubsub = client.pubsub()
        pubsub.subscribe("news")
        between.cut()
        with pytest.raises((ConnectionError, OSError)):
            pubsub.connection.read_response()
        between.freeze()
        hasty = connect(between.url)
        hasty.connection_pool.connection_kwargs["socket_timeout"] = 0.3
        with pytest.raises((TimeoutError, ConnectionError)):
            hasty.get("a")
        between.thaw()
        assert connect(between.url).get("a") == b"1"
        between.delay(0.2)
        started = time.monotonic()
        assert connect(between.url).get("a") == b"1"
        assert time.monotonic() - started > 0.2
        between.delay(0)
        between.refuse()
        with pytest.raises((ConnectionError, OSError)):
            connect(between.url).get("a")
        between.accept()
        assert connect(between.url).get("a") == b"1"

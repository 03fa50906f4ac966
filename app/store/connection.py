"""Connections to Redis, and the one place where its errors become ours.

The only importer of `redis` together with the other files of this room.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from app.errors import StorageError, UsageError


class DiskFull(ResponseError):
    """MISCONF: Redis cannot write its AOF, and refuses commands until it can."""


BaseParser.EXCEPTION_CLASSES["MISCONF"] = DiskFull  # redis-py has no class for it, and words must not decide

#: Failures that pass: Redis is away, loading or full. Whoever holds results keeps them and tries again.
AWAY = (ConnectionError, redis.exceptions.TimeoutError, BusyLoadingError, OutOfMemoryError, DiskFull, OSError)
_SOCKET_TIMEOUT_SECONDS = 30


def connect(url: str, answer_seconds: float = _SOCKET_TIMEOUT_SECONDS) -> redis.Redis:
    """A synchronous client (producer, collector, command line). Raises UsageError for a URL that is none.

    answer_seconds: a Redis that is silent for longer does not answer.
    """
    with _worded(url):
        return redis.Redis.from_url(url, **_options() | {"socket_timeout": answer_seconds})


def connect_async(url: str) -> redis.asyncio.connection.AbstractConnection:
    """One asyncio connection, made when something is first sent: the courier's."""
    with _worded(url):
        return redis.asyncio.ConnectionPool.from_url(url, **_options()).make_connection()


def check(client: redis.Redis, url: str) -> None:
    """Refuse a Redis that can't be trusted with a queue. Raises StorageError or UsageError with the remedy."""
    with translated(url):
        client.ping()
        role = client.info("replication").get("role", "master")
        policy = client.info("memory").get("maxmemory_policy", "noeviction")  # CONFIG is often forbidden
    if role != "master":
        raise UsageError(f"Redis at {safe_url(url)} is a read-only replica; give the address of its primary.")
    if policy != "noeviction":
        raise UsageError(
            f"Redis at {safe_url(url)} evicts keys when it is full (maxmemory-policy {policy}) and would lose queued "
            "rows silently; run `CONFIG SET maxmemory-policy noeviction` there."
        )


def await_trusted(client: redis.Redis, url: str, pause: Callable[[str], None]) -> None:
    """`check`, again and again while it cannot be reached or is loading; pause: gets the reason in a sentence."""
    while True:
        try:
            return check(client, url)
        except StorageError as exc:
            if not isinstance(exc.__cause__, AWAY) or isinstance(exc.__cause__, AuthenticationError):
                raise
            pause(str(exc))


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Inside, a Redis failure becomes one sentence with exit code 4."""
    try:
        yield
    except AuthenticationError as exc:
        raise StorageError(f"Redis at {safe_url(url)} refuses the password or user: {str(exc).rstrip('.')}.") from exc
    except OutOfMemoryError as exc:
        raise StorageError(f"Redis at {safe_url(url)} is full (maxmemory); raise maxmemory or free it.") from exc
    except AWAY as exc:
        raise StorageError(f"Redis at {safe_url(url)} cannot be reached ({exc}); start it or correct --redis.") from exc
    except RedisError as exc:
        raise StorageError(f"Redis at {safe_url(url)} answered with an error: {exc}") from exc


def safe_url(url: str) -> str:
    """The URL without its password, for logs and messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}{port}"))


def celery_url(url: str) -> str:
    """The same server as Celery's transport spells it (`redis+socket://` for a socket)."""
    return "redis+socket://" + url.removeprefix("unix://") if url.startswith("unix://") else url


def _options() -> dict[str, object]:
    return {
        "socket_timeout": _SOCKET_TIMEOUT_SECONDS,
        "socket_connect_timeout": 5,
        "health_check_interval": 25,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # callers decide: a retried XADD would double
        "decode_responses": False,
    }


@contextmanager
def _worded(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise UsageError(f"--redis {safe_url(url)} is no Redis URL; the form is redis://host:6379/0.") from exc

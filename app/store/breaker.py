"""An endpoint's breaker as Redis holds it: closed (no key), or open with a reason. Shared by all workers and runs.

    closed → open            refused, lost, 5xx or stalled, and a look at the endpoint says so, too
    open → half-open         one worker at a time sends one real generation
    half-open → closed       it came back: a few requests at first, then more (app/capacity/controller.py)

lease.lua grants nothing while the key is there. The two scripts behind this keep the log of changes, too: `down` once
for a loss, `up` once when it is over.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import orjson
import redis

from app.capacity.controller import SLOW_START_MOST, SLOW_START_REQUESTS
from app.store.keys import CHANGES, EndpointKeys
from app.urls import endpoint_key


class Why(StrEnum):
    """Why an endpoint gets nothing new."""

    DIED = "died"  #: refused, lost its connections, failed
    STALLED = "stalled"  #: sockets open, nothing comes back; requests there are taken back
    UNAVAILABLE = "unavailable"  #: loading, or a router with nobody behind it: pressure, no death
    LEAVING = "leaving"  #: told to stop; what runs there finishes
    PAUSED = "paused"  #: by somebody's /pause_generation; what runs there waits for its end
    DIFFERS = "differs"  #: serves something else than the run was started with
    DRAINED = "drained"  #: drained by a person, until a person ends it

    @property
    def is_death(self) -> bool:
        """Whether what was in flight there may have been too much for it."""
        return self in (Why.DIED, Why.STALLED)


@dataclass(frozen=True, slots=True)
class Breaker:
    """An open one."""

    since: float  #: Unix time
    evidence: str
    why: Why


def parse_breaker(text: bytes | None) -> Breaker | None:
    """What the key holds; None: closed."""
    if text is None:
        return None
    state = orjson.loads(text)
    return Breaker(state["since"], state["evidence"], Why(state["why"]))


def breakers_at(client: redis.Redis, urls: list[str], run_id: str) -> dict[str, Breaker | None]:
    """By URL, as it is for one run; None: closed. Raises redis errors."""
    pipeline = client.pipeline(transaction=False)
    for names in (EndpointKeys(endpoint_key(url)) for url in urls):
        pipeline.get(names.open)
        pipeline.hget(names.differs, run_id)
    said = pipeline.execute()
    held = (Breaker(0.0, text.decode(), Why.DIFFERS) if text else None for text in said[1::2])
    return {url: parse_breaker(text) or one for url, text, one in zip(urls, said[::2], held, strict=True)}


Call = tuple[str, list[str], list[str | int]]


def opening(url: str, why: Why, evidence: str, *, replaces: bool = False) -> Call:
    """Name, keys and arguments of the script; replaces: this reason is better than the one known."""
    return "open_breaker", _keys(url), [url, why, evidence, int(replaces)]


def closing(url: str, *, held: bool = False) -> Call:
    """Name, keys and arguments of the script; held: a person ends what a person began."""
    return "close_breaker", _keys(url), [url, SLOW_START_REQUESTS, SLOW_START_MOST, int(held)]


def _keys(url: str) -> list[str]:
    names = EndpointKeys(endpoint_key(url))
    return [names.open, names.control, CHANGES]


@dataclass(frozen=True, slots=True)
class Change:
    """A loss of an endpoint, or its end."""

    url: str
    is_down: bool
    evidence: str
    since: float  #: Unix time of the loss


class ChangeLog:
    """Reads the log of changes from where it stands now, each once."""

    def __init__(self, client: redis.Redis):
        self._client = client
        newest = client.xrevrange(CHANGES, count=1)
        self._read_to = newest[0][0] if newest else b"0"

    def new(self) -> Iterator[Change]:
        """Changes since the last call, in order. Raises redis errors."""
        for entry, fields in self._client.xrange(CHANGES, b"(" + self._read_to):
            self._read_to = entry
            told = {name.decode(): value.decode() for name, value in fields.items()}
            yield Change(told["url"], told["change"] == "down", told["evidence"], float(told["since"]))

"""Putting tasks on the belt: payload first, then the message, never more than the high-water mark of a lane.

A lane that is full must not keep the other hungry: while one lane runs dry, tasks of the full one are set aside on
disk (bounded), and go first when there is room again.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import redis
from celery import Celery

from app.crash import crash_point
from app.lanes import Lane
from app.packing import compress, unpack_task
from app.records import RejectedRecord, Task, line_of
from app.store import scripts
from app.store.connection import AWAY
from app.store.keys import CELERY_PREFIX, DEATHS, EndpointKeys, RunKeys
from producers.aside import Aside
from producers.envelopes import Envelopes
from producers.rendering import Parcel

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_BATCH = 500
_STREAM_HIGH_WATER = 20_000  #: responses not yet written, above which nothing new is sent


class Stopped(Exception):
    """The producer was told to stop while it waited."""


class Conveyor:
    """The producer's end of Redis, for one run."""

    def __init__(self, client: redis.Redis, celery: Celery, run_id: str, high_water: int, stopped: Callable[[], bool]):
        self._client, self._keys = client, RunKeys(run_id)
        self._envelopes = Envelopes(celery, run_id)
        self._high_water = high_water
        self._stopped = stopped
        self._queued: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self._looked_at = 0.0
        self._aside = {lane: Aside() for lane in Lane}
        self.trouble: str | None = None
        self.absences = 0  #: how often Redis did not answer
        self.while_waiting: Callable[[], None] = lambda: None  #: done again and again while a lane is full
        #: asked right before tasks are sent, also again, however long they waited: those that still need to be
        self.still_missing: Callable[[list[Parcel]], list[Parcel]] = lambda parcels: parcels

    def put(self, parcels: list[Parcel]) -> None:
        """Send tasks, waiting while their lanes are full; what was set aside goes first. Raises Stopped."""
        for lane in Lane:
            self._refill(lane)
        waiting: dict[Lane, list[Parcel]] = defaultdict(list)
        for parcel in parcels:
            waiting[parcel.lane].append(parcel)
        for lane, some in waiting.items():
            self._put_in_lane(lane, some)

    def put_aside_back(self) -> None:
        """Send everything set aside, waiting for room. Raises Stopped."""
        for lane, aside in self._aside.items():
            while aside:
                self._await(lambda lane=lane: self._room(lane) > 0)
                self._send(aside.take(min(_BATCH, self._room(lane))))

    def reject(self, record: RejectedRecord) -> None:
        """Hand a verdict on a row to the collector."""
        self._hand_over(record.dataset, record.key, "rejected", line_of(record))

    # --- chats, between two turns ---

    def turned(self, dataset: str) -> list[bytes]:
        """Keys of chats that wait for their next prompt."""
        return self.patiently(lambda: self._client.hkeys(self._keys.turned(dataset)))

    def take_turned(self, dataset: str, keys: list[bytes]) -> list[Task]:
        """What these are; they go on waiting."""
        blobs = self.patiently(lambda: self._client.hmget(self._keys.turned(dataset), keys))
        return [unpack_task(blob) for blob in blobs if blob]

    def advance(self, parcels: list[Parcel]) -> None:
        """Send next turns. They wait for no room: each takes the place of the turn before it."""
        for dataset, some in _by_dataset(parcels).items():
            words = [word for parcel in some for word in (parcel.key, parcel.blob)]
            keys = [self._keys.turned(dataset), self._keys.payload(dataset)]
            waited = self.patiently(lambda keys=keys, words=words: scripts.call(self._client, "advance", keys, words))
            crash_point("turn_advanced")
            self.publish([parcel for parcel, sent in zip(some, waited, strict=True) if sent])

    def end(self, dataset: str, key: str, kind: str, lines: bytes) -> None:
        """Hand a chat that is over to the collector, whole. kind: "response" or "rejected"."""
        self._hand_over(dataset, key, kind, lines)
        crash_point("chat_handed_over")
        self.forget(dataset, key)

    def forget(self, dataset: str, key: str) -> None:
        """A chat waits no more: it is over, or the files have it."""
        self.patiently(lambda: self._client.hdel(self._keys.turned(dataset), key))

    def _hand_over(self, dataset: str, key: str, kind: str, lines: bytes) -> None:
        nowhere = EndpointKeys("none")  # what the producer hands over holds no lease
        self.patiently(
            lambda: scripts.call(
                self._client, "publish",
                [self._keys.responses, self._keys.payload(dataset), self._keys.claims(dataset),
                 self._keys.holders(dataset), self._keys.published(dataset), nowhere.leases, nowhere.lease_info,
                 DEATHS],
                [key, dataset, kind, compress(lines), "", ""],
            )
        )  # fmt: skip

    # --- what Redis knows ---

    def outstanding(self, datasets: Iterable[str]) -> set[str]:
        """Keys that Redis knows: waiting, being worked on, between two turns, or in the stream."""

        def ask() -> set[str]:
            return {
                key.decode()
                for dataset in datasets
                for key in (
                    *self._client.hkeys(self._keys.payload(dataset)),
                    *self._client.hkeys(self._keys.turned(dataset)),
                    *self._client.smembers(self._keys.published(dataset)),
                )
            }

        return self.patiently(ask)

    def count_outstanding(self, datasets: Iterable[str]) -> int:
        """How many those are."""
        return self.patiently(
            lambda: sum(
                self._client.hlen(self._keys.payload(d))
                + self._client.hlen(self._keys.turned(d))
                + self._client.scard(self._keys.published(d))
                for d in datasets
            )
        )

    def lanes_are_empty(self) -> bool:
        """Whether no message waits in any lane."""
        self._look(force=True)
        return not any(self._queued.values())

    def patiently(self, action: Callable[[], object]) -> object:
        """Do it; while Redis is away or full, say so and try again. Raises Stopped."""
        while True:
            try:
                result = action()
            except AWAY as exc:
                self.absences += 1
                if self.trouble is None:
                    self.trouble = f"Redis does not answer ({exc})"
                    log.warning("producer_waits: %s", self.trouble)
                if self._stopped():
                    raise Stopped from exc
                time.sleep(_RETRY_SECONDS)
            else:
                if self.trouble is not None:
                    log.warning("producer_goes_on")
                    self.trouble = None
                return result

    def _put_in_lane(self, lane: Lane, parcels: list[Parcel]) -> None:
        while parcels:
            if self._aside[lane] or not self._room(lane):
                if self._other_is_hungry(lane) and self._aside[lane].add(parcels):
                    return
                self._await(lambda: self._room(lane) > 0 or self._other_is_hungry(lane))
                self._refill(lane)
                if self._aside[lane]:
                    continue
            now, parcels = parcels[: self._room(lane)], parcels[self._room(lane) :]
            self._send(now)

    def _refill(self, lane: Lane) -> None:
        if self._aside[lane] and (room := self._room(lane)):
            self._send(self._aside[lane].take(min(room, _BATCH)))

    def _other_is_hungry(self, lane: Lane) -> bool:
        self._look()
        return any(n < self._high_water // 10 for other, n in self._queued.items() if other is not lane)

    def _room(self, lane: Lane) -> int:
        self._look()
        return max(0, min(_BATCH, self._high_water - self._queued[lane]))

    def _look(self, *, force: bool = False) -> None:
        """How full the lanes are, at most a poll old; between looks we count what we send."""
        now = time.monotonic()
        if not force and now - self._looked_at < _POLL_SECONDS:
            return
        self._looked_at = now

        def ask() -> list[int]:
            pipeline = self._client.pipeline(transaction=False)
            for lane in Lane:
                pipeline.llen(CELERY_PREFIX + lane.queue)
            pipeline.xlen(self._keys.responses)
            return pipeline.execute()

        *lengths, unwritten = self.patiently(ask)
        full = unwritten > _STREAM_HIGH_WATER
        self._queued = {lane: max(n, self._high_water) if full else n for lane, n in zip(Lane, lengths, strict=True)}

    def _await(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._stopped():
                raise Stopped
            self.while_waiting()
            time.sleep(_POLL_SECONDS)

    def _send(self, parcels: list[Parcel]) -> None:
        """Payloads first: a message without payload means 'done' to a worker."""
        if self._stopped():
            raise Stopped
        for dataset, some in _by_dataset(self.still_missing(parcels)).items():
            words = [word for parcel in some for word in (parcel.key, parcel.blob)]
            accepted = self.patiently(
                lambda dataset=dataset, words=words: scripts.call(
                    self._client, "offer", [self._keys.payload(dataset), self._keys.published(dataset)], words
                )
            )
            crash_point("payload_offered")
            self.publish([parcel for parcel, new in zip(some, accepted, strict=True) if new])

    def publish(self, parcels: list[Parcel]) -> None:
        """Send the messages of tasks whose payloads wait. Raises Stopped."""
        for lane in Lane:
            of_lane = [parcel for parcel in parcels if parcel.lane is lane]
            for start in range(0, len(of_lane), _BATCH):
                some = of_lane[start : start + _BATCH]
                self.patiently(lambda lane=lane, some=some: self._lay(lane, some))
                self._queued[lane] += len(some)
        crash_point("message_sent")

    def _lay(self, lane: Lane, parcels: list[Parcel]) -> None:
        self._client.lpush(CELERY_PREFIX + lane.queue, *map(self._envelopes.message, parcels))


def _by_dataset(parcels: list[Parcel]) -> dict[str, list[Parcel]]:
    found: dict[str, list[Parcel]] = defaultdict(list)
    for parcel in parcels:
        found[parcel.dataset].append(parcel)
    return found

"""Messages that got lost: keys that Redis holds and nobody works on are found, compared with the files, sent again."""

import logging
from collections import defaultdict
from collections.abc import Iterable

import redis

from app.lanes import Lane
from app.packing import unpack_task
from app.store import scripts
from app.store.keys import CELERY_PREFIX, RunKeys
from producers.conveyor import Conveyor
from producers.rendering import Parcel, parcel_of

log = logging.getLogger(__name__)
_BATCH = 500
_MOST_AGAIN = 100_000


class Lost:
    """What got lost between a run's conveyor and its workers."""

    def __init__(self, conveyor: Conveyor, client: redis.Redis, run_id: str):
        self._conveyor, self._client, self._keys = conveyor, client, RunKeys(run_id)
        self._patiently = conveyor.patiently
        self._unclaimed: dict[str, set[bytes]] = defaultdict(set)  #: when the lanes had turned over
        self._taken: dict[str, set[bytes]] = defaultdict(set)  #: of those then, whose messages had been taken
        self._newest: dict[str, bytes] = {}  #: lane → the message that came last when they had turned over
        self._compared: tuple[str, int] | None = None  #: start of Redis, absences before the files were compared

    @property
    def is_compared(self) -> bool:
        """Whether what Redis holds was compared with the files since it was last seen to be away."""
        return self._compared is not None and self._compared[1] == self._conveyor.absences

    def send_again(self, datasets: Iterable[str], *, at_once: bool = False) -> int:
        """Send messages again for keys that nobody works on; returns how many.

        Those whose claim expired, always. Those never claimed, if no message for them waits: a message that a worker
        took and did not claim died with it, or was lost; seen so twice in a row (`at_once`: once). Too often is
        harmless, a worker that finds a key claimed or done ends at once. Never those that the files have: a Redis that
        was killed may have forgotten what it said last, and takes them for waiting; all are compared once for each
        start of Redis.
        """
        datasets = list(datasets)
        self._compare(datasets)
        empty, turned_over, total = self._conveyor.lanes_are_empty(), self._have_turned_over(), 0
        for dataset in datasets:
            again = self._orphaned(dataset, unclaimed=False)
            if turned_over:
                unclaimed = self._orphaned(dataset, unclaimed=True)
                again |= unclaimed if at_once and empty else unclaimed & self._taken[dataset]
                self._taken[dataset] = (unclaimed if empty else unclaimed & self._unclaimed[dataset]) - again
                self._unclaimed[dataset] = unclaimed
            if again:
                missing = self._drop_done(dataset, list(again))
                self._conveyor.publish(missing)
                total += len(missing)
        return total

    def _compare(self, datasets: list[str]) -> None:
        """Once for each start of Redis: drop what it takes for outstanding and the files have."""
        server = self._patiently(lambda: self._client.info("server")["run_id"])
        now = server, self._conveyor.absences
        if now == self._compared:
            return
        self._compared = now  # first: it may go away meanwhile
        for dataset in datasets:
            keys = self._patiently(lambda d=dataset: self._client.hkeys(self._keys.payload(d)))
            for start in range(0, len(keys), _BATCH):
                self._drop_done(dataset, keys[start : start + _BATCH])

    def _drop_done(self, dataset: str, keys: list[bytes]) -> list[Parcel]:
        """Those of these tasks that are still missing; the others are forgotten."""
        payload = self._keys.payload(dataset)
        blobs = self._patiently(lambda: self._client.hmget(payload, keys))
        parcels = [parcel_of(unpack_task(blob), blob) for blob in blobs if blob]
        missing = self._conveyor.still_missing(parcels)
        if done := {parcel.key for parcel in parcels} - {parcel.key for parcel in missing}:
            log.warning("redis_was_behind: %d tasks waited in %s whose answers are on file", len(done), dataset)
            self._patiently(lambda: self._client.hdel(payload, *done))
        return missing

    def _have_turned_over(self) -> bool:
        """Whether all messages that waited when this was so last have been taken: lanes are first in, first out, and
        those of a shared Redis may never be empty."""
        lanes = [CELERY_PREFIX + lane.queue for lane in Lane]

        def wait_still() -> bool:
            return any(self._client.lpos(lane, newest) is not None for lane, newest in self._newest.items())

        if self._patiently(wait_still):
            return False
        newest = self._patiently(lambda: [self._client.lindex(lane, 0) for lane in lanes])
        self._newest = {lane: message for lane, message in zip(lanes, newest, strict=True) if message is not None}
        return True

    def _orphaned(self, dataset: str, *, unclaimed: bool) -> set[bytes]:
        keys = [self._keys.payload(dataset), self._keys.claims(dataset), self._keys.holders(dataset)]
        return set(self._patiently(lambda: scripts.call(self._client, "orphaned", keys, [int(unclaimed), _MOST_AGAIN])))

"""The producer: read the input, send what is missing, stay until the run is complete.

A pass reads the whole input once. What the ledger has is skipped before it is rendered, what Redis knows is skipped
before it is sent. While waiting, lost messages are sent again, and if Redis lost rows altogether another pass finds
them: the files say what is missing, never the broker.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import redis
from celery import Celery

from app.crash import crash_point
from app.errors import error_of
from app.identity import task_key
from app.ledger import Ledger
from app.manifest import RunManifest
from app.reasons import STAGE_OF
from app.records import RejectedRecord, completion_id, slot_of
from app.rundir import RunDir
from app.settings import RunSettings
from app.store.breaker import breakers_at
from app.store.fleet import run_at
from app.store.keys import RUNS, RunKeys
from app.tokenization import RenderOptions
from app.unserved import Unserved
from producers.bookmarks import InputPass
from producers.catalog import CHUNK_ROWS
from producers.conveyor import Conveyor, Stopped
from producers.inputs import Dataset
from producers.lost import Lost
from producers.readers import expected_rows
from producers.remaining import Remaining
from producers.rendering import Parcel, Refusal, Rendered, RenderPool, Row
from producers.turns import Turns

log = logging.getLogger(__name__)
_RECONCILE_SECONDS = 6.0  # longer than a heartbeat: workers have told an empty Redis what they hold
_SEND_AGAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_MOST_FIRST = 2000  #: rows that are found by their place before more is read: enough to fill a fleet meanwhile
_MOST_GAPS = 100_000  #: more rows than this are not looked up by their places: the input is read instead
_TURN_SECONDS = 0.05


class Producer:
    """Enqueues one run. `stopped` is asked often; once it says yes, the producer leaves with Stopped."""

    def __init__(
        self, settings: RunSettings, datasets: list[Dataset], manifest: RunManifest, render_options: RenderOptions,
        client: redis.Redis, celery: Celery, stopped: Callable[[], bool],
    ):  # fmt: skip
        self._settings, self._datasets, self._manifest = settings, datasets, manifest
        self._client, self._stopped = client, stopped
        self._names = [dataset.name for dataset in datasets]
        self._ledger = Ledger.open(RunDir(settings.out))
        self._conveyor = Conveyor(client, celery, manifest.run_id, settings.high_water, stopped)
        self._lost = Lost(self._conveyor, client, manifest.run_id)
        self._remaining = Remaining(settings, manifest.recipe, self._ledger)
        self._pool = RenderPool(render_options, manifest, settings.fit_output)
        self._turns = Turns(self._conveyor, self._pool, self._ledger) if settings.turns == "all" else None
        self._conveyor.while_waiting = self._meanwhile
        self._conveyor.still_missing = self._still_missing
        self._outstanding: set[str] = set()
        self._again_at = 0.0
        self._unserved = Unserved(settings.drift_wait_seconds)

    def run(self, *, wait: bool = True) -> None:
        """Enqueue everything missing; with `wait`, stay until nothing is pending. Raises Stopped."""
        try:
            self._publish_run()
            self._publish_expected_rows()
            self._ledger.catch_up(RunDir(self._settings.out))
            self._lost.send_again(self._names, at_once=True)
            self._pass()
            while wait and not self._complete():
                self._pass()
        finally:
            self._pool.close()
            self._ledger.close()

    def rejected(self) -> int:
        """Completions of the input that got no sample."""
        with Ledger.open(RunDir(self._settings.out)) as ledger:
            return sum(counts.rejected for counts in ledger.counts())

    def _publish_run(self) -> None:
        """Tell the workers what this run is (again, if Redis forgot it)."""
        keys = RunKeys(self._manifest.run_id)

        def publish() -> None:
            now = run_at(self._client, self._manifest.run_id)  # endpoints may have come or gone
            self._manifest = now or self._manifest
            self._client.set(keys.manifest, self._manifest.model_dump_json(), nx=True)
            self._client.sadd(RUNS, self._manifest.run_id)

        self._conveyor.patiently(publish)

    def _ship_known_gaps(self, over: InputPass) -> None:
        """What rows lack of which the ledger knows the places. Where a pass begins behind them, that is all of it;
        where it is to read them, they are some that keep the fleet busy meanwhile."""
        if self._settings.limit is not None:
            return  # another one than last time would ask for fewer rows
        pending = {counts.dataset: counts.pending for counts in self._ledger.counts()}
        outstanding = self._conveyor.outstanding(self._names)
        for dataset in self._datasets:
            gaps = self._ledger.missing(dataset.name, _MOST_GAPS + 1) if pending[dataset.name] else []
            marks = over.behind[dataset.name]
            unfound = {mark.file for mark in marks if mark.whole} & {gap.file for gap in gaps}
            if len(gaps) > _MOST_GAPS:
                gaps, unfound = gaps[:_MOST_FIRST], {0}
            if unfound:
                over.begin_before(dataset.name, min(unfound))
            found = self._remaining.known_gaps(dataset, gaps, outstanding, self._settings.max_row_bytes, marks)
            while some := list(itertools.islice(found, CHUNK_ROWS)):
                self._submit(some)
                self._tick()
        self._ship(self._pool.results(wait=True))

    def _publish_expected_rows(self) -> None:
        """For an estimate of the time left: the input is read no faster than the run goes, so its end comes late."""
        limit, wanted = self._settings.limit, {}
        for dataset in self._datasets:
            rows = sum(map(expected_rows, dataset.paths))
            wanted[dataset.name] = min(rows, limit or rows) * self._settings.samples
        key = RunKeys(self._manifest.run_id).expected_rows
        self._conveyor.patiently(lambda: self._client.hset(key, mapping=wanted))

    def _pass(self) -> None:
        """Read all input once, interleaving the datasets; send what neither ledger nor Redis has."""
        over = InputPass(self._datasets, self._settings, self._ledger)
        self._ship_known_gaps(over)
        self._outstanding = self._conveyor.outstanding(self._names)
        for dataset, chunk in over.chunks():
            if chunk is None:
                self._ledger.end_pass(dataset)
            else:
                self._submit(list(self._remaining.missing_of(dataset, chunk, self._outstanding)))
            self._tick()
        self._ship(self._pool.results(wait=True))
        self._conveyor.put_aside_back()

    def _submit(self, missing: list[Row | Refusal]) -> None:
        """Have rows rendered, and ship what has been; refuse what cannot be."""
        self._ship(self._pool.results(wait=False))
        self._pool.submit([row for row in missing if isinstance(row, Row)])
        for refusal in missing:
            if isinstance(refusal, Refusal):
                self._refuse(refusal)

    def _ship(self, results: Iterator[Rendered]) -> None:
        for items in results:
            crash_point("row_rendered")
            for item in items:
                if isinstance(item, Refusal):
                    self._refuse(item)
            self._conveyor.put([item for item in items if isinstance(item, Parcel)])

    def _still_missing(self, parcels: list[Parcel]) -> list[Parcel]:
        """Rendering and waiting for room take a while: what has been done meanwhile is no longer in Redis, but on file.

        By another producer, or by a worker that had it in hand when Redis forgot it.
        """
        slots = {parcel.key: slot_of(parcel.task_id) for parcel in parcels}
        known = set(self._ledger.known(slots.values()))
        return [parcel for parcel in parcels if slots[parcel.key] not in known]

    def _refuse(self, refusal: Refusal) -> None:
        row = refusal.row
        self._conveyor.reject(
            RejectedRecord(
                key=task_key(self._manifest.recipe, row.dataset, row.row_id, 0, -1),
                id=completion_id(row.dataset, row.row_id, 0, -1), primary_id=f"{row.dataset}:{row.row_id}",
                dataset=row.dataset, row_id=row.row_id, source_id=row.source_id, row_number=row.number,
                stage=STAGE_OF[refusal.reason], reason=refusal.reason, detail=refusal.detail, attempts=0,
                at=datetime.now(UTC).isoformat(timespec="seconds"),
            )
        )  # fmt: skip

    def _complete(self) -> bool:
        """Wait until nothing is pending (True), or Redis has lost rows (False): then another pass finds them."""
        sweep_at, lost_before = time.monotonic() + _RECONCILE_SECONDS, False
        while True:
            self._tick()
            known = self._conveyor.count_outstanding(self._names)  # before the ledger is asked: never too many lost
            pending = self._ledger.pending_total()
            if pending == 0:
                return True
            if time.monotonic() >= sweep_at:
                sweep_at = time.monotonic() + _RECONCILE_SECONDS
                lost = pending > known
                if lost and lost_before:
                    log.warning("rows_lost_by_redis: %d pending, %d known; reading the input again", pending, known)
                    return False
                lost_before = lost
            self._rest()

    def _rest(self) -> None:
        """A pause, in which chats that turn go on."""
        over = time.monotonic() + _LOOK_SECONDS
        while self._turns is not None and time.monotonic() < over:
            self._go_on()
            time.sleep(_TURN_SECONDS)
        time.sleep(max(0.0, over - time.monotonic()))

    def _meanwhile(self) -> None:
        """While a lane is full."""
        self._tick()
        self._go_on()

    def _go_on(self) -> None:
        if self._turns is not None:
            self._turns.go_on(self._names)

    def _send_again(self) -> None:
        """Every few seconds, also while reading: the run, and messages for keys whose worker died, or that got lost."""
        if time.monotonic() < self._again_at and self._lost.is_compared:
            return
        self._again_at = time.monotonic() + _SEND_AGAIN_SECONDS
        self._publish_run()
        self._heed_halt()
        self._heed_other_models()
        if again := self._lost.send_again(self._names):
            log.warning("sent_again %d tasks that nobody worked on", again)

    def _heed_halt(self) -> None:
        """A halted run gets no further by itself. Raises what the workers said of it."""
        halt = self._conveyor.patiently(lambda: self._client.get(RunKeys(self._manifest.run_id).halt))
        if halt is not None:
            state = json.loads(halt)
            raise error_of(state["exit_code"], state["message"])

    def _heed_other_models(self) -> None:
        """Raises RecipeChanged once nobody has served the run's model for long, and somebody serves another."""
        urls = self._manifest.endpoints
        breakers = self._conveyor.patiently(lambda: breakers_at(self._client, urls, self._manifest.run_id))
        self._unserved.heed(breakers, time.monotonic())

    def _tick(self) -> None:
        if self._stopped():
            raise Stopped
        self._go_on()
        self._send_again()

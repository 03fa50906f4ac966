"""The producer: read the input, send what is missing, stay until the run is complete.

A pass reads the whole input once. What the ledger has is skipped before it is rendered, what Redis knows is skipped
before it is sent. While waiting, lost messages are sent again, and if Redis lost rows altogether another pass finds
them: the files say what is missing, never the broker.
"""

import itertools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import redis
from celery import Celery

from app.allowances import Allowances
from app.crash import crash_point
from app.errors import error_of
from app.identity import task_key
from app.ledger import Bookmark, Ledger, Missing
from app.manifest import RunManifest
from app.reasons import STAGE_OF, Rejected
from app.records import Conversation, RejectedRecord, completion_id, slot_of
from app.rundir import RunDir
from app.settings import RunSettings
from app.store.breaker import breakers_at
from app.store.fleet import run_at
from app.store.keys import RUNS, RunKeys
from app.tokenization import RenderOptions
from app.unserved import Unserved
from producers.bookmarks import InputPass, rows_at
from producers.catalog import Chunk, read_row, shape_options, source_id_text
from producers.conveyor import Conveyor, Stopped
from producers.inputs import Dataset
from producers.readers import expected_rows
from producers.rendering import Parcel, Refusal, Rendered, RenderPool, Row
from producers.shapes import turns_in
from producers.turns import Turns

log = logging.getLogger(__name__)
_RECONCILE_SECONDS = 6.0  # longer than a heartbeat: workers have told an empty Redis what they hold
_SEND_AGAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_CHUNK_ROWS = 64
_MOST_FIRST = 2000  #: rows that are found by their place before more is read: enough to fill a fleet meanwhile
_MOST_GAPS = 100_000  #: more rows than this are not looked up by their places: the input is read instead
_TURN_SECONDS = 0.05


def is_complete(settings: RunSettings, datasets: list[Dataset], recipe: str) -> bool:
    """Whether the files have everything that the input asks for: then no server and no Redis is needed.

    Reads the input only if the ledger knew it complete when it was last read.
    """
    with Ledger.open(RunDir(settings.out)) as ledger:
        ledger.catch_up()
        counts = {one.dataset: one for one in ledger.counts()}
        names = [dataset.name for dataset in datasets]
        if new := set(names) - counts.keys():
            ledger.begin_pass(settings.samples, names)  # or the others' completeness would pass for the run's
        if new or not all(counts[name].rows_final for name in names) or ledger.pending_total():
            return False
        reader = _Reader(settings, recipe, ledger)
        for dataset, chunk in InputPass(datasets, settings, ledger).chunks():
            if chunk is None:
                ledger.end_pass(dataset)
            elif any(reader.missing_of(dataset, chunk, set())):
                return False
        return ledger.pending_total() == 0


class _Reader:
    """Records of the input become rows that still need something."""

    def __init__(self, settings: RunSettings, recipe: str, ledger: Ledger):
        self._recipe, self._ledger = recipe, ledger
        self._shapes, self._samples = shape_options(settings), settings.samples
        self._allowances = Allowances(settings.out)

    def missing_of(self, dataset: str, chunk: Chunk, outstanding: set[str]) -> Iterator[Row | Refusal]:
        """Register a chunk in the ledger; what neither files nor `outstanding` keys have, to render or to refuse."""
        read = [(file, raw, *read_row(raw, self._shapes)) for file, raw in chunk]
        crash_point("row_read")
        seen = self._ledger.see_rows(dataset, [(digest, file, raw.number) for file, raw, digest, _ in read])
        crash_point("row_registered")
        for (_, raw, _, result), known in zip(read, seen, strict=True):
            if not known.row_verdict:
                indices = [index for index in range(self._samples) if index not in known.final]
                yield from self._still_to_do(dataset, known.row_id, raw.number, result, indices, outstanding)

    def known_gaps(
        self, dataset: Dataset, gaps: Iterable[Missing], outstanding: set[str], max_row_bytes: int,
        marks: Sequence[Bookmark] = (),
    ) -> Iterator[Row | Refusal]:  # fmt: skip
        """Rows that the ledger knows to lack something, found by their place in the input without reading the rest.

        Only those of JSON Lines that still stand where they stood. marks: bookmarks that hold, to look from. Behind
        them one of two equal rows may be gone, so that only a pass can tell whether there is a second one.
        """
        wanted: dict[int, dict[int, dict[str, list[int]]]] = defaultdict(dict)
        held = marks[-1][:2] if marks else (0, 0)
        for one in gaps:
            if "-" in one.row_id and (one.file, one.number) > held:
                continue
            here = wanted[one.file].setdefault(one.number, {})
            here.setdefault(one.row_id, []).append(one.completion_index)
        for file, path in enumerate(dataset.paths):
            for raw in rows_at(path, wanted[file], [mark for mark in marks if mark.file == file], max_row_bytes):
                digest, result = read_row(raw, self._shapes)
                for row_id, indices in wanted[file][raw.number].items():  # more than one: of a pass broken off
                    if digest == row_id.partition("-")[0]:
                        indices = [index for index in indices if index < self._samples]
                        yield from self._still_to_do(dataset.name, row_id, raw.number, result, indices, outstanding)

    def _still_to_do(
        self, dataset: str, row_id: str, number: int, result: Conversation | Rejected, indices: list[int],
        outstanding: set[str],
    ) -> Iterator[Row | Refusal]:  # fmt: skip
        """What a row is to be rendered or refused for, if neither it nor these completions are on their way."""
        if self._is_in(outstanding, dataset, row_id, -1):
            return
        if isinstance(result, Rejected):
            yield Refusal(Row(dataset, row_id, "", number, None, ()), result.reason, result.detail)
            return
        missing = tuple(index for index in indices if not self._is_in(outstanding, dataset, row_id, index))
        if missing:
            own, allowances = source_id_text(result.source_id), self._allowances.of(dataset, row_id)
            turns = turns_in(result, self._shapes)
            yield Row(dataset, row_id, own, number, result, missing, allowances, turns)

    def _is_in(self, outstanding: set[str], dataset: str, row_id: str, index: int) -> bool:
        return bool(outstanding) and task_key(self._recipe, dataset, row_id, 0, index) in outstanding


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
        self._reader = _Reader(settings, manifest.recipe, self._ledger)
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
            self._conveyor.send_again(self._names, at_once=True)
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
            found = self._reader.known_gaps(dataset, gaps, outstanding, self._settings.max_row_bytes, marks)
            while some := list(itertools.islice(found, _CHUNK_ROWS)):
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
                self._submit(list(self._reader.missing_of(dataset, chunk, self._outstanding)))
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
        if time.monotonic() < self._again_at and self._conveyor.is_compared:
            return
        self._again_at = time.monotonic() + _SEND_AGAIN_SECONDS
        self._publish_run()
        self._heed_halt()
        self._heed_other_models()
        if again := self._conveyor.send_again(self._names):
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
        breakers = self._conveyor.patiently(lambda: breakers_at(self._client, urls))
        self._unserved.heed(breakers, time.monotonic())

    def _tick(self) -> None:
        if self._stopped():
            raise Stopped
        self._go_on()
        self._send_again()

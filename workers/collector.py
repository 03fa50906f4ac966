"""The single writer of a run's files: stream → whole lines → fsync → ledger → forget.

Invariant: an entry is acknowledged only after its lines are on disk and in the ledger; a raw line is on disk before its
sample. A kill anywhere is mended at the next start: the ledger indexes the files from its last offset, entries already
in the files are acknowledged unwritten, raw lines with neither sample nor rejection are derived again.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import orjson
import redis
from redis.exceptions import ResponseError

from app.aside import fingerprint, put_aside
from app.crash import crash_point
from app.errors import StorageError
from app.groups import end_of_groups, group_at
from app.jsonl import Appender
from app.ledger import Committed, Ledger, State
from app.offline.torn import are_torn, mend, set_unreadable_aside
from app.packing import decompress
from app.records import RejectedRecord, ResponseRecord, line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, samples_of
from app.store import scripts
from app.store.connection import AWAY
from app.store.keys import RunKeys
from workers.reporter import Reporter

log = logging.getLogger(__name__)
_GROUP, _CONSUMER = "collector", "collector"
_MOST_ENTRIES = 512
_BLOCK_MS = 100
_RETRY_SECONDS = 1.0

Entry = tuple[bytes, dict[bytes, bytes]]


class Collector:
    """Owns the open files of one run. Made and used by one thread, under the writer lock."""

    def __init__(self, rundir: RunDir, client: redis.Redis, run_id: str, filters: SampleFilters):
        self._rundir, self._client, self._filters = rundir, client, filters
        self._keys = RunKeys(run_id)
        self._files: dict[tuple[str, str], Appender] = {}
        self._ledger = Ledger.open(rundir)
        self._put_aside = put_aside(rundir)
        self._reporter = Reporter(rundir, client, self._keys, lambda: self._ledger.counts())
        self.stopping = threading.Event()
        self.refuse_if_lost: Callable[[], None] = lambda: None  #: raises if the writer lock is somebody else's by now
        self._dirty = True  #: files may hold more than the ledger knows
        self.trouble: str | None = None  #: what is being waited for, in a sentence

    def run(self) -> None:
        """Collect until told to stop; then write what has already arrived, and return."""
        self._patiently(self._mend_if_dirty)
        self._make_group()
        self._drain_stream("0")  # handed to an earlier collector and not acknowledged
        while not self.stopping.is_set():
            self._drain_stream(">", block=True)
            self._reporter.tell()
        self._drain_stream(">")
        self._reporter.tell(at_once=True)
        self.close()

    def _mend_if_dirty(self) -> None:
        """Bring files and ledger together after whatever happened: cut torn tails, index, derive what is missing.

        Where a response is not there the files are read anew; one that then still cannot be read was damaged before a
        sample was made of it: set aside, and generated again.
        """
        if not self._dirty:
            return
        if not self._rundir.private.is_dir():  # opening the files would begin a second set of them at the old place
            raise StorageError(f"{self._rundir.out} was moved or removed; put it back")
        if missed := self._index_and_derive():
            self._ledger.read_anew(missed)
            for dataset, offsets in self._index_and_derive().items():
                self._close_files()
                set_unreadable_aside(self._rundir, dataset, offsets)
                log.warning("responses_set_aside %d of %s cannot be read: made again", len(offsets), dataset)
            self._ledger.catch_up()
        self._dirty = False

    def _index_and_derive(self) -> dict[str, set[int]]:
        """Returns where responses begin that cannot be read, per dataset."""
        self._close_files()
        self._ledger.catch_up(self._rundir)  # before anything is cut: what is cut now was never read
        if are_torn(self._rundir, self._ledger):
            log.warning("turns_mended: %s", mend(self._rundir))
        for dataset in self._rundir.datasets_on_disk():
            for name in (RAW, TOKENIZED, REJECTED):
                if self._rundir.file(dataset, name).exists():
                    self._file(dataset, name)
        self._ledger.catch_up()
        unreadable: dict[str, set[int]] = defaultdict(set)
        for places in _in_chunks(list(self._ledger.underived()), _MOST_ENTRIES):
            batch = _Batch(self._filters)
            for dataset, offset in places:
                try:
                    batch.derive(group_at(self._rundir.file(dataset, RAW), offset), offset)
                except StorageError:
                    unreadable[dataset].add(offset)
            self._write_derived(batch)
        return unreadable

    def close(self) -> None:
        """Close files and ledger."""
        self._close_files()
        self._ledger.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _make_group(self) -> None:
        def make() -> None:
            try:
                self._client.xgroup_create(self._keys.responses, _GROUP, id="0", mkstream=True)
            except ResponseError as exc:
                if not str(exc).startswith("BUSYGROUP"):  # Redis gives an error code word, not a class
                    raise

        self._patiently(make)

    def _drain_stream(self, start: str, *, block: bool = False) -> None:
        """Read and write until nothing more is there at once."""
        while True:
            entries = self._patiently(lambda: self._read(start, block))
            if not entries:
                return
            self._patiently(lambda entries=entries: self._collect(entries))
            if block:
                return

    def _read(self, start: str, block: bool) -> list[Entry]:
        try:
            reply = self._client.xreadgroup(
                _GROUP, _CONSUMER, {self._keys.responses: start}, count=_MOST_ENTRIES,
                block=_BLOCK_MS if block else None,
            )  # fmt: skip
        except ResponseError as exc:
            if not str(exc).startswith("NOGROUP"):
                raise
            self._make_group()  # a Redis that forgot everything
            return []
        return reply[0][1] if reply else []

    def _collect(self, entries: list[Entry]) -> None:
        """Write what is new among the entries, then let Redis forget all of them."""
        crash_point("entry_read")
        self._mend_if_dirty()  # an attempt before this one may have been cut short between two files
        batch = _Batch(self._filters)
        for _, fields in entries:
            lines = decompress(fields[b"blob"])
            if self._put_aside.isdisjoint(map(fingerprint, lines.splitlines())):
                batch.add(fields[b"kind"].decode(), lines)
        batch.drop_known(self._ledger)
        self._dirty = True
        offsets = self._append(RAW, batch.raw)
        crash_point("raw_line_synced")
        batch.derive_all(offsets)
        self._write_derived(batch)
        self._dirty = False
        self._reporter.wrote(batch.responses, batch.rejections)
        self._forget(entries)

    def _write_derived(self, batch: "_Batch") -> None:
        self._append(TOKENIZED, batch.samples)
        crash_point("sample_synced")
        self._append(REJECTED, batch.rejected)
        crash_point("rejection_synced")
        self._ledger.commit(batch.committed, {key: file.end for key, file in self._files.items()})
        crash_point("ledger_committed")

    def _append(self, name: str, lines: dict[str, list[bytes]]) -> dict[str, list[int]]:
        self.refuse_if_lost()
        offsets = {dataset: self._file(dataset, name).append(new) for dataset, new in lines.items()}
        if lines:
            crash_point("line_written")
        for dataset in lines:
            self._file(dataset, name).sync()
        return offsets

    def _file(self, dataset: str, name: str) -> Appender:
        file = self._files.get((dataset, name))
        if file is None:
            keep = end_of_groups if name in (RAW, TOKENIZED) else None
            file = self._files[dataset, name] = Appender(self._rundir.file(dataset, name), keep)
        return file

    def _forget(self, entries: list[Entry]) -> None:
        by_dataset: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_dataset[entry[1][b"dataset"].decode()].append(entry)
        words: list[bytes | int | str] = [_GROUP]
        for some in by_dataset.values():
            words += [len(some), *(entry_id for entry_id, _ in some), *(fields[b"key"] for _, fields in some)]
        keys = [self._keys.responses, self._keys.sent, self._keys.charges, *map(self._keys.published, by_dataset)]
        scripts.call(self._client, "commit", keys, words)
        crash_point("key_forgotten")

    def _patiently(self, action: Callable[[], object]) -> object:
        """Redis away or the disk full: keep what is in hand, say so, try again until it works or we are stopped."""
        while True:
            try:
                result = action()
            except AWAY as exc:
                trouble = f"Redis does not answer ({exc})"
            except StorageError as exc:
                trouble = str(exc)
            else:
                if self.trouble is not None:
                    log.warning("collector_goes_on")
                    self.trouble = None
                return result
            if trouble != self.trouble:
                log.warning("collector_waits: %s", trouble)
                self.trouble = trouble
            self._reporter.tell(trouble)
            if self.stopping.wait(_RETRY_SECONDS):
                raise StorageError(f"Stopped while results could not be saved: {trouble}")


class _Batch:
    """Entries on their way into the files, each slot once."""

    def __init__(self, filters: SampleFilters):
        self._filters = filters
        self._responses: dict[tuple[str, str, int], list[ResponseRecord]] = {}  #: all turns of each
        self._rejections: dict[tuple[str, str, int], RejectedRecord] = {}
        self.samples: dict[str, list[bytes]] = defaultdict(list)
        self.rejected: dict[str, list[bytes]] = defaultdict(list)
        self.committed: list[Committed] = []

    def add(self, kind: str, lines: bytes) -> None:
        """Take an entry of the stream: the raw lines of a completion, or its rejection."""
        if kind == "response":
            turns = [ResponseRecord(**orjson.loads(line)) for line in lines.splitlines()]
            first = turns[0]
            self._responses[first.dataset, first.row_id, first.completion_index] = turns
        else:
            rejection = RejectedRecord(**orjson.loads(lines))
            index = int(rejection.id.rsplit(":", 1)[1])
            self._rejections[rejection.dataset, rejection.row_id, index] = rejection

    def drop_known(self, ledger: Ledger) -> None:
        """Forget what the files have already."""
        for slots in (self._responses, self._rejections):
            for slot in ledger.known(slots.keys()):
                slots.pop(slot, None)

    @property
    def responses(self) -> list[ResponseRecord]:
        """Those to be written, turn by turn."""
        return [turn for turns in self._responses.values() for turn in turns]

    @property
    def rejections(self) -> list[RejectedRecord]:
        """Those that came as such, to be written."""
        return list(self._rejections.values())

    @property
    def raw(self) -> dict[str, list[bytes]]:
        """Raw lines per dataset, in the order in which `derive_all` expects their offsets."""
        lines: dict[str, list[bytes]] = defaultdict(list)
        for turns in self._responses.values():
            lines[turns[0].dataset] += map(line_of, turns)
        return lines

    def derive_all(self, offsets: dict[str, list[int]]) -> None:
        """Derive the sample or rejection of every response that was written at these offsets."""
        places = {dataset: iter(positions) for dataset, positions in offsets.items()}
        for turns in self._responses.values():
            offset, *_ = [next(places[turn.dataset]) for turn in turns]
            self.derive(turns, offset)
        for (dataset, row, index), rejection in self._rejections.items():
            self._reject(rejection)
            self.committed.append(Committed(dataset, row, index, State.REJECTED, rejection.reason, -1))

    def derive(self, turns: list[ResponseRecord], offset: int) -> None:
        """Derive what becomes of one completion, whose first raw line is at `offset`."""
        first = turns[0]
        slot = (first.dataset, first.row_id, first.completion_index)
        derived = samples_of(turns, self._filters, at=datetime.now(UTC).isoformat(timespec="seconds"))
        if isinstance(derived[0], RejectedRecord):
            self._reject(derived[0])
            self.committed.append(Committed(*slot, State.REJECTED, derived[0].reason, offset))
        else:
            self.samples[first.dataset] += map(line_of, derived)
            self.committed.append(Committed(*slot, State.TOKENIZED, "", offset))

    def _reject(self, rejection: RejectedRecord) -> None:
        self.rejected[rejection.dataset].append(line_of(rejection))


def _in_chunks(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

"""The collector's voice: once a second it tells Redis what is on file and how fast that grows (app/store/report.py)."""

import time
from collections import deque
from collections.abc import Callable

import redis

from app.errors import StorageError
from app.eventlog import note
from app.ledger import DatasetCounts
from app.lock import holder
from app.manifest import read_run_file
from app.records import RejectedRecord, ResponseRecord
from app.rundir import RunDir
from app.store.breaker import ChangeLog
from app.store.connection import AWAY
from app.store.keys import RunKeys
from app.store.report import Rate, Report, Sums

_TELL_SECONDS = 1.0
_RATE_SECONDS = 60.0


class Reporter:
    """Made and used by the collector's thread."""

    def __init__(
        self, rundir: RunDir, client: redis.Redis, keys: RunKeys, counts: Callable[[], list[DatasetCounts]]
    ):
        self._rundir, self._client, self._keys, self._counts = rundir, client, keys, counts
        run_file = read_run_file(rundir.run_json)
        self._recipe = run_file.recipe_fingerprint if run_file else ""
        self._sums = Sums()
        self._told_at, self._started_at = 0.0, time.monotonic()
        self._changes: ChangeLog | None = None
        self._seen: deque[tuple[float, dict[str, int], dict[str, int]]] = deque()  # (when, done, output tokens)

    def wrote(self, responses: list[ResponseRecord], rejections: list[RejectedRecord]) -> None:
        """These are in the files now."""
        for one in responses:
            self._sums.answer(
                one.dataset, one.endpoint, one.finish_reason, one.num_prompt_tokens, one.num_output_tokens,
                one.latency_seconds,
            )  # fmt: skip
            self._sums.attempts(one.dataset, one.attempt)
        for one in rejections:
            self._sums.attempts(one.dataset, one.attempts)

    def tell(self, trouble: str = "", *, at_once: bool = False) -> None:
        """Put a report into Redis, at most once a second; a Redis that is away misses one."""
        now = time.monotonic()
        if now - self._told_at < _TELL_SECONDS and not at_once:
            return
        self._told_at = now
        try:
            counts = self._counts()
            seconds, microseconds = self._client.time()
            at = seconds + microseconds / 1e6
            report = Report(
                at=at, since=at - (now - self._started_at), out=str(self._rundir.out), recipe=self._recipe,
                producing=holder(self._rundir.lock) is not None, counts=counts, rates=self._rates(now, counts),
                trouble=trouble,
            )  # fmt: skip
            pipeline = self._client.pipeline(transaction=False)
            pipeline.set(self._keys.report, report.dump())
            self._sums.hand_over(pipeline, self._keys)
            pipeline.execute()
            self._note_changes()
        except (*AWAY, StorageError):
            return

    def _note_changes(self) -> None:
        """Losses of endpoints and their ends go into the event log of the run, for its report."""
        if self._changes is None:
            self._changes = ChangeLog(self._client)
        for change in self._changes.new():
            event = "endpoint_down" if change.is_down else "endpoint_up"
            note(self._rundir, event, endpoint=change.url, detail=change.evidence if change.is_down else "")

    def _rates(self, now: float, counts: list[DatasetCounts]) -> dict[str, Rate]:
        """Over the last minute, or as long as this process has looked."""
        done = {one.dataset: one.tokenized + one.rejected for one in counts}
        self._seen.append((now, done, dict(self._sums.output_tokens)))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        then, done_then, tokens_then = self._seen[0]
        tokens, seconds = self._sums.output_tokens, max(now - then, 1e-9)
        return {
            name: Rate(
                max(0, number - done_then.get(name, 0)) / seconds,
                (tokens[name] - tokens_then.get(name, 0)) / seconds,
            )
            for name, number in done.items()
        }  # fmt: skip

"""Every Redis key Headrace uses: its type, its meaning, its owner. Nobody else spells a key.

Celery's own keys live under `headrace:celery:` (its queues, unacked messages, events).
"""

from dataclasses import dataclass

PREFIX = "headrace:"
CELERY_PREFIX = PREFIX + "celery:"

#: STRING, milliseconds of Redis TIME at which this Redis was first seen empty. While it is young nothing is admitted,
#: so that holders of leases from before a loss can assert them again. "0": known to have no such holders.
EPOCH = PREFIX + "epoch"
#: STRING, milliseconds of Redis TIME at which somebody last claimed, leased or renewed. Owner: prelude/absence.lua.
SEEN = PREFIX + "seen"
#: STRING with expiry, milliseconds of Redis TIME at which Redis was back after nobody could reach it: what expired
#: meanwhile is not taken for dead at once. Owner: prelude/absence.lua.
WOKE = PREFIX + "woke"
#: SET of run ids that have a manifest here. Owner: the producer.
RUNS = PREFIX + "runs"
#: HASH worker name → JSON about it, `at` in Redis time. Owner: each worker for itself, at every heartbeat.
WORKER_INFO = PREFIX + "worker-info"
#: HASH "run:task key" → requests at an endpoint at each death that the task was in flight at, "100,57"; see
#: workers/suspects.py. Owner: implicate.lua; removed when the key is published or a turn of it made.
DEATHS = PREFIX + "deaths"
#: HASH kind of task → curve: share of answers that get so far (app/capacity/lengths.py). Owner: the learner.
EXPECTED = PREFIX + "expected"
#: STREAM of losses of endpoints and their ends (app/store/breaker.py), the last thousand. Owner: the breaker's scripts.
CHANGES = PREFIX + "changes"
#: STRING with expiry: the worker that learns lengths now.
LEARNER = PREFIX + "learner"


def lengths(kind: str) -> str:
    """HASH bin → finished answers of a kind of task that ended in it. Owner: the workers, which add."""
    return f"{PREFIX}lengths:{kind}"


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run."""

    run: str

    def _key(self, name: str) -> str:
        return f"{PREFIX}run:{self.run}:{name}"

    @property
    def manifest(self) -> str:
        """STRING, JSON of RunManifest. Owner: the producer, which sets it again on a Redis that forgot it."""
        return self._key("manifest")

    @property
    def halt(self) -> str:
        """STRING, JSON {exit_code, message}: a fault of ours; deliveries end without work until it is removed."""
        return self._key("halt")

    @property
    def responses(self) -> str:
        """STREAM from workers and producer to the collector; one consumer group `collector`."""
        return self._key("responses")

    @property
    def sent(self) -> str:
        """HASH task key → requests sent for it. Removed on commit."""
        return self._key("sent")

    @property
    def charges(self) -> str:
        """HASH task key → charged attempts. Removed on commit."""
        return self._key("charges")

    @property
    def report(self) -> str:
        """STRING, JSON of app.store.report.Report. Owner: the collector, every second."""
        return self._key("report")

    @property
    def figures(self) -> str:
        """HASH app.store.report.field → sums over what was written. Owner: the collector, which adds."""
        return self._key("figures")

    @property
    def histograms(self) -> str:
        """HASH app.store.report.field with a bucket → how many. Owner: the collector, which adds."""
        return self._key("histograms")

    @property
    def expected_rows(self) -> str:
        """HASH dataset → rows its input is expected to have. Owner: the producer, until it has read them."""
        return self._key("expected-rows")

    @property
    def refusals(self) -> str:
        """HASH "endpoint refused" → rows it refused since the start, "endpoint served" → 1; see workers/refusals.py."""
        return self._key("refusals")

    def payload(self, dataset: str) -> str:
        """HASH task key → packed Task; there from enqueue until published. Its size is what is outstanding."""
        return self._key(f"payload:{dataset}")

    def turned(self, dataset: str) -> str:
        """HASH task key → packed Task: chats that wait for the prompt of their next turn. Owner: the producer."""
        return self._key(f"turned:{dataset}")

    def claims(self, dataset: str) -> str:
        """ZSET task key → expiry (ms): who works on what; `holders` says who."""
        return self._key(f"claims:{dataset}")

    def holders(self, dataset: str) -> str:
        """HASH task key → holder (worker name and delivery)."""
        return self._key(f"holders:{dataset}")

    def published(self, dataset: str) -> str:
        """SET of task keys in the stream and not yet committed to the files."""
        return self._key(f"published:{dataset}")


@dataclass(frozen=True, slots=True)
class EndpointKeys:
    """Keys of one endpoint, shared by all runs. `endpoint` is app.urls.endpoint_key(url)."""

    endpoint: str

    def _key(self, name: str) -> str:
        return f"{PREFIX}endpoint:{self.endpoint}:{name}"

    @property
    def leases(self) -> str:
        """ZSET lease id ("worker:number:run:task key") → expiry (ms)."""
        return self._key("leases")

    @property
    def lease_info(self) -> str:
        """HASH lease id → `app.capacity.share.Share`: "lane prompt_tokens allowance granted_ms kind [company]"."""
        return self._key("lease-info")

    @property
    def lease_sums(self) -> str:
        """HASH "granted_ms lane allowance kind [company]" → "how many, their prompt tokens, the squares of those"."""
        return self._key("lease-info-sums")

    @property
    def open(self) -> str:
        """STRING, JSON {since, evidence, why, told}: the breaker is open (app/store/breaker.py). Absent: closed."""
        return self._key("open")

    @property
    def probe(self) -> str:
        """STRING with expiry: the one worker that probes an open endpoint now."""
        return self._key("probe")

    @property
    def watch(self) -> str:
        """STRING with expiry: the one worker that watches for stalls and leave-taking now."""
        return self._key("watch")

    @property
    def lost(self) -> str:
        """STRING with expiry, milliseconds of Redis TIME: answers to leases granted before are lost."""
        return self._key("lost")

    @property
    def info(self) -> str:
        """STRING, JSON of what the endpoint said of itself. Owner: whoever last asked it."""
        return self._key("info")

    @property
    def differs(self) -> str:
        """HASH run id → why it may not use who answers there, while another run may. Owner: the workers."""
        return self._key("differs")

    @property
    def control(self) -> str:
        """HASH: what lease.lua decides by (f, rate, foreign, ceilings), the last `turn` to ask that it gave, what the
        observer is told (counters), and its health: `opens`, `why` of the last, `ready` (its 200 was seen), `trial` (a
        canary is out), `silence`.
        """
        return self._key("control")

    @property
    def reserved(self) -> str:
        """STRING with expiry: a request that waited long; others must fit beside it."""
        return self._key("reserved")

    @property
    def learned(self) -> str:
        """STRING, JSON of app.capacity.controller.State. Owner: the observer."""
        return self._key("learned")

    @property
    def observer(self) -> str:
        """STRING with expiry: the one worker that observes this endpoint now."""
        return self._key("observer")

    @property
    def recalled(self) -> str:
        """STRING with expiry: ids of leases whose holders take their requests back, before the pool is full."""
        return self._key("recalled")

    @property
    def all(self) -> list[str]:
        """Everything that is known of it."""
        return [self.leases, self.lease_info, self.lease_sums, self.open, self.probe, self.watch, self.lost, self.info,
                self.control, self.reserved, self.learned, self.observer, self.recalled, self.differs]  # fmt: skip

"""What Redis knows of a run at this moment. `app.snapshot` makes of it what everybody shows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from app.capacity.lengths import Curve, kind_of, parse_curve
from app.capacity.share import Share, parse_share
from app.lanes import Lane
from app.manifest import RunManifest
from app.sglang.sampling import looks_back
from app.store.breaker import Why, parse_breaker
from app.store.keys import CELERY_PREFIX, EXPECTED, RUNS, WORKER_INFO, EndpointKeys, RunKeys, lengths
from app.store.report import Report, parse_figures, parse_report
from app.urls import endpoint_key

#: A worker that gave no sign for so long is gone.
WORKER_SECONDS = 20.0
_BEFORE_SECONDS = 2.0  # clocks tick differently: a report counts as earlier if it is by so much


@dataclass(frozen=True, slots=True)
class EndpointNow:
    """An endpoint's state, over all workers and runs."""

    url: str
    open_since: float | None  #: Unix time; None: closed
    evidence: str
    state: str  #: closed, open, half-open (a trial is under way), or drained (by a person)
    why: str  #: of an open one: app.store.breaker.Why
    requests: int  #: leases held
    tokens: int  #: KV tokens they hold by now, about
    kv_tokens: int | None  #: what it can hold
    model: str = ""
    f: float = 1.0  #: share of it that the predicted peak may fill, as learned
    running: int | None = None  #: as the endpoint says; other clients' requests too
    waiting: int | None = None
    used_tokens: int | None = None
    pace: float = 0.0  #: tokens per millisecond of one request
    answered: int = 0  #: requests, since this Redis knows it
    retractions: int = 0  #: of them
    shares: tuple[Share, ...] = ()

    @property
    def differs(self) -> bool:
        """It is held, for it serves something else than the run."""
        return self.why == Why.DIFFERS


@dataclass(frozen=True, slots=True)
class Request:
    """A request at an endpoint."""

    id: str  #: of the completion, as in the files
    endpoint: str
    since: float  #: Redis time


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker, as it said within the last heartbeats."""

    name: str
    slots: int  #: tasks it may hold
    lanes: tuple[str, ...]
    claims: int  #: tasks it works on
    leases: int  #: of them at an endpoint
    waiting: int  #: of them waiting for one
    draining: bool
    age_seconds: float  #: since it said so
    oldest: dict[str, Request] = field(default_factory=dict)  #: per run: its request that is longest under way


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of the lengths of one dataset's answers in one lane."""

    name: str
    finished: int  #: answers
    curve: Curve | None  #: share of answers that get so far; None: too few have finished


@dataclass(frozen=True, slots=True)
class RunNow:
    """A run's state in Redis."""

    queued: dict[str, int]  #: per dataset
    in_flight: dict[str, int]  #: per dataset
    lanes: dict[str, int]  #: messages per lane, over all runs
    unwritten: int  #: responses in the stream
    endpoints: list[EndpointNow]
    halt: dict[str, Any] | None
    at: float = 0.0  #: Redis TIME, in seconds
    report: Report | None = None
    workers: list[WorkerNow] = field(default_factory=list)
    figures: dict[tuple, float] = field(default_factory=dict)  #: app.store.report.figure → sum
    expected_rows: dict[str, int] = field(default_factory=dict)  #: per dataset, while its input is being read
    kinds: dict[str, list[Kind]] = field(default_factory=dict)  #: per dataset
    max_new_tokens: int = 0
    stage_tokens: int = 0  #: 0: whole answers
    can_be_staged: bool = False  #: no sampling parameter forbids it
    memory_bytes: int = 0
    memory_limit_bytes: int = 0  #: 0: none


def reports_at(client: redis.Redis) -> dict[str, Report | None]:
    """Run ids that this Redis knows, with what their collectors said last. Raises redis errors."""
    ids = sorted(run.decode() for run in client.smembers(RUNS))
    return {run: parse_report(client.get(RunKeys(run).report)) for run in ids}


def workers_at(client: redis.Redis) -> list[WorkerNow]:
    """The workers on this Redis, whatever they work on. Raises redis errors."""
    seconds, microseconds = client.time()
    return list(_workers(client.hgetall(WORKER_INFO), seconds + microseconds / 1e6))


def histograms(client: redis.Redis, run_id: str) -> dict[tuple, float]:
    """Histograms of what was written, as `app.store.report.Sums` made them. Raises redis errors."""
    return parse_figures(client.hgetall(RunKeys(run_id).histograms))


def look(
    client: redis.Redis, run_id: str, datasets: Iterable[str] = (), begun_seconds: float | None = None
) -> RunNow | None:
    """One look, in two round trips. None if Redis does not know the run. Raises redis errors.

    datasets: their names, if the caller knows them; else the collector's report says. begun_seconds: how long ago the
    run was started, if the caller knows; a report of a collector that began before is an earlier start's, and none.
    """
    keys = RunKeys(run_id)
    pipeline = client.pipeline(transaction=False)
    pipeline.time()
    for key in (keys.manifest, keys.halt, keys.report):
        pipeline.get(key)
    (seconds, microseconds), manifest, halt, report = pipeline.execute()
    if manifest is None:
        return None
    run, told = RunManifest.model_validate_json(manifest), parse_report(report)
    now_ms = seconds * 1000 + microseconds // 1000
    if told is not None and begun_seconds is not None and now_ms / 1000 - told.since > begun_seconds + _BEFORE_SECONDS:
        told = None
    names = list(datasets) or [one.dataset for one in (told.counts if told else ())]
    _ask(pipeline, keys, run, names, now_ms)
    replies = iter(pipeline.execute())
    payloads, claims = {}, {}
    for name in names:
        payloads[name], claims[name] = next(replies) + next(replies), next(replies)
    lanes = {lane.value: next(replies) for lane in Lane}
    unwritten, figures, expected_rows, workers, memory = (next(replies) for _ in range(5))
    return RunNow(
        queued={name: max(0, payloads[name] - claims[name]) for name in names}, in_flight=claims, lanes=lanes,
        unwritten=unwritten, endpoints=[_endpoint(url, now_ms, *_take(replies, 4)) for url in run.endpoints],
        halt=orjson.loads(halt) if halt else None, at=now_ms / 1000, report=told,
        workers=list(_workers(workers, now_ms / 1000)), figures=parse_figures(figures),
        expected_rows={name.decode(): int(number) for name, number in expected_rows.items()},
        kinds={name: [_kind(run, name, lane, *_take(replies, 2)) for lane in Lane] for name in names},
        max_new_tokens=run.max_new_tokens, stage_tokens=run.stage_tokens or 0,
        can_be_staged=looks_back(run.sampling) is None, memory_bytes=memory["used_memory"],
        memory_limit_bytes=memory["maxmemory"],
    )  # fmt: skip


def _ask(pipeline: redis.client.Pipeline, keys: RunKeys, run: RunManifest, datasets: list[str], now_ms: int) -> None:
    """The questions whose answers `look` takes in the same order."""
    for dataset in datasets:
        pipeline.hlen(keys.payload(dataset))
        pipeline.hlen(keys.turned(dataset))
        pipeline.zcount(keys.claims(dataset), now_ms, "+inf")
    for lane in Lane:
        pipeline.llen(CELERY_PREFIX + lane.queue)
    pipeline.xlen(keys.responses)
    pipeline.hgetall(keys.figures)
    pipeline.hgetall(keys.expected_rows)
    pipeline.hgetall(WORKER_INFO)
    pipeline.info("memory")
    for url in run.endpoints:
        names = EndpointKeys(endpoint_key(url))
        pipeline.get(names.open)
        pipeline.hvals(names.lease_info)
        pipeline.get(names.info)
        pipeline.hgetall(names.control)
    for dataset in datasets:
        for lane in Lane:
            kind = kind_of(run.recipe, dataset, lane.value)
            pipeline.hvals(lengths(kind))
            pipeline.hget(EXPECTED, kind)


def _take(replies: Iterator[Any], number: int) -> list[Any]:
    return [next(replies) for _ in range(number)]


def _endpoint(
    url: str, now_ms: int, opened: bytes | None, shares: list[bytes], info: bytes | None, control: dict[bytes, bytes]
) -> EndpointNow:
    breaker = parse_breaker(opened)
    said = orjson.loads(info) if info else {}
    kv_tokens = said.get("max_total_num_tokens")
    pace = float(control.get(b"rate", 0))
    held = tuple(map(parse_share, shares))
    return EndpointNow(
        url=url, open_since=breaker and breaker.since, evidence=breaker.evidence if breaker else "",
        state=_state(breaker and breaker.why, b"trial" in control), why=breaker.why if breaker else "",
        requests=len(shares), tokens=round(sum(share.prompt_tokens + share.made(now_ms, pace) for share in held)),
        kv_tokens=kv_tokens * (said.get("dp_size") or 1) if kv_tokens else None,
        model=said.get("served_model_name") or said.get("model") or "",
        f=float(control.get(b"f", 1)), running=_number(control, b"running"), waiting=_number(control, b"waiting"),
        used_tokens=_number(control, b"used"), pace=pace, answered=int(control.get(b"done", 0)),
        retractions=int(control.get(b"retractions", 0)), shares=held,
    )  # fmt: skip


def _state(why: Why | None, trial: bool) -> str:
    if why is None:
        return "closed"
    return "drained" if why is Why.DRAINED else "half-open" if trial else "open"


def _workers(infos: dict[bytes, bytes], now: float) -> Iterator[WorkerNow]:
    """Those that gave a sign of late, by name."""
    for name, info in sorted(infos.items()):
        said = orjson.loads(info)
        age = max(0.0, now - said.pop("at"))
        if age <= WORKER_SECONDS:
            oldest = {run: Request(**request) for run, request in said.pop("oldest").items()}
            yield WorkerNow(name=name.decode(), age_seconds=age, oldest=oldest, **said)


def _kind(run: RunManifest, dataset: str, lane: Lane, finished: list[bytes], curve: bytes | None) -> Kind:
    name = kind_of(run.recipe, dataset, lane.value)
    return Kind(name, sum(map(int, finished)), parse_curve(curve.decode()) if curve else None)


def _number(control: dict[bytes, bytes], name: bytes) -> int | None:
    """A figure that the endpoint may not have told (then it is absent or -1)."""
    value = int(control.get(name, -1))
    return value if value >= 0 else None

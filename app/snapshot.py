"""Everything that is known of a run at one moment: what `status`, the live view, `watch` and the metrics show. Pure.

The ledger (or, from another host, the collector's report) says what is on file, `app.store.live.look` what is under
way. What nobody knows is -1.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from app.capacity.lengths import Curve, Running, first_of, later, seconds_until_all_end
from app.capacity.plan import Busy, scheduling_advice
from app.capacity.share import Share
from app.capacity.stages import ENOUGH, Job, Suggestion, suggest
from app.inventory import UNKNOWN, Live, RunFacts, inventory
from app.ledger import DatasetCounts
from app.store.live import WORKER_SECONDS, EndpointNow, Kind, Request, RunNow, WorkerNow
from app.store.report import Rate

#: A collector that said nothing for so long is away, or stuck.
COLLECTOR_SECONDS = 15.0
#: So many lengths stand for a curve where a stage is looked for.
_SAMPLE = 100


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of one run."""

    inventory: dict[str, Any]  #: what `status --json` prints
    waiting_for: str  #: in a sentence; "" for nothing
    rates: dict[str, Rate] = field(default_factory=dict)  #: per dataset, over the last minute
    expected_rows: dict[str, int] = field(default_factory=dict)  #: completions expected per dataset still being read
    endpoints: tuple[EndpointNow, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)  #: messages queued, over all runs
    workers: tuple[WorkerNow, ...] = ()
    oldest: Request | None = None  #: the request longest under way
    oldest_seconds: float = UNKNOWN
    figures: dict[tuple, float] = field(default_factory=dict)
    unwritten: int = UNKNOWN  #: responses that the collector has not written yet
    collector_seconds: float = UNKNOWN  #: since the collector said something
    memory_bytes: int = UNKNOWN  #: used by Redis
    memory_limit_bytes: int = UNKNOWN  #: 0: none
    generating_tokens_per_second: float = UNKNOWN  #: output tokens, of what is at closed endpoints now
    advice: tuple[str, ...] = ()  #: sentences about endpoints that could be used better

    @property
    def complete(self) -> bool:
        """Whether nothing is pending."""
        return self.inventory["complete"]

    @property
    def rate(self) -> Rate:
        """Of all datasets together."""
        rates = self.rates.values()
        return Rate(sum(r.completions_per_second for r in rates), sum(r.output_tokens_per_second for r in rates))

    @property
    def extra_generations(self) -> int:
        """Requests beyond the first that were sent for completions now on file."""
        return self.sum("extra") if self.figures or self.collector_seconds >= 0 else UNKNOWN

    def sum(self, name: str) -> int:
        """A figure over all its labels."""
        return round(sum(number for (which, *_), number in self.figures.items() if which == name))

    def to_json(self) -> dict[str, Any]:
        """The line that `watch --json` prints: the inventory and more beside it. No value is null."""
        shown, rate = self.inventory, self.rate
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **shown,
            "datasets": [one | self._pace(one["dataset"]) for one in shown["datasets"]],
            "completions_per_second": round(rate.completions_per_second, 3),
            "output_tokens_per_second": round(rate.output_tokens_per_second, 1),
            "waiting_for": self.waiting_for,
            "endpoints": [_endpoint(one) for one in self.endpoints],
            "lanes": self.lanes,
            "workers": [_worker(one) for one in self.workers],
            "oldest_request": {
                "id": self.oldest.id if self.oldest else "", "endpoint": self.oldest.endpoint if self.oldest else "",
                "age_seconds": round(self.oldest_seconds, 1),
            },
            "extra_generations": self.extra_generations,
            "unwritten": self.unwritten,
            "collector_age_seconds": round(self.collector_seconds, 1),
            "redis": {"memory_bytes": self.memory_bytes, "memory_limit_bytes": self.memory_limit_bytes},
        }  # fmt: skip

    def _pace(self, dataset: str) -> dict[str, Any]:
        rate = self.rates.get(dataset, Rate(UNKNOWN, UNKNOWN))
        return {
            "completions_per_second": round(rate.completions_per_second, 3),
            "output_tokens_per_second": round(rate.output_tokens_per_second, 1),
            "expected_rows": self.expected_rows.get(dataset, UNKNOWN),
        }


def snapshot(run: RunFacts, counts: Iterable[DatasetCounts], now: RunNow | None, trouble: str = "") -> Snapshot:
    """Put together what the files and Redis say. now None: Redis is away. trouble: what its host knows to be amiss."""
    counts = list(counts)
    waiting = "" if run.state in (None, "draining") else trouble or waiting_for(now)
    if waiting:
        run = RunFacts(run.out, run.id, run.recipe, "waiting")
    if now is None:
        return Snapshot(inventory(run, counts), waiting)
    expected = _expected(counts, now)
    speed = _generating(now)
    left = None if run.state == "draining" else _seconds_left(counts, now, speed, expected)  # most is left to the next
    shown = inventory(run, counts, Live(now.queued, now.in_flight, left))
    started = (worker for worker in now.workers if worker.leases)
    oldest = min(filter(None, (worker.oldest.get(run.id) for worker in started)), key=_since, default=None)
    return Snapshot(
        shown, waiting, rates=now.report.rates if now.report else {}, expected_rows=expected,
        endpoints=tuple(now.endpoints), lanes=now.lanes, workers=tuple(now.workers), oldest=oldest,
        oldest_seconds=max(0.0, now.at - oldest.since) if oldest else UNKNOWN, figures=now.figures,
        unwritten=now.unwritten, collector_seconds=max(0.0, now.at - now.report.at) if now.report else UNKNOWN,
        memory_bytes=now.memory_bytes, memory_limit_bytes=now.memory_limit_bytes, generating_tokens_per_second=speed,
        advice=tuple(_advice(now)),
    )  # fmt: skip


def waiting_for(now: RunNow | None) -> str:
    """What a run that somebody works on waits for, in a sentence; "" if for nothing."""
    if now is None:
        return "Redis does not answer, or does not know this run yet"
    if now.halt is not None:
        return now.halt["message"]
    if now.memory_limit_bytes and now.memory_bytes >= now.memory_limit_bytes:
        return "Redis is full (maxmemory); raise maxmemory or free it"
    if now.endpoints and all(endpoint.open_since is not None for endpoint in now.endpoints):
        return "; ".join(f"{endpoint.url}: {endpoint.evidence}" for endpoint in now.endpoints)
    if now.report is not None and now.report.trouble:
        return now.report.trouble
    if now.unwritten and now.report is not None and now.at - now.report.at > COLLECTOR_SECONDS:
        return f"no collector has written for {now.at - now.report.at:.0f} s, and {now.unwritten:,} answers wait for it"
    begun = now.report is not None and now.at - now.report.since > WORKER_SECONDS  # workers take seconds to start
    if begun and not now.workers and any(now.queued.values()):
        return "no worker is there to take what is queued; `headrace worker` starts one"
    return ""


def _since(request: Request) -> float:
    return request.since


def _advice(now: RunNow) -> Iterator[str]:
    """While more waits here than is there: a run that ends needs no advice."""
    for one in now.endpoints:
        if one.open_since is None and one.kv_tokens and one.used_tokens is not None and any(now.queued.values()):
            share = one.retractions / one.answered if one.answered >= ENOUGH else 0.0
            busy = Busy(use=one.used_tokens / one.kv_tokens, waiting=one.waiting or 0, retracted_share=share)
            if sentence := scheduling_advice(busy, _stages(now, one)):
                yield f"{one.url}: {sentence}"


def _stages(now: RunNow, one: EndpointNow) -> Suggestion | None:
    """The stage that pays there, None where answers come in stages or cannot."""
    known = [kind for kinds in now.kinds.values() for kind in kinds if kind.curve is not None]
    if now.stage_tokens or not now.can_be_staged or not known or not one.shares:
        return None
    kind = max(known, key=lambda kind: kind.finished)
    prompt = sum(share.prompt_tokens for share in one.shares) / len(one.shares)
    lengths = [min(now.max_new_tokens, length) for length in kind.curve.believed(kind.finished).sample(_SAMPLE)]
    return suggest(Job(one.kv_tokens, prompt, now.max_new_tokens, lengths))


def _expected(counts: list[DatasetCounts], now: RunNow) -> dict[str, int]:
    """Completions that datasets still being read will have, where the producer could tell."""
    return {
        one.dataset: max(one.rows, now.expected_rows[one.dataset])
        for one in counts if not one.rows_final and one.dataset in now.expected_rows
    }  # fmt: skip


def _generating(now: RunNow) -> float:
    """Output tokens per second of this run's requests at closed endpoints: as many as there are, at their pace."""
    mine = {name for kinds in now.kinds.values() for kind in kinds for name in (kind.name, later(kind.name))}
    closed = (endpoint for endpoint in now.endpoints if endpoint.open_since is None)
    return sum(1000 * one.pace * sum(share.kind in mine for share in one.shares) for one in closed)


def _seconds_left(counts: list[DatasetCounts], now: RunNow, speed: float, expected: dict[str, int]) -> float | None:
    """What waits is made at the speed at which all is made now; then the last of what is under way ends. None while
    something is not known.

    Each of those that wait is expected to be a whole answer of its dataset; so is what was at endpoints that are away.
    When nothing waits any more, the others are not waited for together, but for the longest of them.
    """
    tokens, whole_tokens, running = 0.0, 0.0, []
    closed = [endpoint for endpoint in now.endpoints if endpoint.open_since is None and endpoint.pace > 0]
    for one in counts:
        total = expected.get(one.dataset, one.rows if one.rows_final else None)
        if total is None:
            return None
        kinds = {kind.name: _believed(kind) for kind in now.kinds.get(one.dataset, ())}
        whole = _whole_answer(list(kinds.values()), now.max_new_tokens or math.inf)
        mine = [
            _running(now, endpoint, share, kinds[first].curve)
            for endpoint in closed
            for share in endpoint.shares
            if (first := first_of(share.kind) or share.kind) in kinds
        ]
        running += mine
        if others := max(0, total - one.tokenized - one.rejected - len(mine)):
            if whole is None:
                return None
            tokens, whole_tokens = tokens + others * whole, max(whole_tokens, whole)
    if not closed or speed <= 0 or not (running or tokens):
        return None
    alone = whole_tokens / max(one.pace for one in closed) / 1000
    return max(tokens / speed + seconds_until_all_end(running), alone)


def _running(now: RunNow, endpoint: EndpointNow, share: Share, curve: Curve | None) -> Running:
    """The answer that a request belongs to. Of one in a later stage it is known that it has its first."""
    made = share.made(now.at * 1000, endpoint.pace) + (now.stage_tokens if first_of(share.kind) else 0)
    allowance = now.max_new_tokens if now.stage_tokens else share.allowance
    return Running(curve, made, allowance, endpoint.pace * 1000)


def _believed(kind: Kind) -> Kind:
    return replace(kind, curve=kind.curve.believed(kind.finished)) if kind.curve else kind


def _whole_answer(kinds: list[Kind], allowance: float) -> float | None:
    """Expected tokens of an answer of a dataset, None while too few have finished."""
    known = [kind for kind in kinds if kind.curve is not None]
    finished = sum(kind.finished for kind in known)
    tokens = sum(kind.finished * kind.curve.remaining(0, allowance) for kind in known)
    return tokens / finished if finished else None


def _endpoint(one: EndpointNow) -> dict[str, Any]:
    return {
        "url": one.url, "state": one.state, "why": one.why, "open_since": one.open_since or UNKNOWN,
        "evidence": one.evidence, "model": one.model, "requests": one.requests, "running": _known(one.running),
        "waiting": _known(one.waiting),
        "in_flight_tokens": one.tokens, "used_tokens": _known(one.used_tokens), "kv_tokens": _known(one.kv_tokens),
        "budget_tokens": _known(budget_tokens(one)), "f": round(one.f, 3),
        "tokens_per_second": round(one.pace * one.requests * 1000, 1),
    }  # fmt: skip


def budget_tokens(one: EndpointNow) -> int | None:
    """Tokens that may be in flight at an endpoint; None if it does not tell what it can hold."""
    return None if one.kv_tokens is None else round(one.f * one.kv_tokens)


def _worker(one: WorkerNow) -> dict[str, Any]:
    return {
        "name": one.name, "slots": one.slots, "lanes": list(one.lanes), "claims": one.claims, "leases": one.leases,
        "waiting": one.waiting, "draining": one.draining, "age_seconds": round(one.age_seconds, 1),
    }  # fmt: skip


def _known(number: int | None) -> int:
    return UNKNOWN if number is None else number

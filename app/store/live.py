"""What Redis knows of a run at this moment, for `status`, the live view and the supervisor."""

from dataclasses import dataclass
from typing import Any

import orjson
import redis

from app.capacity.share import parse_share
from app.lanes import Lane
from app.store.keys import CELERY_PREFIX, EndpointKeys, RunKeys
from app.urls import endpoint_key


@dataclass(frozen=True, slots=True)
class EndpointNow:
    """An endpoint's state, over all workers and runs."""

    url: str
    open_since: float | None  #: Unix time; None: closed
    evidence: str
    loading: bool
    requests: int  #: leases held
    tokens: int  #: KV tokens they hold by now, about
    kv_tokens: int | None  #: what it can hold
    f: float = 1.0  #: share of it that the predicted peak may fill, as learned
    running: int | None = None  #: as the endpoint says; other clients' requests too
    waiting: int | None = None
    used_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RunNow:
    """A run's state in Redis."""

    queued: dict[str, int]  #: per dataset
    in_flight: dict[str, int]  #: per dataset
    lanes: dict[str, int]  #: messages per lane, over all runs
    unwritten: int  #: responses in the stream
    endpoints: list[EndpointNow]
    halt: dict[str, Any] | None


def look(client: redis.Redis, run_id: str, datasets: list[str], urls: list[str]) -> RunNow:
    """One look, in one round trip and a bit. Raises redis errors."""
    keys = RunKeys(run_id)
    now_ms = _now_ms(client)
    pipeline = client.pipeline(transaction=False)
    for dataset in datasets:
        pipeline.hlen(keys.payload(dataset))
        pipeline.hlen(keys.turned(dataset))
        pipeline.zcount(keys.claims(dataset), now_ms, "+inf")
    for lane in Lane:
        pipeline.llen(CELERY_PREFIX + lane.queue)
    pipeline.xlen(keys.responses)
    pipeline.get(keys.halt)
    for url in urls:
        names = EndpointKeys(endpoint_key(url))
        pipeline.get(names.open)
        pipeline.hvals(names.lease_info)
        pipeline.get(names.info)
        pipeline.hgetall(names.control)
    replies = iter(pipeline.execute())
    payloads, claims = {}, {}
    for dataset in datasets:
        payloads[dataset], claims[dataset] = next(replies) + next(replies), next(replies)
    lanes = {lane.value: next(replies) for lane in Lane}
    unwritten, halt = next(replies), next(replies)
    endpoints = [_endpoint(url, now_ms, *(next(replies) for _ in range(4))) for url in urls]
    return RunNow(
        queued={dataset: max(0, payloads[dataset] - claims[dataset]) for dataset in datasets},
        in_flight=claims, lanes=lanes, unwritten=unwritten, endpoints=endpoints,
        halt=orjson.loads(halt) if halt else None,
    )  # fmt: skip


def _endpoint(
    url: str, now_ms: int, opened: bytes | None, shares: list[bytes], info: bytes | None, control: dict[bytes, bytes]
) -> EndpointNow:
    state = orjson.loads(opened) if opened else {}
    said = orjson.loads(info) if info else {}
    kv_tokens = said.get("max_total_num_tokens")
    rate = float(control.get(b"rate", 0))
    held = [share.prompt_tokens + share.made(now_ms, rate) for share in map(parse_share, shares)]
    return EndpointNow(
        url=url, open_since=state.get("since"), evidence=state.get("evidence", ""), loading=state.get("loading", False),
        requests=len(shares), tokens=round(sum(held)),
        kv_tokens=kv_tokens * (said.get("dp_size") or 1) if kv_tokens else None,
        f=float(control.get(b"f", 1)), running=_number(control, b"running"), waiting=_number(control, b"waiting"),
        used_tokens=_number(control, b"used"),
    )  # fmt: skip


def _number(control: dict[bytes, bytes], name: bytes) -> int | None:
    """A figure that the endpoint may not have told (then it is absent or -1)."""
    value = int(control.get(name, -1))
    return value if value >= 0 else None


def _now_ms(client: redis.Redis) -> int:
    seconds, microseconds = client.time()
    return seconds * 1000 + microseconds // 1000

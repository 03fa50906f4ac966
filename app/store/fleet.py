"""The endpoints of runs that go on: added to and taken from their manifests, which workers read every few seconds."""

from collections.abc import Callable

import redis

from app.manifest import Limits, RunManifest
from app.sglang.wire import EndpointInfo
from app.store.keys import RUNS, EndpointKeys, RunKeys
from app.urls import endpoint_key

#: Workers know of a changed manifest after this long: until then a forgotten endpoint's breaker stays.
_KNOWN_SECONDS = 60


def runs_at(client: redis.Redis) -> list[RunManifest]:
    """All runs that this Redis knows. Raises redis errors."""
    ids = sorted(run.decode() for run in client.smembers(RUNS))
    texts = client.mget([RunKeys(run).manifest for run in ids]) if ids else []
    return [RunManifest.model_validate_json(text) for text in texts if text]


def run_at(client: redis.Redis, run_id: str) -> RunManifest | None:
    """A run as it is now; None if this Redis does not know it. Raises redis errors."""
    text = client.get(RunKeys(run_id).manifest)
    return RunManifest.model_validate_json(text) if text else None


def add_endpoint(client: redis.Redis, run_id: str, url: str, info: EndpointInfo) -> None:
    """The run uses it from now on. Raises redis errors."""
    limits = Limits(context_tokens=info.usable_context, prompt_tokens=info.max_req_input_len)
    _change(client, run_id, lambda run: run.model_copy(update={
        "endpoints": list(dict.fromkeys([*run.endpoints, url])), "limits": run.limits | {url: limits},
    }))  # fmt: skip


def remove_endpoint(client: redis.Redis, run_id: str, url: str) -> None:
    """The run uses it no more. Raises redis errors."""
    _change(client, run_id, lambda run: run.model_copy(update={
        "endpoints": [one for one in run.endpoints if one != url],
        "limits": {one: limits for one, limits in run.limits.items() if one != url},
    }))  # fmt: skip


def in_flight(client: redis.Redis, url: str) -> int:
    """Requests of ours there now, of all runs."""
    seconds, _ = client.time()
    return client.zcount(EndpointKeys(endpoint_key(url)).leases, seconds * 1000, "+inf")


def forget_endpoint(client: redis.Redis, url: str) -> None:
    """Whatever was learned of it; nothing runs there any more."""
    names = EndpointKeys(endpoint_key(url))
    client.delete(*(key for key in names.all if key != names.open))
    client.expire(names.open, _KNOWN_SECONDS)


def _change(client: redis.Redis, run_id: str, change: Callable[[RunManifest], RunManifest]) -> None:
    """Change a manifest; if somebody else does at the same time, one after the other."""
    key = RunKeys(run_id).manifest

    def apply(pipeline: redis.client.Pipeline) -> None:
        text = pipeline.get(key)
        pipeline.multi()
        if text:  # else the run was forgotten meanwhile
            pipeline.set(key, change(RunManifest.model_validate_json(text)).model_dump_json())

    client.transaction(apply, key)

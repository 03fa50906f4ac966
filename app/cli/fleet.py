"""`headrace endpoints`: look at the endpoints of runs that go on, and change which they are."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr

from app.cli.inspect import existing_run, redis_of
from app.cli.run import checked_key
from app.cli.talk import say, show
from app.drift import objection
from app.errors import OK, RecipeChanged, StorageError, UsageError
from app.manifest import RunManifest
from app.preflight import survey
from app.sglang.wire import EndpointInfo
from app.store.breaker import Why, closing, opening
from app.store.connection import connect, translated
from app.store.fleet import add_endpoint, forget_endpoint, in_flight, remove_endpoint, runs_at
from app.store.live import EndpointNow, look
from app.store.scripts import call
from app.urls import normalise

_DRAINED = "drained by a person (`headrace endpoints add` ends it)"
_LOOK_SECONDS = 0.5
_SAY_SECONDS = 10.0


def list_command(out: Path | None, redis_url: str | None, as_json: bool) -> int:
    """`headrace endpoints list`."""
    with _runs(out, redis_url) as (client, runs):
        found: dict[str, tuple[EndpointNow, list[str]]] = {}
        for run in runs:
            now = look(client, run.run_id)
            for endpoint in now.endpoints if now else ():
                found.setdefault(endpoint.url, (endpoint, []))[1].append(run.run_id)
    if as_json:
        show(json.dumps({"endpoints": [_facts(one, ids) for one, ids in found.values()]}, ensure_ascii=False))
    else:
        show(_table([one for one, _ in found.values()]))
    return OK


def add_command(words: tuple[str, ...], redis_url: str | None, api_key: str | None, wait_seconds: float) -> int:
    """`headrace endpoints add`: proven as at a start, then part of the runs. Raises as `survey`, and RecipeChanged."""
    out, urls = _out_and_urls(words)
    key = checked_key(api_key)
    with _runs(out, redis_url) as (client, runs):
        for url in urls:
            met = [(run, _meet(run, url, key, wait_seconds)) for run in runs]
            for run, info in met:
                add_endpoint(client, run.run_id, url, info)
            call(client, *closing(url, held=True))
            say(f"{url} is in use; it serves {met[0][1].model or 'a model that it does not name'}")
    return OK


def drain_command(words: tuple[str, ...], redis_url: str | None) -> int:
    """`headrace endpoints drain`: nothing new from now on; what runs there finishes."""
    out, urls = _out_and_urls(words)
    with _runs(out, redis_url) as (client, runs):
        _refuse_strangers(urls, runs)
        for url in urls:
            call(client, *opening(url, Why.DRAINED, _DRAINED))
            say(f"{url} gets nothing new; {in_flight(client, url)} requests finish there")
    return OK


def remove_command(words: tuple[str, ...], redis_url: str | None, wait: bool) -> int:
    """`headrace endpoints remove`: drained, and forgotten when nothing runs there any more."""
    out, urls = _out_and_urls(words)
    with _runs(out, redis_url) as (client, runs):
        _refuse_strangers(urls, runs)
        for run in runs:
            if not set(run.endpoints) - set(urls):
                raise UsageError(f"Run {run.run_id} would have no endpoint left; add another one first, or drain it.")
        for url in urls:
            call(client, *opening(url, Why.DRAINED, _DRAINED))
            for run in runs:
                remove_endpoint(client, run.run_id, url)
        for url in urls:
            if wait:
                _await_end(client, url)
            if any(url in run.endpoints for run in runs_at(client)):
                call(client, *closing(url, held=True))  # another run goes on there
            elif not in_flight(client, url):
                forget_endpoint(client, url)
            say(f"{url} is removed")
    return OK


def _await_end(client: redis.Redis, url: str) -> None:
    say_at = time.monotonic()
    while left := in_flight(client, url):
        if time.monotonic() >= say_at:
            say_at += _SAY_SECONDS
            say(f"{url} gets nothing new; {left} requests finish there (Ctrl-C leaves them to it)")
        time.sleep(_LOOK_SECONDS)


def _meet(run: RunManifest, url: str, api_key: SecretStr | None, wait_seconds: float) -> EndpointInfo:
    """The same proofs as at a start: it generates with the run's parameters, and serves the run's model."""
    found = survey(
        [url], run.sampling, api_key=api_key, vocab_size=run.output_vocab_size, wait_seconds=wait_seconds, say=say
    )
    info = found[url]
    if sentence := objection(run.server, run.required, info.identity):
        raise RecipeChanged(f"{url} cannot join run {run.run_id}: {sentence}.")
    return info


def _refuse_strangers(urls: list[str], runs: list[RunManifest]) -> None:
    known = sorted({url for run in runs for url in run.endpoints})
    for url in urls:
        if url not in known:
            raise UsageError(f"{url} is no endpoint here; there are {', '.join(known)}.")


def _out_and_urls(words: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """`[OUT] URL...`: what looks like a URL is one. Raises UsageError."""
    urls = [normalise(word) for word in words if "://" in word]
    places = [Path(word) for word in words if "://" not in word]
    if not urls or len(places) > 1:
        raise UsageError("Give [OUT] URL..., as in `headrace endpoints add out http://gpu3:30000`.")
    return (places[0] if places else None), urls


@contextmanager
def _runs(out: Path | None, redis_url: str | None) -> Iterator[tuple[redis.Redis, list[RunManifest]]]:
    """A connection, and the run in OUT or else all runs of that Redis. Raises UsageError if nothing goes on there."""
    run_id = existing_run(out)[1].run_id if out else None
    url = redis_of(out, redis_url)
    client = connect(url)
    try:
        with translated(url):
            runs = [run for run in runs_at(client) if run_id in (None, run.run_id)]
            if not runs:
                raise StorageError(f"Redis knows no run{f' of {out}' if out else ''} now.")
            yield client, runs
    finally:
        client.close()


def _facts(endpoint: EndpointNow, runs: list[str]) -> dict[str, Any]:
    return {
        "url": endpoint.url, "state": endpoint.state, "why": endpoint.why, "evidence": endpoint.evidence,
        "since": endpoint.open_since if endpoint.open_since is not None else -1, "in_flight": endpoint.requests,
        "kv_used_tokens": _known(endpoint.used_tokens), "kv_ours_tokens": endpoint.tokens,
        "kv_tokens": _known(endpoint.kv_tokens), "kv_budget_tokens": _known(_budget(endpoint)), "f": endpoint.f,
        "running": _known(endpoint.running), "waiting": _known(endpoint.waiting), "model": endpoint.model,
        "runs": runs,
    }  # fmt: skip


def _table(endpoints: list[EndpointNow]) -> str:
    rows = [("endpoint", "state", "in flight", "KV used", "KV budget", "f", "model")]
    for one in endpoints:
        rows.append((
            one.url, one.state, str(one.requests), _shown(one.used_tokens), _shown(_budget(one)), f"{one.f:.2f}",
            one.model,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, endpoint in zip(rows, [None, *endpoints], strict=True):
        cells = [cell.rjust(w) if 2 <= i <= 5 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]  # noqa: E501
        lines.append("  ".join(cells).rstrip())
        if endpoint is not None and endpoint.evidence:
            lines.append(f"  {endpoint.why} for {time.time() - endpoint.open_since:.0f} s: {endpoint.evidence}")
    return "\n".join(lines)


def _budget(endpoint: EndpointNow) -> int | None:
    return round(endpoint.f * endpoint.kv_tokens) if endpoint.kv_tokens else None


def _known(number: int | None) -> int:
    return -1 if number is None else number


def _shown(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"

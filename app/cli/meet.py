"""From a prepared run to one that may send: endpoints are waited for, learned about and compared, and Redis is told."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr

from app.cli.parity import compare
from app.cli.prepare import Prepared, render_options
from app.drift import drift, guarded, news, objection, requirements, unmet
from app.errors import RecipeChanged, UsageError
from app.manifest import CONTEXT_MARGIN_TOKENS, Limits, RunFile, RunManifest, read_run_file, write_run_file
from app.preflight import LOADING, PAUSED, survey
from app.rundir import RunDir
from app.settings import RunSettings
from app.sglang.tool_dump import tool_form
from app.sglang.wire import EndpointInfo
from app.store.breaker import Why, closing, opening
from app.store.connection import translated
from app.store.keys import RUNS, EndpointKeys, RunKeys
from app.store.scripts import call
from app.urls import endpoint_key

log = logging.getLogger(__name__)
_VOCABULARY_PADDING = 1024


def meet_endpoints(
    prepared: Prepared, client: redis.Redis, redis_url: str, api_key: SecretStr | None, say
) -> tuple[Prepared, RunManifest]:
    """Wait for endpoints, learn what they are, and tell Redis about run and endpoints. Raises as `survey` does, and
    UsageError where an endpoint's own prompts are not ours."""
    settings = prepared.settings
    sampling = prepared.run_file.recipe.sampling
    found = survey(
        prepared.urls, sampling, api_key=api_key, vocab_size=padded(prepared.vocab_size),
        wait_seconds=math.inf if prepared.run_file.servers else settings.endpoint_wait_seconds, say=say,
    )  # fmt: skip
    run_file = _guard_model(prepared, found, say)
    if not prepared.run_file.servers:
        run_file = _with_tools_of(run_file, found)
    run_file = run_file.model_copy(update={"parity": _parity(prepared, run_file, found, api_key, say)})
    write_run_file(prepared.rundir.run_json, run_file)
    prepared = replace(prepared, run_file=run_file)
    infos = {url: info for url, info in found.items() if isinstance(info, EndpointInfo)}
    model_vocab = max((n for n in map(model_vocabulary, infos.values()) if n), default=None)
    manifest = RunManifest(
        run_id=run_file.run_id, recipe=run_file.recipe_fingerprint, sampling=sampling, endpoints=prepared.urls,
        vocab_size=min(prepared.vocab_size, model_vocab or prepared.vocab_size),
        output_vocab_size=model_vocab or padded(prepared.vocab_size),
        server=_guard(run_file, settings), required=run_file.required,
        limits={url: Limits(context_tokens=i.usable_context, prompt_tokens=i.max_req_input_len)
                for url, i in infos.items()},
        concurrency=settings.concurrency, short_concurrency=settings.short_concurrency,
        long_concurrency=settings.long_concurrency, requests_per_minute=settings.requests_per_minute,
        request_timeout_seconds=settings.request_timeout_seconds, stage_tokens=settings.stage_tokens,
        stop_ids=prepared.stop_ids,
    )  # fmt: skip
    small = {url: info for url, info in infos.items() if small_pool(info)}
    if small:
        smallest = min(small, key=lambda url: small[url].usable_context)
        others = f"; likewise {len(small) - 1} more" if len(small) > 1 else ""
        say(f"{smallest}: {small_pool(small[smallest])}{others}")
    room = manifest.output_room(1)
    if room is not None and room < settings.max_new_tokens and not settings.fit_output:
        raise UsageError(
            f"--max-new-tokens {settings.max_new_tokens} leaves no endpoint room for a prompt (at most {room} with one "
            "token); lower it, or give --fit-output."
        )
    with translated(redis_url):
        _tell_redis(client, manifest, found)
    return prepared, manifest


def _with_tools_of(run_file: RunFile, found: dict[str, EndpointInfo | str]) -> RunFile:
    """The recipe with tools in the form of the first server's version; of a run that has sent nothing yet."""
    form = tool_form(next(info.version for info in found.values() if isinstance(info, EndpointInfo)))
    recipe = run_file.recipe.model_copy(update={"rendering": run_file.recipe.rendering | {"tools": form}})
    return run_file.model_copy(update={"recipe": recipe, "recipe_fingerprint": recipe.fingerprint})


def _parity(prepared: Prepared, run_file: RunFile, found: dict, api_key: SecretStr | None, say) -> dict[str, Any]:
    if prepared.settings.skip_parity:
        say("--skip-parity: nobody compares our prompt ids with the servers' own")
        return {"skipped": True}
    options = render_options(prepared.settings, run_file.recipe.rendering)
    versions = {url: info.version for url, info in found.items() if isinstance(info, EndpointInfo)}
    return compare(prepared.settings, prepared.datasets, options, versions, api_key, say)


def _tell_redis(client: redis.Redis, manifest: RunManifest, found: dict) -> None:
    keys = RunKeys(manifest.run_id)
    client.set(keys.manifest, manifest.model_dump_json())
    client.sadd(RUNS, manifest.run_id)
    client.delete(keys.halt, keys.refusals)
    for url, info in found.items():
        differs = None if isinstance(info, str) else objection(manifest.server, manifest.required, info.identity)
        if trouble := info if isinstance(info, str) else differs:
            known = {LOADING: Why.UNAVAILABLE, PAUSED: Why.PAUSED, differs: Why.DIFFERS}
            why = known.get(trouble, Why.DIED)
            call(client, *opening(url, why, trouble))
            log.warning("endpoint_open %s: %s", url, trouble)
        else:
            call(client, *closing(url))


def _guard_model(prepared: Prepared, found: dict[str, EndpointInfo | str], say) -> RunFile:
    """One run never mixes models: the first one seen is the run's. Raises RecipeChanged if no endpoint serves it."""
    run_file, settings = prepared.run_file, prepared.settings
    required = requirements(settings.require)
    infos = [info for info in found.values() if isinstance(info, EndpointInfo)]
    fit = [info for info in infos if unmet(required, info.identity) is None]
    if not fit:
        raise RecipeChanged(
            f"No endpoint has what the run requires: {infos[0].url}: {unmet(required, infos[0].identity)}. "
            "Start a server that has it, or change --require."
        )
    run_file = run_file.model_copy(
        update={
            "server": run_file.server or guarded(fit[0].identity), "required": required,
            "accepted_drift": list(dict.fromkeys([*run_file.accepted_drift, *settings.allow_drift])),
        }
    )  # fmt: skip
    server = _guard(run_file, settings)
    usable = [info for info in fit if drift(server, guarded(info.identity)) is None]
    if not usable:
        raise RecipeChanged(
            f"{fit[0].url} serves something else than {settings.out} was started with: "
            f"{drift(server, guarded(fit[0].identity))}. Start the same server again, use another --out, or accept the "
            "difference with --allow-drift FIELD."
        )
    return _with_servers(run_file, usable, say)


def _guard(run_file: RunFile, settings: RunSettings) -> dict[str, Any]:
    """What must be the same at every endpoint: as the run began, without what --allow-drift accepts."""
    return {name: value for name, value in run_file.server.items() if name not in settings.allow_drift}


def record_servers(rundir: RunDir, client: redis.Redis, manifest: RunManifest, say) -> None:
    """Servers that workers met since the start (one was away then, or came back as another version) into run.json."""
    run_file = read_run_file(rundir.run_json)
    told = [client.get(EndpointKeys(endpoint_key(url)).info) for url in manifest.endpoints]
    infos = [EndpointInfo(**json.loads(data)) for data in told if data]
    met = [info for info in infos if objection(manifest.server, manifest.required, info.identity) is None]
    if any(info.fingerprint not in run_file.servers for info in met):
        write_run_file(rundir.run_json, _with_servers(run_file, met, say))


def _with_servers(run_file: RunFile, met: list[EndpointInfo], say) -> RunFile:
    """A run that knows these servers, too; how one differs from its first is told once."""
    servers = dict(run_file.servers)
    for info in met:
        if info.fingerprint not in servers:
            servers[info.fingerprint] = info.identity
            if change := news(next(iter(servers.values())), info.identity):
                say(f"{info.url} is not quite the run's first server, and is used: {change} (run.json has both)")
    return run_file.model_copy(update={"servers": servers})


def model_vocabulary(info: EndpointInfo) -> int | None:
    """The model's vocabulary, where its folder can be read from here."""
    try:
        config = json.loads((Path(info.model or "") / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def small_pool(info: EndpointInfo) -> str | None:
    """What a KV pool smaller than the context means for rows, in a sentence; None: it is large enough, or not told."""
    context, usable = info.context_length, info.usable_context
    if context is None or usable == context - info.reserved_tokens:
        return None
    return (
        f"its KV pool ({info.max_total_num_tokens:,} tokens) is smaller than its context ({context:,}); it would cut "
        f"answers short without a word, so rows that need more than {usable - CONTEXT_MARGIN_TOKENS:,} tokens (prompt "
        "and --max-new-tokens) are not sent there: too_long if nobody has room, unless --fit-output"
    )


def padded(vocab_size: int) -> int:
    """Models pad their vocabulary beyond what the tokenizer can make; a multiple of 1,024 covers those we know."""
    return -(-vocab_size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING

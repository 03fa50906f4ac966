"""From settings to a run that can start: everything that can be wrong is found here, before anything is enqueued.

Order: cheap and certain first. Input files, output directory, recipe; then Redis; then endpoints.
"""

import importlib.metadata
import json
import logging
import math
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr

import app
from app.cli.parity import compare
from app.cli.talk import say
from app.drift import allowed, drift, guarded, news, objection, requirements, unmet
from app.errors import RecipeChanged, StorageError, UsageError
from app.jsonl import first_and_last
from app.manifest import (
    CONTEXT_MARGIN_TOKENS,
    InputFile,
    Limits,
    Recipe,
    RunFile,
    RunManifest,
    read_run_file,
    refuse_other_recipe,
    write_run_file,
)
from app.offline.switch import finish_switch
from app.preflight import LOADING, PAUSED, survey
from app.rundir import RAW, RunDir
from app.samples import SampleFilters
from app.settings import RunSettings, save_settings
from app.sglang.sampling import refuse_stages, sampling_body
from app.sglang.tool_dump import tool_form
from app.sglang.wire import EndpointInfo
from app.store.breaker import Why, closing, opening
from app.store.connection import connect, translated
from app.store.keys import RUNS, EndpointKeys, RunKeys
from app.store.scripts import call
from app.tokenization import Renderer, RenderOptions
from app.urls import endpoint_key, normalise
from producers.inputs import Dataset, describe, parse_inputs, with_digest
from producers.trial import refuse_useless_template

log = logging.getLogger(__name__)
_VOCABULARY_PADDING = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose settings, input and recipe are sound."""

    settings: RunSettings
    rundir: RunDir
    datasets: list[Dataset]
    urls: list[str]
    run_file: RunFile
    vocab_size: int
    stop_ids: list[int]  #: at which the model ends an answer, as the tokenizer's folder and the recipe say


def check_cheaply(settings: RunSettings) -> None:
    """What needs no tokenizer and no directory of ours. Raises UsageError."""
    body = sampling_body(_sampling_options(settings))  # again later, when the vocabulary is known
    if settings.stage_tokens is not None:
        refuse_stages(body)
    for url in settings.endpoints:
        normalise(url)
    if settings.redis is not None:
        connect(settings.redis).close()  # connects at its first command, not here
    parse_inputs(settings.inputs)
    requirements(settings.require)
    allowed(settings.allow_drift)


def prepare(settings: RunSettings) -> Prepared:
    """Check input, directory and recipe; make or resume run.json. Raises UsageError, RecipeChanged, StorageError."""
    datasets = parse_inputs(settings.inputs)
    urls = list(dict.fromkeys(normalise(url) for url in settings.endpoints))
    rundir = make_directory(settings.out)
    finish_switch(rundir)
    before = _begun(rundir, datasets)
    files = describe(datasets, [f for f in (before.datasets if before else []) if f.sha256])
    settings = _of_the_same_commit(settings, before)
    renderer = Renderer(render_options(settings, pinned(before)))
    settings = settings.model_copy(update={"tokenizer": renderer.pinned_name})
    vocab_size = settings.vocab_size or min(renderer.vocab_size, renderer.model_vocab_size or renderer.vocab_size)
    recipe = recipe_of(settings, renderer, vocab_size)
    if before is not None:
        refuse_other_recipe(before, recipe, settings.out)
        refuse_foreign_lines(rundir, before)
    else:
        refuse_useless_template(datasets, settings, renderer)
    run_file = (before or _new_run(recipe)).model_copy(
        update={
            "tokenizer": settings.tokenizer,
            "datasets": _merge(before.datasets if before else [], files), "samples": settings.samples,
            "filters": _filters_in_force(before, filters_of(settings, renderer), settings.out).to_json(),
        }
    )  # fmt: skip
    write_run_file(rundir.run_json, run_file)
    inputs = [f"{one.name}={path.absolute()}" for one in datasets for path in one.paths]
    save_settings(rundir.private / "settings.json", settings.model_copy(update={"inputs": inputs}))
    return Prepared(settings, rundir, datasets, urls, run_file, vocab_size, _stop_ids(recipe, renderer))


def _stop_ids(recipe: Recipe, renderer: Renderer) -> list[int]:
    given = recipe.sampling["stop_token_ids"] or []
    return [] if recipe.sampling["ignore_eos"] else sorted({*renderer.eos_token_ids, *given})


def filters_of(settings: RunSettings, renderer: Renderer) -> SampleFilters:
    """Which completions become no sample, from the run's settings and the tokenizer's way to write its reasoning."""
    return SampleFilters(
        max_sample_tokens=settings.max_sample_tokens, truncated=settings.truncated,
        unclosed_thinking=settings.unclosed_thinking, max_repeat=settings.max_repeat,
        think_open_ids=tuple(renderer.encode("<think>")), think_close_ids=tuple(renderer.encode("</think>")),
    )  # fmt: skip


def _filters_in_force(before: RunFile | None, given: SampleFilters, out: Path) -> SampleFilters:
    """All samples of a run pass the same filters: those on file stay until `headrace tokenize` changes them."""
    if before is None or not before.filters:
        return given
    in_force = SampleFilters.from_json(before.filters)
    if changes := in_force.differences(given):
        say(
            f"the samples in {out} were made with other filters ({', '.join(changes)}); theirs stay in force. "
            f"To change all of them: headrace tokenize {out} --help"
        )
    return in_force


def record_digests(rundir: RunDir) -> None:
    """Once the input was read to its end: its sha256 into run.json, for files that are still what they were."""
    run_file = read_run_file(rundir.run_json)
    if run_file is None or all(file.sha256 for file in run_file.datasets):
        return
    hashed = []
    for file in run_file.datasets:
        path = Path(file.path)
        same = not file.sha256 and path.is_file() and path.stat().st_size == file.size_bytes
        hashed.append(with_digest(file) if same else file)
    write_run_file(rundir.run_json, run_file.model_copy(update={"datasets": hashed}))


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


def make_directory(out: Path) -> RunDir:
    """Make the output directory. Raises UsageError if something else stands there, StorageError if it can't be made."""
    rundir = RunDir(out.absolute())
    if out.is_file():
        raise UsageError(f"--out {out} is a file; give a directory.")
    if rundir.private.exists() and not rundir.private.is_dir():
        raise UsageError(f"{rundir.private} is no directory of ours; move it away, or choose another --out.")
    try:
        rundir.logs.mkdir(parents=True, exist_ok=True)
        probe = rundir.private / "writable"
        probe.write_bytes(b"")
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--out {out} lies below a file; give a directory.") from None
    except ValueError as exc:
        raise UsageError(f"--out {str(out)!r} is no path: {exc}.") from exc
    except OSError as exc:
        raise StorageError(f"Cannot write in --out {out}: {exc.strerror}.") from exc
    return rundir


@contextmanager
def gone_if_refused(rundir: RunDir, *, new: bool) -> Iterator[None]:
    """A start that is refused before there is a run leaves no directory behind that was not there. Under its lock."""
    try:
        yield
    except UsageError:
        if new and not rundir.run_json.exists():
            shutil.rmtree(rundir.out, ignore_errors=True)
        raise


def _begun(rundir: RunDir, datasets: list[Dataset]) -> RunFile | None:
    """The run in the directory. None if it never met an endpoint: then nothing was sent, and its recipe may change.

    Raises UsageError for what stands where our files go and is not known to be this run's.
    """
    before = read_run_file(rundir.run_json)
    if before is not None:
        return before if before.servers or rundir.datasets_on_disk() else None
    if strange := sorted({dataset.name for dataset in datasets} & set(rundir.datasets_on_disk())):
        raise UsageError(
            f"{rundir.out / strange[0]} holds results, but {rundir.run_json} is missing, so nobody knows their recipe; "
            "put it back, or choose another --out."
        )
    for folder in (rundir.out / dataset.name for dataset in datasets):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, and a dataset of that name needs a folder; choose another --out.")
    return None


def refuse_foreign_lines(rundir: RunDir, run_file: RunFile) -> None:
    """A raw file of another run in place of ours would count as done. Raises UsageError that names it."""
    for dataset in rundir.datasets_on_disk():
        path = rundir.file(dataset, RAW)
        if any(record.get("recipe") != run_file.recipe_fingerprint for record in first_and_last(path)):
            raise UsageError(
                f"{path} holds answers of another run (another recipe than {rundir.run_json.name} says); "
                "put this run's file back, or move the other one away."
            )


def _of_the_same_commit(settings: RunSettings, before: RunFile | None) -> RunSettings:
    """A name on the hub means the commit that the run was begun with, whatever the hub has by now."""
    same = before is not None and before.tokenizer.startswith(f"{settings.tokenizer}@")
    return settings.model_copy(update={"tokenizer": before.tokenizer}) if same else settings


def pinned(before: RunFile | None) -> dict[str, Any]:
    """What a run's first start decides about its prompts, for all later ones: the day that templates print, and the
    form that they get tools in (of the first server's version; as given, until there was one)."""
    rendering = before.recipe.rendering if before else {}
    return {"date": rendering.get("date") or datetime.now(UTC).date().isoformat(),
            "tools": rendering.get("tools") or "given"}  # fmt: skip


def render_options(
    settings: RunSettings, rendering: dict[str, Any] | None, vocab_size: int | None = None
) -> RenderOptions:
    """How conversations become ids, from the run's settings. rendering: of the recipe, or `pinned`; None: of no run."""
    rendering = rendering or {}
    return RenderOptions(
        tokenizer=settings.tokenizer, trust_remote_code=settings.trust_remote_code,
        chat_template=str(settings.chat_template) if settings.chat_template else None,
        template_kwargs=settings.template_kwargs, date=rendering.get("date"), model_vocab_size=vocab_size,
        tool_form=rendering.get("tools") or "given",
    )  # fmt: skip


def recipe_of(settings: RunSettings, renderer: Renderer, vocab_size: int) -> Recipe:
    """All that we decide about the answer."""
    rendering = {
        "turns": settings.turns, "prefill": settings.prefill, "system": settings.system,
        "prompt_field": settings.prompt_field, "messages_field": settings.messages_field,
        "fit_output": settings.fit_output,
        "date": renderer.options.date if renderer.is_dated else None, "tools": renderer.options.tool_form,
    }  # fmt: skip
    sampling = sampling_body(_sampling_options(settings), vocab_size=vocab_size)
    return Recipe(tokenizer=renderer.fingerprint(), rendering=rendering, sampling=sampling)


def _sampling_options(settings: RunSettings) -> dict[str, Any]:
    return {
        "max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature, "top_p": settings.top_p,
        "top_k": settings.top_k, **settings.sampling,
    }  # fmt: skip


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


def _new_run(recipe: Recipe) -> RunFile:
    packages = ("transformers", "tokenizers", "celery", "redis")
    return RunFile(
        run_id=uuid.uuid4().hex[:12], created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        headrace=app.__version__, recipe=recipe, recipe_fingerprint=recipe.fingerprint,
        versions={name: importlib.metadata.version(name) for name in packages},
    )  # fmt: skip


def _merge(before: list[InputFile], now: list[InputFile]) -> list[InputFile]:
    """Files of earlier starts stay listed; the same path is listed as it is now."""
    current = {(file.dataset, file.path) for file in now}
    return [file for file in before if (file.dataset, file.path) not in current] + now


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

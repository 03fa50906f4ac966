"""From settings to a run that can start: everything that can be wrong is found before anything is enqueued.

Order: cheap and certain first. Input files, output directory, recipe; then Redis; then endpoints (app/cli/meet.py).
"""

import importlib.metadata
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import app
from app.cli.talk import say
from app.drift import allowed, requirements
from app.errors import StorageError, UsageError
from app.jsonl import first_and_last
from app.manifest import InputFile, Recipe, RunFile, read_run_file, refuse_other_recipe, write_run_file
from app.offline.switch import finish_switch
from app.rundir import RAW, RunDir
from app.samples import SampleFilters
from app.settings import RunSettings, save_settings
from app.sglang.sampling import refuse_stages, sampling_body
from app.store.connection import connect
from app.tokenization import Renderer, RenderOptions
from app.urls import normalise
from producers.inputs import Dataset, describe, parse_inputs, with_digest
from producers.trial import refuse_useless_template


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

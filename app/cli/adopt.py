"""`headrace adopt`: another script's answers, proven and taken into a run."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click

from app.cli.meet import padded
from app.cli.prepare import pinned, prepare, recipe_of, render_options
from app.cli.run import checked
from app.errors import OK, SOME_REJECTED, UsageError
from app.identity import fingerprint
from app.ledger import Ledger
from app.manifest import Recipe, RunFile, read_run_file, refuse_other_recipe, write_run_file
from app.offline.switch import alone, finish_switch
from app.rundir import RunDir
from app.samples import SampleFilters
from app.settings import RunSettings, load_settings
from app.sglang.tool_dump import ToolForm
from app.tokenization import Renderer
from producers.adopt.foreign import find_files, with_map
from producers.adopt.proof import Terms
from producers.adopt.story import THERE, TRUSTED, Claim, Outcome, Sink, take_in
from producers.adopt.taken import Taker
from producers.inputs import parse_inputs

_NO_ENDPOINT = "http://127.0.0.1:9"  # settings name one; the next `run` gives its own


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says beside the run's settings."""

    directory: Path
    fields: tuple[str, ...]
    model: str
    report: Path | None
    dry_run: bool
    as_json: bool


def adopt_command(out: Path, inputs: tuple[str, ...], given: dict[str, Any], wanted: Wanted) -> int:
    """`headrace adopt OUT DIR [NAME=DATA...]`."""
    rundir = RunDir(out.absolute())
    names = with_map(wanted.fields)
    if wanted.dry_run:
        settings = _settings(rundir, inputs, given)
        outcome = _look(rundir, settings, names, wanted)
    else:
        finish_switch(rundir)
        with alone(rundir, "adopting answers"):
            settings = _settings(rundir, inputs, given)
            outcome = _adopt(rundir, settings, names, wanted)
    if wanted.as_json:
        click.echo(json.dumps(outcome.to_json(), ensure_ascii=False))
    else:
        click.echo(_render(outcome, wanted), nl=False)
    return SOME_REJECTED if outcome.doubtful else OK


def _settings(rundir: RunDir, inputs: tuple[str, ...], given: dict[str, Any]) -> RunSettings:
    """Settings of the run as saved, with what the command line says put over them."""
    saved = rundir.private / "settings.json"
    run_file = read_run_file(rundir.run_json)
    values = load_settings(saved).model_dump() if saved.exists() else {"endpoints": [_NO_ENDPOINT]}
    for name in ("sampling", "template_kwargs"):
        values[name] = json.dumps(values.get(name) or {})
    values |= {name: value for name, value in given.items() if value is not None} | {"out": rundir.out}
    if inputs:
        values["inputs"] = list(inputs)
    elif run_file is not None:
        values["inputs"] = [f"{file.dataset}={file.path}" for file in run_file.datasets]
    if not values.get("inputs"):
        raise UsageError("Name the input (NAME=DATA...): answers are proven against the prompts that it makes.")
    if values.get("turns") == "all":
        raise UsageError(
            f"adopt knows one answer a row, and {rundir.out} was started with --turns all: name another OUT for these "
            "answers (a run with --turns last), or let `headrace run` generate all of this one."
        )
    if not values.get("tokenizer"):
        raise UsageError("Give --tokenizer DIR: answers are proven against the prompts that it makes.")
    return checked(values)


def _look(rundir: RunDir, settings: RunSettings, names: dict, wanted: Wanted) -> Outcome:
    """The verdict alone; nothing is written but the report that was asked for."""
    run_file = read_run_file(rundir.run_json)
    renderer, recipe, vocab_size = _recipe(settings, run_file)
    if run_file is not None:
        refuse_other_recipe(run_file, recipe, settings.out)
    claim = _claim(settings, names, wanted, run_file, renderer, recipe, vocab_size)
    with _copy_of_ledger(rundir) as ledger:
        return take_in(claim, renderer, ledger, wanted.report, None)


def _adopt(rundir: RunDir, settings: RunSettings, names: dict, wanted: Wanted) -> Outcome:
    run_file = prepare(settings).run_file
    renderer, recipe, vocab_size = _recipe(settings, run_file)
    claim = _claim(settings, names, wanted, run_file, renderer, recipe, vocab_size)
    run_file = run_file.model_copy(update={"servers": run_file.servers | {claim.taker.server: _origin(wanted)}})
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        filters = SampleFilters.from_json(run_file.filters)
        # A run that has nothing of them is not begun: its first server still decides how tools are written.
        sink = Sink(rundir, ledger, filters, claim.taker.at, lambda: write_run_file(rundir.run_json, run_file))
        report = wanted.report or rundir.out / "adopt_report.jsonl"
        outcome = take_in(claim, renderer, ledger, report, sink)
    if outcome.verdicts[TRUSTED] and outcome.model and not run_file.server:  # from now on the run is that model's
        write_run_file(rundir.run_json, run_file.model_copy(update={"server": {"model": outcome.model}}))
    return outcome


def _origin(wanted: Wanted) -> dict[str, str]:
    return {"adopted_from": str(wanted.directory.absolute())}


def _recipe(settings: RunSettings, run_file: RunFile | None) -> tuple[Renderer, Recipe, int]:
    renderer = Renderer(render_options(settings, pinned(run_file)))
    vocab_size = settings.vocab_size or min(renderer.vocab_size, renderer.model_vocab_size or renderer.vocab_size)
    return renderer, recipe_of(settings, renderer, vocab_size), vocab_size


def _claim(
    settings: RunSettings, names: dict, wanted: Wanted, run_file: RunFile | None, renderer: Renderer, recipe: Recipe,
    vocab_size: int,
) -> Claim:  # fmt: skip
    datasets = parse_inputs(settings.inputs)
    stops = {*renderer.eos_token_ids, *(recipe.sampling.get("stop_token_ids") or ())}
    terms = Terms(recipe.sampling, renderer.model_vocab_size or padded(vocab_size), frozenset(stops), _as_good(recipe))
    model = wanted.model or (run_file.server.get("model", "") if run_file else "")
    files = find_files(wanted.directory, datasets)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    taker = Taker(recipe.fingerprint, recipe.sampling["max_new_tokens"], fingerprint(_origin(wanted)), at)
    return Claim(files, names, datasets, settings, terms, taker, model)


def _as_good(recipe: Recipe) -> list[str]:
    """Fingerprints of our recipe, ours first, and of it with tools in each form that a server's version may have
    decided: whether a prompt is ours is proven by its ids."""
    renderings = [recipe.rendering, *(recipe.rendering | {"tools": form} for form in get_args(ToolForm))]
    return [recipe.model_copy(update={"rendering": one}).fingerprint for one in renderings]


@contextmanager
def _copy_of_ledger(rundir: RunDir) -> Iterator[Ledger]:
    """A ledger of the run's files on temporary disk: looking changes nothing."""
    with tempfile.TemporaryDirectory(prefix="headrace-adopt-") as folder:
        with Ledger.open(rundir, Path(folder) / "ledger.sqlite") as ledger:
            ledger.catch_up()
            yield ledger


def _render(outcome: Outcome, wanted: Wanted) -> str:
    title = f"{'file':<44}{'dataset':<16}{'lines':>10}{'trusted':>10}"
    lines = [f"{wanted.directory}: {len(outcome.files)} files", "", title]
    for one in outcome.files:
        name = str(one.path.relative_to(wanted.directory))
        trusted = f"{one.verdicts.get(TRUSTED, 0):,}" if one.is_read else "not read"
        lines.append(f"{name[-43:]:<44}{one.dataset or '?':<16}{one.lines:>10,}{trusted:>10}")
    lines += ["", f"{outcome.verdicts[TRUSTED]:,} lines are trusted, {outcome.doubtful:,} are not"]
    lines += [f"  {word:<28}{n:>10,}" for word, n in sorted(outcome.verdicts.items()) if word != TRUSTED]
    if outcome.verdicts[THERE]:
        lines.append("  (already_there: the run has an answer of its own for these)")
    state = "would have" if wanted.dry_run else "has"
    lines.append(
        f"Of {outcome.wanted:,} completions of {outcome.rows:,} rows the run {state} {outcome.there:,}; "
        f"{outcome.wanted - outcome.there:,} are left to generate."
    )
    return "\n".join(lines) + "\n"




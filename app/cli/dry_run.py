"""`run --dry-run`: what would be sent, without sending anything or asking any server. Nothing is written."""

from collections.abc import Iterable
from typing import Any

from app.cli.doctor import BYTES_PER_TOKEN
from app.cli.prepare import check_cheaply, render_options
from app.cli.talk import say, show
from app.errors import OK
from app.lanes import expected_output_tokens
from app.manifest import read_run_file
from app.rundir import RunDir
from app.settings import RunSettings
from app.tokenization import Renderer
from producers.inputs import parse_inputs
from producers.measure import SAMPLE_ROWS, Measured, measure
from producers.trial import refuse_useless_template

_TITLES = ("rows", "to send", "done", "mean", "longest", "all", "disk GB")
_WIDTHS = (10, 10, 10, 7, 8, 10, 8)


def dry_run(settings: RunSettings) -> int:
    """Rows, tokens and disk of each dataset, as a table. Raises UsageError as a run would."""
    check_cheaply(settings)
    datasets, renderer = parse_inputs(settings.inputs), Renderer(render_options(settings, None))
    refuse_useless_template(datasets, settings, renderer)
    found = measure(datasets, settings, renderer)
    done = _done(settings)
    answer = expected_output_tokens(settings.max_new_tokens)
    plans = [_plan(one, settings, done.get(one.dataset, 0), answer) for one in found]
    show(_table(plans))
    say(
        f"nothing was sent. Prompts are measured on the first {SAMPLE_ROWS:,} rows of each dataset, answers assumed to "
        f"have {answer:,} tokens; `headrace plan` estimates the time"
    )
    return OK


def _plan(one: Measured, settings: RunSettings, done: int, answer: int) -> dict[str, Any]:
    wanted = one.runnable * settings.samples
    sent = max(0, wanted - done)
    return {
        "dataset": one.dataset, "rows": one.rows, "would_be_sent": sent, "done": done,
        "refused_of_sample": dict(sorted(one.refused.items())), "sampled": one.sampled,
        "mean_prompt_tokens": round(one.mean, 1), "prompt_tokens": round(sent * one.mean),
        "longest_prompt_tokens": max(one.prompt_tokens, default=0),
        "disk_bytes": round(sent * (one.mean + answer) * BYTES_PER_TOKEN),
    }  # fmt: skip


def _done(settings: RunSettings) -> dict[str, int]:
    """Completions per dataset that the directory already has (rejected ones too)."""
    rundir = RunDir(settings.out.absolute())
    run_file = read_run_file(rundir.run_json)
    if run_file is None:
        return {}
    from app.cli.watching import inventory_of

    return {one["dataset"]: one["generated"] for one in inventory_of(rundir, run_file, settings.redis)["datasets"]}


def _table(plans: list[dict[str, Any]]) -> str:
    lines = [f"{'':<47}{'prompts, in tokens':>24}", _line("", _TITLES)]
    for one in plans:
        cells = (one["rows"], one["would_be_sent"], one["done"], round(one["mean_prompt_tokens"]),
                 one["longest_prompt_tokens"], one["prompt_tokens"])  # fmt: skip
        numbers = (*(f"{cell:,}" for cell in cells), f"{one['disk_bytes'] / 1e9:,.2f}")
        lines.append(_line(one["dataset"], numbers))
        for reason, count in one["refused_of_sample"].items():
            lines.append(f"  {count:,} of {one['sampled']:,} sampled rows would be rejected: {reason}")
    return "\n".join(lines)


def _line(name: str, cells: Iterable[str]) -> str:
    """80 columns."""
    name = name if len(name) <= 17 else name[:16] + "…"
    return f"{name:<17}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))

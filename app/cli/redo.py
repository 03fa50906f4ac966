"""`headrace tokenize` and `headrace retry`: changes of a run's files that need no server."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from app.cli.inspect import existing_run
from app.errors import OK, UsageError
from app.manifest import RunFile
from app.reasons import Reason
from app.rundir import RunDir
from app.samples import SampleFilters


def tokenize_command(out: Path, given: dict[str, Any], tokenizer: str | None, as_json: bool) -> int:
    """`headrace tokenize OUT`. given: filters that were named; the others stay as they are."""
    from app.manifest import read_run_file
    from app.offline.redo import redo
    from app.offline.switch import alone
    from app.offline.torn import mend_run

    rundir, _ = existing_run(out)
    with alone(rundir, "deriving its samples again"):
        run_file = read_run_file(rundir.run_json)
        mended = mend_run(rundir, run_file)
        before = SampleFilters.from_json(run_file.filters)
        filters = _with_thinking(replace(before, **given), rundir, tokenizer)
        done = redo(rundir, run_file, filters)
    if str(mended):
        click.echo(str(mended), err=True)
    if as_json:
        said = {"out": str(rundir.out), "filters": filters.to_json(), "datasets": [one.to_json() for one in done],
                "chats": asdict(mended)}  # fmt: skip
        click.echo(json.dumps(said, ensure_ascii=False))
        return OK
    for change in before.differences(filters):
        click.echo(change)
    for one in done:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(one.rejected.items()))
        damaged = f"; {one.unreadable:,} damaged lines left out" if one.unreadable else ""
        damaged += f", and {one.turns_apart:,} lines of the same chats with them" if one.turns_apart else ""
        damaged += f"; {one.doubled:,} lines that stand there twice taken once" if one.doubled else ""
        damaged += f"; {one.gone:,} samples had no raw line: gone, the next run makes them again" if one.gone else ""
        click.echo(
            f"{one.dataset}: {one.responses:,} responses → {one.samples:,} samples, "
            f"{one.rejected.total():,} rejected{f' ({reasons})' if reasons else ''}{damaged}"
        )
    return OK


def _with_thinking(filters: SampleFilters, rundir: RunDir, tokenizer: str | None) -> SampleFilters:
    """The filters, with the ids of `<think>` and `</think>` where they are needed and not known yet."""
    if tokenizer is None and (filters.think_close_ids or filters.unclosed_thinking == "keep"):
        return filters
    from app.cli.offline_renderer import renderer_of

    renderer = renderer_of(rundir, tokenizer)
    return replace(
        filters, think_open_ids=tuple(renderer.encode("<think>")), think_close_ids=tuple(renderer.encode("</think>"))
    )


def retry_command(out: Path, reason: str, max_new_tokens: int | None, as_json: bool) -> int:
    """`headrace retry OUT --reason R`."""
    from app.manifest import read_run_file
    from app.offline.retry import Retry, retry
    from app.offline.switch import alone

    rundir, _ = existing_run(out)
    with alone(rundir, "making rows pending again"):
        run_file = read_run_file(rundir.run_json)
        _check_allowance(max_new_tokens, run_file)
        counts = retry(rundir, run_file, Retry(Reason(reason), max_new_tokens))
    total = sum(counts.values())
    if as_json:
        click.echo(json.dumps({"out": str(rundir.out), "reason": reason, "pending_again": counts, "total": total}))
        return OK
    if not total:
        click.echo(f"{out}: nothing in it is {reason}.")
        return OK
    for dataset, count in counts.items():
        if count:
            click.echo(f"{dataset}: {count:,} pending again")
    allowance = f", with --max-new-tokens {max_new_tokens} for these alone" if max_new_tokens else ""
    click.echo(f"The run's own command, unchanged, generates them{allowance}.", err=True)
    return OK


def _check_allowance(max_new_tokens: int | None, run_file: RunFile) -> None:
    least = max(1, int(run_file.recipe.sampling.get("min_new_tokens") or 0))
    if max_new_tokens is not None and max_new_tokens < least:
        raise UsageError(f"--max-new-tokens {max_new_tokens} is below {least}, the least that answers here have.")

"""`headrace audit`: lengths, endings, losses and differences of a run, for people and as JSON."""

import json
from pathlib import Path

import click

from app.cli.inspect import existing_run
from app.cli.offline_renderer import renderer_of
from app.errors import OK
from app.offline.audit import Audit, DatasetAudit, audit

_TOKENIZER_NEEDED = "not looked at: needs --tokenizer"


def audit_command(out: Path, tokenizer: str | None, plot_to: Path | None, as_json: bool) -> int:
    """`headrace audit OUT`."""
    rundir, run_file = existing_run(out)
    made = audit(rundir, run_file, renderer_of(rundir, tokenizer) if tokenizer else None)
    if plot_to is not None:
        from app.offline.plot import plot

        plot(made, plot_to)
        click.echo(f"The picture lies in {plot_to}.", err=True)
    if as_json:
        click.echo(json.dumps({"out": str(rundir.out), **made.to_json()}, ensure_ascii=False))
    else:
        click.echo(_render(made), nl=False)
    return OK


def _render(made: Audit) -> str:
    lines: list[str] = []
    for one in made.datasets:
        lines += [*_dataset(one), ""]
    lines.append(f"{'endpoint':<30}{'model':<18}{'version':<8}{'answers':>9}{'median':>8}{'cut':>7}")
    for (endpoint, model, _, version), group in sorted(made.groups.items()):
        n = group.output.counts.total()
        cut = _share(group.finish["length"], n)
        name = model.rstrip("/").rsplit("/", 1)[-1]
        median = group.output.percentile(50)
        lines.append(f"{endpoint[-29:]:<30}{name[-17:]:<18}{version[:7]:<8}{n:>9,}{median:>8,}{cut:>7}")
    return "\n".join(lines) + "\n"


def _dataset(one: DatasetAudit) -> list[str]:
    n = one.output.counts.total()
    titles = "".join(f"{title:>8}" for title in ("p10", "median", "p90", "p99", "max"))
    lines = [f"{one.dataset}: {n:,} answers", f"  {'tokens':<28}{'count':>9}{titles}"]
    lines.append(_lengths("prompts", one.prompt))
    lines.append(_lengths("answers, kept", one.kept))
    lines += [_lengths(f"answers, {reason}", lengths) for reason, lengths in sorted(one.lost.items())]
    lines += [f"  {reason + ' (no answer)':<28}{count:>9,}" for reason, count in sorted(one.unmeasured.items())]
    if one.lost:
        lines.append(f"  {_are_the_long_ones_missing(one)}")
    clipped = f" ({one.clipped:,} before their allowance)" if one.clipped else ""
    thinking = ", ".join(f"{one.thinking[word]:,} {word}" for word in ("closed", "unclosed", "none"))
    return [
        *lines,
        f"  ended by      {one.finish['stop']:,} stop, {one.finish['length']:,} length{clipped}",
        f"  repeated      {one.repeated_prompts:,} prompts, {one.repeated_outputs:,} answers",
        f"  reasoning     {thinking}",
        f"  control text  {_TOKENIZER_NEEDED if one.control_text is None else f'{one.control_text:,} prompts'}",
        f"  tool calls    {_calls(one)}",
        f"  decoding      {_decoding(one)}",
    ]


def _calls(one: DatasetAudit) -> str:
    if one.calls is None:
        return _TOKENIZER_NEEDED
    return f"{one.calls['well_formed']:,} well-formed, {one.calls['malformed']:,} malformed"


def _decoding(one: DatasetAudit) -> str:
    if one.decoding is None:
        return _TOKENIZER_NEEDED
    text, ids = (_share(one.decoding[what], one.decoding["checked"]) for what in ("same_text", "same_ids"))
    return f"text as stored {text}, same ids when encoded again {ids}"


def _lengths(name: str, lengths) -> str:
    cells = "".join(f"{lengths.percentile(percent):>8,}" for percent in (10, 50, 90, 99, 100))
    return f"  {name:<28}{lengths.counts.total():>9,}{cells}"


def _are_the_long_ones_missing(one: DatasetAudit) -> str:
    """The median answer that was lost against the median one that was kept."""
    lost = type(one.kept)()
    for lengths in one.lost.values():
        lost.counts.update(lengths.counts)
    kept, gone = one.kept.percentile(50), lost.percentile(50)
    if not kept:
        return "no answer was kept"
    word = "longer" if gone >= kept else "shorter"
    factor = max(gone, 1) / kept if gone >= kept else kept / max(gone, 1)
    return f"the median answer lost is {factor:.1f} times {word} than the median kept" if factor >= 1.1 else \
        "answers lost are about as long as those kept"  # fmt: skip


def _share(part: int, of: int) -> str:
    return f"{100 * part / of:.1f}%" if of else "–"

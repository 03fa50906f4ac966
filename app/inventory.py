"""The counts of a run, that must add up: rows = tokenized + rejected + pending. Pure.

The ledger counts what is on file, Redis what is under way; `inventory` makes of both the object that `status --json`
prints, `render_table` the text for people. What nobody knows is -1, never 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.ledger import DatasetCounts

UNKNOWN = -1
_COUNTS = ("rows", "generated", "tokenized", "rejected", "pending", "queued", "in_flight", "responses", "samples", "orphans")  # fmt: skip  # noqa: E501
_COLUMNS = ("rows", "tokenized", "rejected", "pending", "in flight")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What run.json and the locks say. state None: nobody works on the run."""

    out: str
    id: str
    recipe: str
    state: str | None = None  #: enqueueing | running | waiting | draining


@dataclass(frozen=True, slots=True)
class Live:
    """What Redis knows: completions by dataset, and how long the rest takes."""

    queued: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    seconds_left: float | None = None  #: None: not known yet


def inventory(run: RunFacts, counts: Iterable[DatasetCounts], live: Live | None = None) -> dict[str, Any]:
    """The object that `status --json` prints. live None: Redis is away or not asked."""
    datasets = [_dataset(one, live) for one in counts]
    totals = {name: _total(dataset[name] for dataset in datasets) for name in _COUNTS}
    totals["rejected_by_reason"] = _total_by_reason(datasets)
    rows_final = bool(datasets) and all(dataset["rows_final"] for dataset in datasets)
    complete = rows_final and totals["pending"] == 0
    if complete:  # then nothing can be under way, whoever is asked
        for counts in (totals, *datasets):
            counts |= {"queued": 0, "in_flight": 0}
    return {
        "run": {"out": run.out, "id": run.id, "recipe": run.recipe, "state": _state(run.state, complete, rows_final)},
        "datasets": datasets,
        "totals": totals,
        "eta_seconds": _eta_seconds(complete, live),
        "complete": complete,
    }


def _dataset(counts: DatasetCounts, live: Live | None) -> dict[str, Any]:
    return {
        "dataset": counts.dataset,
        "rows": counts.rows,
        "rows_final": counts.rows_final,
        "generated": counts.generated,
        "tokenized": counts.tokenized,
        "rejected": counts.rejected,
        "rejected_by_reason": dict(counts.rejected_by_reason),
        "pending": counts.pending,
        "queued": live.queued.get(counts.dataset, 0) if live else UNKNOWN,
        "in_flight": live.in_flight.get(counts.dataset, 0) if live else UNKNOWN,
        "responses": counts.responses,
        "samples": counts.samples,
        "orphans": counts.orphans,
    }


def _total(numbers: Iterable[int]) -> int:
    """The sum, unknown if any part is."""
    parts = list(numbers)
    return UNKNOWN if UNKNOWN in parts else sum(parts)


def _total_by_reason(datasets: list[dict[str, Any]]) -> dict[str, int]:
    reasons = sorted({reason for dataset in datasets for reason in dataset["rejected_by_reason"]})
    return {reason: sum(dataset["rejected_by_reason"].get(reason, 0) for dataset in datasets) for reason in reasons}


def _state(working: str | None, complete: bool, rows_final: bool) -> str:
    if complete:
        return "complete"
    if working == "running" and not rows_final:
        return "enqueueing"
    return working or "stopped"


def _eta_seconds(complete: bool, live: Live | None) -> int:
    if complete:
        return 0
    return UNKNOWN if live is None or live.seconds_left is None else round(live.seconds_left)


def render_table(shown: Mapping[str, Any]) -> str:
    """An inventory as plain text, 80 columns wide."""
    run, totals = shown["run"], shown["totals"]
    lines = [f"{run['out']}  ·  {run['state']}  ·  {eta_words(shown['eta_seconds'])}", ""]
    lines.append(_row("", _COLUMNS))
    lines += [_row(one["dataset"] + ("" if one["rows_final"] else " …"), _cells(one)) for one in shown["datasets"]]
    if len(shown["datasets"]) > 1:
        lines.append(_row("total", _cells(totals)))
    if totals["rejected_by_reason"]:
        lines += ["", "rejected"]
        lines += [f"  {reason:<28}{n:>13,}" for reason, n in totals["rejected_by_reason"].items()]
    if totals["orphans"]:
        lines += ["", f"{totals['orphans']:,} on file for rows that the input no longer has (orphans)"]
    if any(not one["rows_final"] for one in shown["datasets"]):
        lines += ["", "… the input has not been read to its end yet"]
    return "\n".join(lines) + "\n"


def _cells(counts: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_number(counts[column.replace(" ", "_")]) for column in _COLUMNS)


def _row(name: str, cells: Iterable[str]) -> str:
    name = name if len(name) <= 20 else name[:19] + "…"
    return f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells)


def _number(n: int) -> str:
    return "?" if n == UNKNOWN else f"{n:,}"


def eta_words(seconds: int) -> str:
    """For people."""
    if seconds == UNKNOWN:
        return "no estimate yet"
    if seconds == 0:
        return "nothing left to do"
    if seconds < 60:
        return "less than a minute left"
    hours, minutes = divmod(-(-seconds // 60), 60)
    return f"about {hours} h {minutes:02} min left" if hours else f"about {minutes} min left"

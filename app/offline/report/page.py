"""The HTML of a report: one file, no script, nothing from the network. Everything from data is escaped."""

import json
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

import app
from app.offline.report import charts
from app.offline.report.gather import Report

_MOST_EVENTS = 30
_PERCENTS = (10, 50, 90, 99, 100)


def page(report: Report) -> str:
    """The whole file."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("app.offline.report") / "page.html.jinja").read_text(encoding="utf-8"))
    events = _events(report)
    return template.render(
        title=Path(report.out).name, state=report.inventory["run"]["state"], version=app.__version__,
        made_at=_when(datetime.now().timestamp()), run=report.run_file, figures=_figures(report),  # noqa: DTZ005
        datasets=[_dataset(report, one) for one in report.inventory["datasets"]],
        course=charts.course(report) if report.last else "", events=events[:_MOST_EVENTS],
        more_events=max(0, len(events) - _MOST_EVENTS),
        lengths=charts.figures_of([charts.lengths(report.prompt, "prompts"), charts.lengths(report.output, "answers")]),
        length_rows=list(_length_rows(report)), latency=charts.latency(report.endpoints),
        endpoints=[_endpoint(url, one) for url, one in sorted(report.endpoints.items())],
        rejected=[
            {"reason": reason, "count": f"{counts.total():,}", "examples": report.examples[reason]}
            for reason, counts in sorted(report.rejected.items(), key=lambda item: -item[1].total())
        ],
        recipe=list(_recipe(report)),
    )  # fmt: skip


def _figures(report: Report) -> list[tuple[str, str]]:
    totals, seconds = report.inventory["totals"], report.working_seconds
    figures = [("tokenized", f"{totals['tokenized']:,}"), ("rejected", f"{totals['rejected']:,}"),
               ("pending", f"{totals['pending']:,}")]  # fmt: skip
    if seconds:
        figures += [
            ("working time", _span(seconds)),
            ("output tokens", _short(report.total_tokens)),
            ("tokens per second", f"{report.total_tokens / seconds:,.0f}"),
            ("extra requests", f"{report.extra_requests:,}"),
        ]
    return figures


def _dataset(report: Report, one: dict[str, Any]) -> dict[str, Any]:
    finish = report.finish.get(one["dataset"], {})
    final = one["tokenized"] + one["rejected"]
    cells = {name: f"{one[name]:,}" for name in ("rows", "tokenized", "rejected", "pending")}
    return {
        "dataset": one["dataset"], "percent": round(100 * final / max(1, final + one["pending"]), 1), **cells,
        "stop": f"{finish.get('stop', 0):,}", "length": f"{finish.get('length', 0):,}",
    }  # fmt: skip


def _length_rows(report: Report):
    for kind, parts in (("prompts", report.prompt), ("answers", report.output)):
        for dataset, one in parts.items():
            if one.counts:
                mean = one.to_json()["mean"]
                yield [f"{dataset}, {kind}", f"{mean:,.0f}", *(f"{one.percentile(percent):,}" for percent in _PERCENTS)]


def _endpoint(url: str, one: Any) -> list[str]:
    return [
        url, one.model.rstrip("/").rsplit("/", 1)[-1], ", ".join(sorted(one.versions)), f"{one.answers:,}",
        _short(one.tokens), f"{one.latency_percentile(50):.1f} s", f"{one.latency_percentile(99):.1f} s",
        f"{one.cut / max(1, one.answers):.1%}",
    ]  # fmt: skip


def _events(report: Report) -> list[tuple[str, str]]:
    said = []
    for event in sorted(report.events, key=lambda one: one["at"]):
        where = f"{event['endpoint']}: " if event.get("endpoint") else ""
        detail = f" ({event['detail']})" if event.get("detail") else ""
        said.append((_when(datetime.fromisoformat(event["at"]).timestamp()),
                     f"{where}{str(event['event']).replace('_', ' ')}{detail}"))  # fmt: skip
    return said


def _recipe(report: Report):
    recipe = report.run_file.recipe
    for section in (recipe.sampling, recipe.rendering):
        for name, value in sorted(section.items()):
            if value is not None and value != "":
                yield name, json.dumps(value, ensure_ascii=False)
    for name, value in sorted(recipe.tokenizer.items()):
        if value:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"tokenizer, {name.replace('_', ' ')}", text if len(text) <= 400 else text[:399] + "…"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _span(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def _short(number: int) -> str:
    """Sizes for people: 12,345 · 1.2 M · 3.4 G."""
    for unit, name in ((10**9, "G"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"

"""The pictures of a report: SVG whose axes take the colour of the text around, to be read on paper and in the dark."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from io import StringIO

from matplotlib import rc_context
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from app.offline.audit import Lengths
from app.offline.report.gather import EndpointFacts, Report, latency_edge

#: Drawn in this colour, an element takes that of the text around the picture.
_INK = "#010203"
#: Told apart by most eyes, on white and on black (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_AWAY, _PAUSE = "#d55e00", "#888888"
_MOST_POINTS = 600
_STYLE = {
    "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif", "text.color": _INK, "axes.edgecolor": _INK,
    "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "headrace",
}  # fmt: skip


def course(report: Report) -> str:
    """Output tokens per second and requests in flight over time, outages and pauses marked."""

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for panel, points, title in (
            (above, report.tokens.points(), "output tokens per second"),
            (below, report.in_flight.points(), "requests in flight"),
        ):
            times, values = thinned(points)
            panel.fill_between([_time(at) for at in times], values, step="post", color=COLOURS[4], alpha=0.8, lw=0)
            panel.set_ylim(bottom=0)
            panel.set_title(title, fontsize=9, loc="left")
            for start, end in report.pauses:
                panel.axvspan(_time(start), _time(end), color=_PAUSE, alpha=0.25, lw=0)
            for start, end in outages(report):
                panel.axvspan(_time(start), _time(max(end, start + 1)), color=_AWAY, alpha=0.3, lw=0)
        locator = AutoDateLocator()
        below.xaxis.set_major_locator(locator)
        below.xaxis.set_major_formatter(ConciseDateFormatter(locator))

    return _svg(draw, 6.4, 3.6)


def lengths(parts: Mapping[str, Lengths], title: str) -> str:
    """Histogram of token counts per dataset; logarithmic, as lengths are."""
    shown = {name: one for name, one in parts.items() if one.counts}

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        lowest, highest = min(min(one.counts) for one in shown.values()), max(max(one.counts) for one in shown.values())
        first = 4 * (max(1, lowest).bit_length() - 1)
        edges = [2 ** (n / 4) for n in range(first, 4 * max(1, highest).bit_length() + 2)]
        panel.hist(
            [list(one.counts) for one in shown.values()], bins=edges, stacked=True, label=list(shown),
            weights=[list(one.counts.values()) for one in shown.values()], color=_cycle(len(shown)),
        )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        panel.set_title(title, fontsize=9, loc="left")
        if len(shown) > 1:
            panel.legend(fontsize=8)

    return _svg(draw, 4, 2.4) if shown else ""


def latency(endpoints: Mapping[str, EndpointFacts]) -> str:
    """Share of answers that took at most so long, a line per endpoint."""

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        for colour, (url, one) in zip(_cycle(len(endpoints)), endpoints.items(), strict=True):
            numbers, below, xs, ys = sorted(one.latency), 0, [], []
            for number in numbers:
                below += one.latency[number]
                xs.append(latency_edge(number + 1))
                ys.append(below / one.answers)
            panel.plot(xs, ys, label=url, color=colour)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
        panel.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.set_title("answers that took at most", fontsize=9, loc="left")
        if len(endpoints) > 1:
            panel.legend(fontsize=8)

    return _svg(draw, 4, 2.4) if endpoints else ""


def outages(report: Report) -> list[tuple[float, float]]:
    """(from, until) of each time that an endpoint was away, until the end of the run if it never came back."""
    since: dict[str, float] = {}
    spans = []
    for event in sorted(report.events, key=lambda one: one["at"]):
        at, url = datetime.fromisoformat(event["at"]).timestamp(), event.get("endpoint", "")
        if event["event"] == "endpoint_down":
            since.setdefault(url, at)
        elif event["event"] == "endpoint_up" and url in since:
            spans.append((since.pop(url), at))
    return spans + [(at, max(at, report.last)) for at in since.values()]


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most so many steps; where several fall together, their mean over time."""
    if len(points) <= most:
        return [at for at, _ in points], [value for _, value in points]
    start, end = points[0][0], points[-1][0]
    width = (end - start) / most
    sums = [0.0] * most
    for (at, value), (until, _) in itertools.pairwise(points):
        while at < until:
            slot = min(most - 1, int((at - start) / width))
            stop = min(until, start + (slot + 1) * width) if slot < most - 1 else until
            sums[slot] += value * (stop - at)
            at = stop if stop > at else until
    return [start + n * width for n in range(most)] + [end], [one / width for one in sums] + [0.0]


def _cycle(count: int) -> list[str]:
    return [COLOURS[n % len(COLOURS)] for n in range(count)]


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at)  # noqa: DTZ006 - the reader's own time, as everything they see


def _svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        for panel in figure.axes:
            panel.patch.set_alpha(0)
            panel.grid(axis="y", color=_INK, alpha=0.15, lw=0.5)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r' width="[^"]+pt" height="[^"]+pt"| height="[^"]+pt" width="[^"]+pt"', "", text, count=1)


def figures_of(parts: Iterable[str]) -> str:
    """Several pictures side by side."""
    return "".join(f"<figure>{part}</figure>" for part in parts if part)

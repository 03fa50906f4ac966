"""What a person sees while a run goes on: a calm picture on a terminal, a line every 30 seconds elsewhere. On stderr.

The picture is drawn in place, once a second, in as many columns and lines as the terminal has; what does not fit is
left out from the less interesting end (endpoints that are well, datasets that are done).
"""

import contextlib
import textwrap
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from app.cli.talk import PREFIX, say
from app.inventory import UNKNOWN, eta_words
from app.snapshot import Snapshot, budget_tokens
from app.store.live import EndpointNow

_DRAW_SECONDS = 1.0
_AWAY = {
    "unavailable": "unavailable", "leaving": "leaving", "paused": "paused", "differs": "held", "drained": "drained",
    "half-open": "on trial",
}  # fmt: skip; everything else: away
_LEAST_LINES = 4  # of datasets and of endpoints each, however low the terminal


class View:
    """Shows snapshots as they come. Use as a context manager."""

    def __init__(self, line_seconds: float = 30.0, console: Console | None = None):
        self._line_seconds = line_seconds
        self._away: dict[str, float] = {}
        self._held: set[str] = set()  #: serve something else
        self._console = console or Console(stderr=True)
        self._size = self._console.size
        self._live: Live | None = None
        self._next_at = 0.0
        self._waited = False
        self._started = time.monotonic()

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, auto_refresh=False, transient=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()

    def say(self, text: str) -> None:
        """A sentence that stays."""
        if self._live is None:
            say(text)
            return
        with contextlib.suppress(OSError):  # the terminal was closed: the run drains, with nobody to tell
            self._console.print(Text(PREFIX + text))

    def show(self, seen: Snapshot) -> None:
        """The state now. Cheap to call often: it draws once a second, or prints a line every `line_seconds`."""
        for endpoint in seen.endpoints:
            self._note_change(endpoint)
        if bool(seen.waiting_for) != self._waited:  # told at once
            self._waited, self._next_at = not self._waited, 0.0
        if time.monotonic() < self._next_at and not seen.complete:
            return
        if self._live is not None:
            self._next_at = time.monotonic() + _DRAW_SECONDS
            with contextlib.suppress(OSError):
                self._clear_if_resized()
                seconds = time.monotonic() - self._started
                self._live.update(picture(seen, seconds, *self._console.size), refresh=True)
        elif seen.inventory["totals"]["rows"] or seen.waiting_for:  # else the input is being opened
            self._next_at = time.monotonic() + self._line_seconds
            self.say(line(seen))

    def _clear_if_resized(self) -> None:
        """What was drawn for another width was broken into other lines: begin on an empty screen."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._console.control(Control((ControlType.CLEAR,), (ControlType.HOME,)))

    def _note_change(self, endpoint: EndpointNow) -> None:
        since = self._away.get(endpoint.url)
        if since is None and endpoint.open_since is not None:
            self._away[endpoint.url] = endpoint.open_since
            if not endpoint.differs:
                self.say(f"{endpoint.url} is away: {_evidence(endpoint)}")
        if endpoint.differs and endpoint.url not in self._held:
            self.say(f"{endpoint.url} is held: {_evidence(endpoint)}")
        (self._held.add if endpoint.differs else self._held.discard)(endpoint.url)
        if since is not None and endpoint.open_since is None:
            del self._away[endpoint.url]
            self.say(f"{endpoint.url} answers again, after {_clock(time.time() - since)}")


# the line


def line(seen: Snapshot) -> str:
    """The state in one line, for a log."""
    shown, rate = seen.inventory, seen.rate
    totals = shown["totals"]
    parts = [
        f"{totals['tokenized']:,} of {_total(seen)} rows done", f"{totals['rejected']:,} rejected",
        f"{totals['pending']:,} pending",
    ]  # fmt: skip
    if totals["in_flight"] >= 0:
        parts.append(f"{totals['in_flight']:,} in flight")
    parts.append(f"{rate.completions_per_second:.1f} rows/s")
    if rate.output_tokens_per_second:
        parts.append(f"{_short(rate.output_tokens_per_second)} tokens/s")
    if shown["eta_seconds"] > 0:
        parts.append(eta_words(shown["eta_seconds"]))
    if full := _fullness(seen):
        parts.append(full)
    if seen.oldest_seconds >= 60:
        parts.append(f"oldest request {_clock(seen.oldest_seconds)}")
    waiting = f"; waiting: {seen.waiting_for}" if seen.waiting_for else ""
    return f"{shown['run']['state']}: {', '.join(parts)}{waiting}"


def _fullness(seen: Snapshot) -> str:
    """KV tokens in flight over the budgets of the endpoints that tell theirs."""
    budgets = [(one.tokens, budget) for one in seen.endpoints if (budget := budget_tokens(one))]
    if not budgets:
        return ""
    return f"KV {sum(t for t, _ in budgets) / sum(b for _, b in budgets):.0%} of budget"


def _total(seen: Snapshot) -> str:
    """Rows altogether, as far as known: `~` an estimate, `+` there will be more."""
    datasets = seen.inventory["datasets"]
    if all(one["rows_final"] for one in datasets):
        return f"{seen.inventory['totals']['rows']:,}"
    if all(one["rows_final"] or one["dataset"] in seen.expected_rows for one in datasets):
        return f"~{sum(seen.expected_rows.get(one['dataset'], one['rows']) for one in datasets):,}"
    return f"{seen.inventory['totals']['rows']:,}+"


# the picture


def picture(seen: Snapshot, seconds: float, width: int, height: int) -> Group:
    """The state as a picture of at most width × height. seconds: how long it has been looked at."""
    notes = [*_notes(seen), *_advice(seen, width)]
    room = max(2 * _LEAST_LINES, height - len(notes) - 4)
    most = max(_LEAST_LINES, room - min(len(seen.endpoints), room // 2))
    left = max(_LEAST_LINES, room - min(len(seen.inventory["datasets"]) + 1, most))
    return Group(
        _state_line(seen, seconds), _datasets(seen, width, most), *_endpoint_lines(seen, width, left), *notes
    )


def _state_line(seen: Snapshot, seconds: float) -> Text:
    shown, rate = seen.inventory, seen.rate
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(shown["run"]["state"], "bold yellow" if seen.waiting_for else "bold")
    text.append(f" · {rate.completions_per_second:.1f} rows/s · {_short(rate.output_tokens_per_second)} tokens/s · ")
    if shown["eta_seconds"] != 0 and shown["run"]["state"] != "draining":
        text.append(f"{eta_words(shown['eta_seconds'])} · ")
    text.append(_clock(seconds))
    return text


def _datasets(seen: Snapshot, width: int, most: int) -> Table:
    rows = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    rows.add_column("dataset", overflow="ellipsis", no_wrap=True, max_width=max(12, min(40, width - 62)))
    rows.add_column("")
    for name in ("done", "of", "rejected", "rows/s", "queued", "in flight"):
        rows.add_column(name, justify="right", no_wrap=True)
    datasets = sorted(seen.inventory["datasets"], key=lambda one: one["rows_final"] and not one["pending"])
    for one in datasets[:most]:
        rows.add_row(*_dataset_cells(seen, one))
    if hidden := datasets[most:]:
        rows.add_row(Text(f"and {len(hidden)} more", "dim"))
    return rows


def _dataset_cells(seen: Snapshot, one: dict) -> list[str | ProgressBar]:
    name, final = one["dataset"], one["tokenized"] + one["rejected"]
    expected = seen.expected_rows.get(name)
    total = one["rows"] if one["rows_final"] else expected or one["rows"]
    mark = "" if one["rows_final"] else "~" if expected else "+"
    rate = seen.rates[name].completions_per_second if name in seen.rates else 0.0
    return [
        name, _bar(final, total), f"{one['tokenized']:,}",
        f"~{total:,}" if mark == "~" else f"{total:,}{mark}", f"{one['rejected']:,}" if one["rejected"] else "–",
        f"{rate:.1f}", _known(one["queued"]), _known(one["in_flight"]),
    ]  # fmt: skip


def _bar(final: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(1, total), completed=final, width=8, complete_style="green", finished_style="green")


def _endpoint_lines(seen: Snapshot, width: int, most: int) -> Iterator[Text]:
    """Those in trouble first, when there is no room for all."""
    endpoints = list(seen.endpoints)
    if len(endpoints) > most:
        endpoints.sort(key=lambda one: one.open_since is None)
    for one in endpoints[:most]:
        yield _endpoint_line(one, width)
    if hidden := endpoints[most:]:
        away = sum(one.open_since is not None for one in hidden)
        yield Text(f"  and {len(hidden)} more" + (f", {away} of them away" if away else ", all well"), "dim")


def _endpoint_line(endpoint: EndpointNow, width: int) -> Text:
    """What fits, whole: a figure that is cut off would be read as another one."""
    line = Text(no_wrap=True, overflow="ellipsis")
    if endpoint.open_since is not None:
        line.append("○ ", "red")
        line.append(f"{endpoint.url}  {_AWAY.get(endpoint.why) or _AWAY.get(endpoint.state, 'away')} for ")
        line.append(f"{_clock(time.time() - endpoint.open_since)}: {_evidence(endpoint)}")
        return line
    line.append("● ", "green")
    line.append(f"{endpoint.url}  {endpoint.requests} requests")
    budget = budget_tokens(endpoint)
    for part, style in (
        (f" ({endpoint.waiting} wait)" if endpoint.waiting else "", ""),
        (f" · KV {_short(endpoint.tokens)} of {_short(budget)}" if budget else "", ""),
        (f" · {_short(1000 * endpoint.pace * endpoint.requests)} tok/s" if endpoint.pace else "", ""),
        (f" · {endpoint.model.rstrip('/').rsplit('/', 1)[-1]}" if endpoint.model else "", "dim"),
    ):
        if line.cell_len + len(part) <= width:
            line.append(part, style)
    return line


def _notes(seen: Snapshot) -> Iterator[Text]:
    """Below the tables: what is amiss, and figures that matter once in a while."""
    totals = seen.inventory["totals"]
    if seen.waiting_for:
        yield Text(f"waiting: {seen.waiting_for}", "yellow", overflow="fold")
    if totals["rejected_by_reason"]:
        yield _note("rejected", " · ".join(f"{reason} {n:,}" for reason, n in totals["rejected_by_reason"].items()))
    if seen.oldest:
        yield _note("oldest", f"{_clock(seen.oldest_seconds)} at {seen.oldest.endpoint}: {seen.oldest.id}")
    if seen.lanes:
        queued = " · ".join(f"{lane} {number:,}" for lane, number in seen.lanes.items())
        slots = sum(worker.slots for worker in seen.workers)
        workers = f"{len(seen.workers)} worker{'' if len(seen.workers) == 1 else 's'}, {slots:,} slots"
        extra = f" · {seen.extra_generations:,} extra generations" if seen.extra_generations > 0 else ""
        yield _note("queued", f"{queued} · {workers}{extra}")


def _advice(seen: Snapshot, width: int) -> Iterator[Text]:
    """What would be better at the first endpoint that says so; the others are much like it."""
    if seen.advice:
        more = f" (and {len(seen.advice) - 1} more like it)" if len(seen.advice) > 1 else ""
        for line in textwrap.wrap(seen.advice[0] + more, width, break_on_hyphens=False):
            yield Text(line, "dim", no_wrap=True)


def _note(name: str, text: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{name:<9}", "dim")
    line.append(text)
    return line


def _evidence(endpoint: EndpointNow) -> str:
    """Without the URL, which stands before it."""
    return endpoint.evidence.removesuffix(f", at {endpoint.url}")


def _known(number: int) -> str:
    return f"{number:,}" if number > UNKNOWN else "?"


def _short(number: float) -> str:
    """Three digits or so: 950, 12.3k, 4.5M."""
    for limit, unit, size in ((1e6, "M", 1e6), (1e3, "k", 1e3)):
        if number >= limit:
            return f"{number / size:.{0 if number >= 100 * size else 1}f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

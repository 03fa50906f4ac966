"""What a person sees while a run goes on: a calm table on a terminal, a line every 30 seconds elsewhere. On stderr."""

import contextlib
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.cli.talk import PREFIX, say
from app.store.live import EndpointNow, RunNow

_RATE_SECONDS = 60.0


class View:
    """Shows inventories as they come. Use as a context manager."""

    def __init__(self, line_seconds: float = 30.0):
        self._line_seconds = line_seconds
        self._away: dict[str, float] = {}
        self._held: set[str] = set()  #: serve something else
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._line_at = 0.0
        self._started = time.monotonic()
        self._done: deque[tuple[float, int]] = deque()

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
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

    def show(self, shown: dict[str, Any], now: RunNow | None, waiting: str) -> None:
        """The state now; `shown` is an inventory."""
        totals = shown["totals"]
        for endpoint in now.endpoints if now else []:
            self._note_change(endpoint)
        self._note_rate(totals["tokenized"] + totals["rejected"])
        if self._live is not None:
            self._live.update(self._table(shown, now, waiting))  # drawn by a thread of its own
        elif not totals["rows"] and not waiting:
            return  # the input is being opened
        elif time.monotonic() >= self._line_at or shown["complete"]:
            self._line_at = time.monotonic() + self._line_seconds
            self.say(self._line(shown, waiting))

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

    def _note_rate(self, done: int) -> None:
        at = time.monotonic()
        self._done.append((at, done))
        while at - self._done[0][0] > _RATE_SECONDS:
            self._done.popleft()

    @property
    def rate(self) -> float:
        """Completions per second over the last minute."""
        if len(self._done) < 2:
            return 0.0
        (first_at, first), (at, done) = self._done[0], self._done[-1]
        return (done - first) / (at - first_at)

    def _line(self, shown: dict[str, Any], waiting: str) -> str:
        totals = shown["totals"]
        flight = f", {totals['in_flight']:,} in flight" if totals["in_flight"] >= 0 else ""
        return (
            f"{shown['run']['state']}: {totals['tokenized']:,} of {totals['rows']:,} rows done, "
            f"{totals['rejected']:,} rejected, {totals['pending']:,} pending{flight}, {self.rate:.1f} rows/s"
            + (f"; waiting: {waiting}" if waiting else "")
        )

    def _table(self, shown: dict[str, Any], now: RunNow | None, waiting: str) -> Group:
        rows = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        rows.add_column("dataset", overflow="ellipsis", no_wrap=True, max_width=28)
        rows.add_column("")
        for name in ("done", "of", "rejected", "queued", "in flight"):
            rows.add_column(name, justify="right", no_wrap=True)
        for one in shown["datasets"]:
            final, total = one["tokenized"] + one["rejected"], one["tokenized"] + one["rejected"] + one["pending"]
            rows.add_row(
                one["dataset"], ProgressBar(total=max(1, total), completed=final, width=12),
                f"{one['tokenized']:,}", f"{total:,}" + ("" if one["rows_final"] else "+"),
                f"{one['rejected']:,}" if one["rejected"] else "–", _known(one["queued"]), _known(one["in_flight"]),
            )  # fmt: skip
        parts = [rows]
        if now is not None:
            parts += [_endpoint_line(endpoint) for endpoint in now.endpoints]
        clock = _clock(time.monotonic() - self._started)
        state = Text(f"{shown['run']['state']} · {self.rate:.1f} rows/s · {clock}", "bold")
        if waiting:
            state.append(f" · waiting: {waiting}", "yellow")
        return Group(*parts, state)


def _endpoint_line(endpoint: EndpointNow) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    if endpoint.open_since is None:
        line.append("● ", "green")
        share = f" · {endpoint.tokens:,} of {endpoint.kv_tokens:,} KV tokens" if endpoint.kv_tokens else ""
        line.append(f"{endpoint.url}  {endpoint.requests} requests{share}")
    else:
        line.append("○ ", "red")
        line.append(f"{endpoint.url}  away for {_clock(time.time() - endpoint.open_since)}: {_evidence(endpoint)}")
    return line


def _evidence(endpoint: EndpointNow) -> str:
    """Without the URL, which stands before it."""
    return endpoint.evidence.removesuffix(f", at {endpoint.url}")


def _known(number: int) -> str:
    return f"{number:,}" if number >= 0 else "?"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

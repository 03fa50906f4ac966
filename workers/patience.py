"""How long an endpoint that has work may stay silent: learned from how long it was silent before. Pure.

A sign of life is an answer that came to any worker, or figures of its own that change while it says that it runs
something. Without one for four times the longest silence that ever ended well, it is given up: after 10 s at the
soonest, after 300 s at the latest (SGLang's own watchdog ends a scheduler after those), after 120 s while nothing is
known. An endpoint that tells no figures has only its answers, so there the longest pause between two of them counts,
without a latest. Whoever was given up gets twice the time at the next occasion, so a mistake is not made for ever.
"""

from dataclasses import dataclass
from enum import StrEnum

from app.sglang.wire import Loads

TIMES = 4.0
LEAST_SECONDS, MOST_SECONDS, UNTAUGHT_SECONDS = 10.0, 300.0, 120.0
_FADE_PER_SECOND = 0.5 ** (1 / 1800)  # what was long once is forgotten by half in half an hour
#: A single request is overdue after ten times what its whole allowance takes here, and this at least.
OVERDUE_TIMES, OVERDUE_LEAST_SECONDS = 10.0, 60.0


class Verdict(StrEnum):
    """What a silence means."""

    STALLED = "stalled"  #: the endpoint hangs: nothing there will come back
    LOST = "lost"  #: it runs, says that it has nothing to do, and owes answers


@dataclass(slots=True)
class Patience:
    """With one endpoint, over all workers. Times are seconds of the caller's clock."""

    slowest_seconds: float = 0.0  #: the longest silence that ended; 0: none did yet
    _life_at: float | None = None  #: last sign of life, or since when it has work
    _looked_at: float = 0.0
    _figures: tuple | None = None
    _done: int = -1
    _tells: bool = False

    @property
    def limit_seconds(self) -> float | None:
        """How long it may be silent now; None: for ever (its requests have deadlines of their own)."""
        if not self.slowest_seconds:
            return UNTAUGHT_SECONDS if self._tells else None
        limit = max(LEAST_SECONDS, TIMES * self.slowest_seconds)
        return min(MOST_SECONDS, limit) if self._tells else limit

    def look(self, requests: int, done: int, loads: Loads | None, now: float) -> Verdict | None:
        """One look. requests: ours there, of all workers. done: answers that ever came. loads: None if it says none."""
        alive = self._shows_life(done, loads)
        self.slowest_seconds *= _FADE_PER_SECOND ** (now - self._looked_at if self._looked_at else 0.0)
        self._looked_at = now
        if not requests or self._life_at is None:
            self._life_at = now
            return None
        silent = now - self._life_at
        if alive:
            self._life_at, self.slowest_seconds = now, max(silent, self.slowest_seconds)
            return None
        limit = self.limit_seconds
        if limit is None or silent < limit:
            return None
        self._life_at, self.slowest_seconds = now, 2 * limit / TIMES
        return Verdict.LOST if loads is not None and not loads.running and not loads.waiting else Verdict.STALLED

    def _shows_life(self, done: int, loads: Loads | None) -> bool:
        came, self._done = done != self._done, done
        if loads is None:
            return came
        self._tells = True
        figures = (loads.timestamp, loads.running, loads.waiting, loads.used_tokens)
        moved, self._figures = figures != self._figures, figures
        return came or (moved and loads.running > 0)


def is_overdue(age_seconds: float, allowance: int, tokens_per_second: float) -> bool:
    """Whether a request has been out for much longer than its whole allowance takes. tokens_per_second: of one; 0: unknown."""  # noqa: E501
    if tokens_per_second <= 0:
        return False
    return age_seconds > max(OVERDUE_LEAST_SECONDS, OVERDUE_TIMES * allowance / tokens_per_second)

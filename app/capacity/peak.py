"""The predicted peak: the most that a pool will hold in the steps to come, if nobody else joins.

Each request holds `held` tokens now and grows by one a step until it ends after `left` steps, when all it holds is
free again. The sum over all has its maximum just before somebody ends. Ends are rounded up to one of SLOTS moments,
so a candidate costs SLOTS additions however many run, and the figure is never below the exact one.
"""

import math
from collections.abc import Iterable

SLOTS = 128


def exact_peak(requests: Iterable[tuple[float, float]]) -> float:
    """The peak of (held, left) pairs without rounding: what `Forecast` must never fall below."""
    best = total = 0.0
    for count, (left, held) in enumerate(sorted(((left, held) for held, left in requests), reverse=True), 1):
        total += held
        best = max(best, total + count * left)
    return best


class Forecast:
    """Σ of what requests will hold at each of SLOTS moments up to `horizon` steps from now."""

    def __init__(self, horizon: float, requests: Iterable[tuple[float, float]] = ()):
        self.step = max(1.0, horizon / SLOTS)
        self._at = [0.0] * (SLOTS + 1)  # [k]: held by all at moment k * step
        held_to, count_to = [0.0] * (SLOTS + 2), [0] * (SLOTS + 2)
        for held, left in requests:
            slot = self._slot(left)
            held_to[slot] += held
            count_to[slot] += 1
        held_sum, count_sum = 0.0, 0
        for slot in range(SLOTS, 0, -1):
            held_sum += held_to[slot]
            count_sum += count_to[slot]
            self._at[slot] = held_sum + count_sum * slot * self.step

    def _slot(self, left: float) -> int:
        return min(SLOTS, max(1, math.ceil(left / self.step)))

    def peak_with(self, held: float, left: float) -> float:
        """The peak if this request joined now."""
        last = self._slot(left)
        joined = max(self._at[slot] + slot * self.step for slot in range(1, last + 1)) + held
        return max(joined, max(self._at[last + 1 :], default=0.0))

    def add(self, held: float, left: float) -> None:
        """This request joins."""
        for slot in range(1, self._slot(left) + 1):
            self._at[slot] += held + slot * self.step

    @property
    def peak(self) -> float:
        """The peak as it is."""
        return max(self._at)

"""The predicted peak: the most that a pool will hold in the steps to come, if nobody else joins.

Each request holds `held` tokens now, grows by one a step until it ends, and frees everything then. Nobody knows when
that is, only the share of answers that get so far. So what all hold at a moment is a sum of random figures: its
expectation, and MARGIN standard deviations above it, are looked at in SLOTS moments, and the highest counts; never more
than if none had ended. The margin makes one rule right for eight requests and for eight hundred: the luck of many
cancels out.

Requests of a kind and about an age are counted together, so the work doesn't grow with their number. lease.lua does
the same arithmetic in the same order.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from app.capacity.lengths import LEAST_REMAINING, RARE, Curve, most_left

SLOTS = 64
MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Held:
    """A request at an endpoint, or one that would like to be."""

    tokens: float  #: it holds now: its prompt and what it has made
    made: float
    allowance: int  #: max_new_tokens
    curve: Curve | None = None


class Forecast:
    """What requests will hold at SLOTS + 1 moments, `step` decode steps apart, the first of them now."""

    def __init__(self, requests: Iterable[Held], candidates: Iterable[Held] = ()):
        """candidates: those that may be asked about or join later."""
        requests = list(requests)
        self._count = len(requests)
        self.step = max(1.0, max(map(_reach, [*requests, *candidates]), default=1.0) / SLOTS)
        self._grids: dict[Curve, list[float]] = {}
        self._mean, self._variance, self._most = ([0.0] * (SLOTS + 1) for _ in range(3))
        groups: dict[tuple, list[Held]] = defaultdict(list)
        for request in requests:
            groups[self._group(request)].append(request)
        for (curve, _, end), group in groups.items():
            count = len(group)
            held, squares = sum(r.tokens for r in group), sum(r.tokens**2 for r in group)
            self._join(self._alive(curve, sum(r.made for r in group) / count, end), count, held, squares)

    def peak_with(self, request: Held) -> float:
        """The peak if this request joined now."""
        return max(map(_high, *self._with(request)))

    def add(self, request: Held) -> None:
        """This request joins."""
        self._mean, self._variance, self._most = self._with(request)
        self._count += 1

    @property
    def peak(self) -> float:
        """The peak as it is."""
        return max(map(_high, self._mean, self._variance, self._most))

    def freed_within(self, steps: float) -> float:
        """Tokens by which what these hold will stay below what it would be so many steps from now if none ended, at
        all moments until then: what those that end give back at the least, MARGIN deviations below the expectation."""
        last = min(SLOTS, steps / self.step)
        figures = self._mean, self._variance, self._most
        highest = max(_high(*(_at(one, place) for one in figures)) for place in [*range(1, math.ceil(last)), last])
        return max(0.0, self._most[0] + self._count * last * self.step - highest)

    def _with(self, request: Held) -> tuple[list[float], list[float], list[float]]:
        mean, variance, most = self._mean.copy(), self._variance.copy(), self._most.copy()
        for slot, share in enumerate(self._alive(request.curve, request.made, self._group(request)[2])):
            size = request.tokens + slot * self.step
            mean[slot] += size * share
            variance[slot] += size * size * share * (1 - share)
            most[slot] += size
        return mean, variance, most

    def _join(self, alive: list[float], count: int, held: float, squares: float) -> None:
        for slot, share in enumerate(alive):
            steps = slot * self.step
            self._mean[slot] += (held + count * steps) * share
            self._variance[slot] += (squares + 2 * held * steps + count * steps * steps) * share * (1 - share)
            self._most[slot] += held + count * steps

    def _group(self, request: Held) -> tuple[Curve | None, int, int]:
        """What requests counted together have in common: curve, age in steps, and the last moment they may see."""
        left = most_left(request.curve, request.made, request.allowance)
        if request.curve is not None and request.made < request.curve.made[-1]:
            left = request.allowance - request.made  # the curve says the rest
        return request.curve, int(request.made / self.step), min(SLOTS, max(1, math.ceil(left / self.step)))

    def _alive(self, curve: Curve | None, made: float, end: int) -> list[float]:
        """Share of a group that is still there at each moment, up to `end`."""
        if curve is None:
            return [1.0] * (end + 1)
        grid = self._grids.get(curve)
        if grid is None:
            grid = self._grids[curve] = [curve.alive(slot * self.step) for slot in range(SLOTS + 2)] + [0.0] * SLOTS
        place = made / self.step
        first = int(place)
        now = _between(grid, first, place - first) if first <= SLOTS else 0.0
        if now <= RARE / 2:
            return [1.0] * (min(end, math.ceil(LEAST_REMAINING / self.step)) + 1)
        shares = (_between(grid, first + slot, place - first) / now for slot in range(1, end + 1))
        return [1.0, *takewhile(lambda share: share > 0, shares)]


def _high(mean: float, variance: float, most: float) -> float:
    return min(most, mean + MARGIN * math.sqrt(variance))


def _reach(request: Held) -> float:
    """How far ahead of now a request of this kind may make it necessary to look."""
    return request.curve.made[-1] if request.curve else most_left(None, request.made, request.allowance)


def _at(figures: list[float], place: float) -> float:
    """Between two moments."""
    slot = min(int(place), SLOTS - 1)
    return _between(figures, slot, place - slot)


def _between(grid: list[float], slot: int, part: float) -> float:
    return grid[slot] + (grid[slot + 1] - grid[slot]) * part

"""How much longer will an answer grow that has made so many tokens already? Learned from the answers that ended.

Invariant: answers that still run count too, as longer than what they have made; without them the first ones to end,
which are the short ones, would promise that all are short, and the pool would be overfilled at the start of every run.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from app.lanes import expected_output_tokens

#: Finished answers from which on a curve is trusted; before that: SGLang's own clip.
ENOUGH_FINISHED = 30
#: Knots of a curve at most: it is parsed inside Redis.
MOST_KNOTS = 32
_BINS_PER_OCTAVE = 8
#: An answer beyond everything known is expected to make at least so many more.
LEAST_REMAINING = 256
#: Finished answers at the clip that are pretended beside the real ones: they bound a tail that nobody has seen yet.
_PRETENDED = 4.0


def bin_of(tokens: int) -> int:
    """The bin of a histogram of lengths: eight per doubling."""
    return int(_BINS_PER_OCTAVE * math.log2(max(1, tokens)))


def edge(number: int) -> float:
    """Least length in a bin."""
    return 2.0 ** (number / _BINS_PER_OCTAVE)


@lru_cache(maxsize=4096)
def kind_of(recipe: str, dataset: str, lane: str) -> str:
    """Name of a kind of task: those of one recipe, dataset and lane share what is learned of their lengths."""
    return blake2b(f"{recipe}\0{dataset}\0{lane}".encode(), digest_size=6, person=b"lengths").hexdigest()


@dataclass(frozen=True, slots=True)
class Curve:
    """Expected remaining tokens over tokens made: straight between its knots, constant beyond the last."""

    made: tuple[int, ...]
    left: tuple[int, ...]

    def remaining(self, made: float) -> float:
        """E[length - made | length > made]."""
        at = bisect_right(self.made, made)
        if at == len(self.made):
            return float(self.left[-1])
        x0, x1, y0, y1 = self.made[at - 1], self.made[at], self.left[at - 1], self.left[at]
        return y0 + (y1 - y0) * (made - x0) / (x1 - x0)

    def dump(self) -> str:
        """`made:left made:left …`, for Redis."""
        return " ".join(f"{x}:{y}" for x, y in zip(self.made, self.left, strict=True))


def parse_curve(text: str) -> Curve:
    """What `dump` wrote."""
    pairs = [word.split(":") for word in text.split()]
    return Curve(tuple(int(x) for x, _ in pairs), tuple(int(y) for _, y in pairs))


def remaining(curve: Curve | None, made: float, allowance: int) -> float:
    """Tokens that an answer is expected to make yet; without a curve by SGLang's clip. At least 1, within its allowance."""  # noqa: E501
    if curve is None:
        expected = max(LEAST_REMAINING, expected_output_tokens(allowance) - made)
    else:
        expected = curve.remaining(made)
    return max(1.0, min(expected, allowance - made))


def learn(finished: Mapping[int, int], running: Iterable[int], allowance: int) -> Curve | None:
    """The curve of a kind of task, None while too few have finished.

    finished: bin → answers that ended in it. running: tokens made by each that still runs. allowance: the largest
    max_new_tokens among them. The estimator is Kaplan and Meier's: in each bin, of those that got there, how many end.
    """
    if sum(finished.values()) < ENOUGH_FINISHED:
        return None
    still: dict[int, int] = {}
    for made in running:
        still[bin_of(made)] = still.get(bin_of(made), 0) + 1
    clip = bin_of(expected_output_tokens(allowance))
    last = max([clip, *finished, *still]) + 1
    return _curve(_survival(finished, still, clip, last), min(finished))


def _survival(finished: Mapping[int, int], still: Mapping[int, int], clip: int, last: int) -> list[float]:
    """Share of all answers that reach the lower edge of each bin, up to and including `last`."""
    at_risk = sum(finished.values()) + sum(still.values()) + _PRETENDED
    survival, share = [], 1.0
    for number in range(last + 1):
        survival.append(share)
        ended = finished.get(number, 0) + (_PRETENDED if number == clip else 0)
        gone = still.get(number, 0)
        exposed = at_risk - gone / 2
        if ended and exposed > 0:
            share *= max(0.0, 1 - ended / exposed)
        at_risk -= ended + gone
    return survival


def _curve(survival: list[float], first: int) -> Curve:
    """Mean residual life at the knots: what lies under the survival curve to the right, over its height there."""
    area, left = 0.0, [0.0] * len(survival)
    for number in range(len(survival) - 2, -1, -1):
        width = edge(number + 1) - (edge(number) if number else 0)
        area += width * (survival[number] + survival[number + 1]) / 2
        left[number] = area / survival[number] if survival[number] > 1e-9 else 0.0
    stop = max(first + 1, max(n for n, share in enumerate(survival) if share > 1e-9))
    stride = math.ceil((stop - first) / (MOST_KNOTS - 2))
    knots = [0, *range(max(1, first), stop, stride)]
    at = {math.ceil(edge(n)) if n else 0: left[n] for n in knots}  # small bins may share a whole number of tokens
    return Curve(tuple(at), tuple(max(LEAST_REMAINING if value == 0 else 1, round(value)) for value in at.values()))

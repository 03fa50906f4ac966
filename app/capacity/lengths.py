"""How long will answers get? The share that gets so far, learned from those that ended.

Invariant: answers that still run count too, as longer than what they have made; without them the first ones to end,
which are the short ones, would promise that all are short, and the pool would be overfilled at the start of every run.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise

from app.lanes import expected_output_tokens

#: Finished answers from which on a curve is trusted; before that: SGLang's own clip.
ENOUGH_FINISHED = 30
#: Knots of a curve at most: it is parsed inside Redis.
MOST_KNOTS = 32
_BINS_PER_OCTAVE = 8
_LATER = "+"
#: An answer beyond everything known is expected to make so many more.
LEAST_REMAINING = 256
#: A curve ends where fewer than this share of the answers get.
RARE = 0.005
#: Finished answers at the clip that are pretended beside the real ones: they bound a tail that nobody has seen yet.
_PRETENDED = 4.0
#: So many of the answers under way stand for all of them where the end of the last one is estimated.
_SAMPLE = 64


def bin_of(tokens: int) -> int:
    """The bin of a histogram of lengths: eight per doubling."""
    return int(_BINS_PER_OCTAVE * math.log2(max(1, tokens)))


def edge(number: int) -> float:
    """Least length in a bin."""
    return 2.0 ** (number / _BINS_PER_OCTAVE)


def bin_beyond(tokens: int) -> int:
    """The first bin that holds nothing shorter: what an allowance cut would have got further than that."""
    return math.ceil(_BINS_PER_OCTAVE * math.log2(max(1, tokens)))


@lru_cache(maxsize=4096)
def kind_of(recipe: str, dataset: str, lane: str) -> str:
    """Name of a kind of task: those of one recipe, dataset and lane share what is learned of their lengths."""
    return blake2b(f"{recipe}\0{dataset}\0{lane}".encode(), digest_size=6, person=b"lengths").hexdigest()


def later(kind: str) -> str:
    """The kind of those requests that go on with an answer of this kind (workers/stages.py)."""
    return kind + _LATER


def first_of(kind: str) -> str | None:
    """The kind of whole answers that later stages of this kind belong to; None if it is one itself."""
    return kind.removesuffix(_LATER) if kind.endswith(_LATER) else None


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of answers that get so far, over tokens made: straight between its knots, 0 from the last on."""

    made: tuple[int, ...]
    share: tuple[float, ...]

    def alive(self, made: float) -> float:
        """P(length > made)."""
        at = bisect_right(self.made, made)
        if at == len(self.made):
            return 0.0
        x0, x1, y0, y1 = self.made[at - 1], self.made[at], self.share[at - 1], self.share[at]
        return y0 + (y1 - y0) * (made - x0) / (x1 - x0)

    def remaining(self, made: float, allowance: float = math.inf) -> float:
        """E[length - made | length > made], none being longer than the allowance: the area under the curve from there
        to it, over its height there."""
        height = self.alive(made)
        if height <= 0:
            return 0.0
        knots = zip(self.made, self.share, strict=True)
        points = [(made, height), *((x, y) for x, y in knots if made < x < allowance)]
        if points[-1][0] < allowance < self.made[-1]:
            points.append((allowance, self.alive(allowance)))
        return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points)) / height

    def sample(self, number: int) -> list[int]:
        """So many lengths, shortest first, that are spread as those of the answers are."""
        found, at = [], 0
        for place in range(number):
            share = 1 - (place + 0.5) / number
            while self.share[at + 1] > share:
                at += 1
            x0, x1, y0, y1 = self.made[at], self.made[at + 1], self.share[at], self.share[at + 1]
            found.append(max(1, round(x0 + (x1 - x0) * (y0 - share) / (y0 - y1))))
        return found

    def believed(self, finished: int) -> "Curve":
        """Without the long answers that `learn` pretends: they keep a pool from being overfilled, and would double the
        time of the last of a few dozen answers. Where answers still run they weigh about twice what they are of all.
        finished: those it was learned from."""
        pretended = 2 * _PRETENDED / (finished + 2 * _PRETENDED)
        return Curve(self.made, tuple(max(0.0, (share - pretended) / (1 - pretended)) for share in self.share))

    def dump(self) -> str:
        """`made:share made:share …`, for Redis."""
        return " ".join(f"{x}:{y:.4f}" for x, y in zip(self.made, self.share, strict=True))


def parse_curve(text: str) -> Curve:
    """What `dump` wrote."""
    pairs = [word.split(":") for word in text.split()]
    return Curve(tuple(int(x) for x, _ in pairs), tuple(float(y) for _, y in pairs))


def most_left(curve: Curve | None, made: float, allowance: int) -> float:
    """Tokens that an answer makes at most, so far as known (without a curve: SGLang's clip), within its allowance."""
    longest = expected_output_tokens(allowance) if curve is None else curve.made[-1]
    return max(1.0, min(max(LEAST_REMAINING, longest - made), allowance - made))


def remaining(curve: Curve | None, made: float, allowance: int) -> float:
    """Tokens that an answer is expected to make yet (without a curve: to SGLang's clip), within its allowance."""
    left = curve.remaining(made, allowance) if curve else expected_output_tokens(allowance) - made
    return max(1.0, min(left if left > 0 else LEAST_REMAINING, allowance - made))


@dataclass(frozen=True, slots=True)
class Running:
    """An answer under way."""

    curve: Curve | None
    made: float  #: tokens by now
    allowance: int
    tokens_per_second: float

    def alive(self, seconds: float) -> float:
        """P(still running after so many seconds more)."""
        tokens = seconds * self.tokens_per_second
        height = self.curve.alive(self.made) if self.curve else 0.0
        if height > 0 and self.made + tokens < self.allowance:
            return self.curve.alive(self.made + tokens) / height
        return float(tokens < remaining(None if height else self.curve, self.made, self.allowance))


def seconds_until_all_end(answers: Sequence[Running]) -> float:
    """The median of the time that the last of these takes: of many answers, the last one is no average one.

    The number that still runs is nearly Poisson's, so none runs with probability 1/2 when ln 2 of them are expected.
    """
    some = answers[:: -(-len(answers) // _SAMPLE)] if answers else ()
    enough = math.log(2) * len(some) / max(1, len(answers))
    most = (most_left(one.curve, one.made, one.allowance) / one.tokens_per_second for one in some)
    low, high = 0.0, max(most, default=0.0)
    while high - low > max(0.01, 0.01 * high):
        middle = (low + high) / 2
        if sum(one.alive(middle) for one in some) > enough:
            low = middle
        else:
            high = middle
    return high


def learn(finished: Mapping[int, int], running: Iterable[int], allowance: int) -> Curve | None:
    """The curve of a kind of task, None while too few have finished.

    finished: bin → answers that ended in it; those that their allowance cut count beyond it. running: tokens made by
    each that still runs. allowance: the largest max_new_tokens among them. The estimator is Kaplan and Meier's: in each
    bin, of those that got there, how many end.
    """
    if sum(finished.values()) < ENOUGH_FINISHED:
        return None
    still: dict[int, int] = {}
    for made in running:
        still[bin_of(made)] = still.get(bin_of(made), 0) + 1
    clip = bin_beyond(expected_output_tokens(allowance))
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
    """The knots of a survival curve: few, the last two where the last bin begins that more than a few get to, and where
    it ends."""
    last = max(first, max(n for n, share in enumerate(survival) if share > RARE))
    stride = math.ceil((last - first) / (MOST_KNOTS - 3)) or 1
    at = {0: 1.0}
    for number in [*range(max(1, first), last, stride), last]:
        at[math.ceil(edge(number))] = round(survival[number], 4)  # small bins may share a whole number of tokens
    at[max(max(at) + 1, math.ceil(edge(last + 1)))] = 0.0
    return Curve(tuple(at), tuple(at.values()))

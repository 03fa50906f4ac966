"""Which ids the simulated model generates, and where it stops: a pure function of all ids so far.

A running state is folded over the ids; the next id is read from the state, so an id that equals what the state said is
taken as generated. Invariant: `prompt + first part of the answer` goes on exactly as the whole answer would have. It
holds even where a prompt ends by chance in an id the state would have said: the same walk finds the same boundary.
"""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from zlib import crc32

_MULTIPLIER = 0x2545F491
_MASK = (1 << 60) - 1  # two digits of a Python int: the next size up is slower, a 32-bit state runs into short cycles
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Plan:
    """How an input goes on: the state after it, ids already generated at its end, ids still to come if not cut."""

    state: int
    made: int
    left: int  #: the stop id included


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The simulated model. low, high: generated ids are in [low, high); salt: another one is another model."""

    low: int
    high: int
    eos_id: int
    salt: str = ""
    lengths: str = "lognormal"
    mean: float = 200.0
    sigma: float = 0.6

    def plan(self, ids: Sequence[int]) -> Plan:
        """Finds where the prompt ends and the answer begins in `ids`."""
        before = self._absorb(self._start(), ids[:-1])
        end = self._absorb(before, ids[-1:])
        boundary, made = end, 0
        if ids and ids[-1] == self._next(before):  # seldom true of a fresh prompt, so only then the slow walk
            boundary, made = self._walk(ids)
        return Plan(end, made, max(1, self._length(boundary) - made))

    def ids(self, state: int, count: int) -> list[int]:
        """The next `count` ids after a state, none of them the stop id."""
        low, span, out = self.low, self.high - self.low, []
        append = out.append
        for _ in range(count):
            token = low + (state >> 30) % span
            append(token)
            state = (state + token + 1) * _MULTIPLIER & _MASK
        return out

    def first_of(self, wanted: Collection[int], state: int, count: int) -> int:
        """1-based place of the first id of `wanted` among the next `count`; 0 if none is there."""
        hits = {token for token in wanted if self.low <= token < self.high}
        if not hits:
            return 0
        return next((place for place, token in enumerate(self.ids(state, count), 1) if token in hits), 0)

    def _start(self) -> int:
        return crc32(self.salt.encode()) * _MULTIPLIER & _MASK

    def _next(self, state: int) -> int:
        return self.low + (state >> 30) % (self.high - self.low)

    def _absorb(self, state: int, ids: Sequence[int]) -> int:
        for token in ids:
            state = (state + token + 1) * _MULTIPLIER & _MASK
        return state

    def _walk(self, ids: Sequence[int]) -> tuple[int, int]:
        """State at the boundary, and the length of the generated run at the end."""
        low, span, state = self.low, self.high - self.low, self._start()
        boundary, begin = state, 0
        for place, token in enumerate(ids, 1):
            generated = token == low + (state >> 30) % span
            state = (state + token + 1) * _MULTIPLIER & _MASK
            if not generated:
                boundary, begin = state, place
        return boundary, len(ids) - begin

    def _length(self, boundary: int) -> int:
        """Ids of the whole answer, drawn from the state at its beginning."""
        if self.lengths == "fixed":
            return max(1, round(self.mean))
        chance = (crc32(boundary.to_bytes(8, "little")) + 0.5) / 2**32
        if self.lengths == "geometric":
            return 1 + int(math.log(chance) / math.log(1 - 1 / max(self.mean, 1.0001)))
        center = math.log(self.mean) - self.sigma**2 / 2  # so that `mean` is the mean, not the median
        return max(1, round(math.exp(center + self.sigma * _NORMAL.inv_cdf(chance))))


def prompt_hash(ids: Sequence[int]) -> str:
    """The name of a prompt in the statistics: 16 hex digits. Raises OverflowError for ids beyond 64 bits."""
    return blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()

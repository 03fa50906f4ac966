"""What the collector tells about a run: the counts on file, how fast they grow, and sums over all that was written.

It is the one process that sees every answer, so nobody else has to count. A look at Redis then needs no ledger: from
any host the same numbers.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import redis

from app.ledger import DatasetCounts
from app.store.keys import RunKeys

#: Upper bounds of the buckets; the last one is without bound.
LATENCY_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one dataset grew over the last minute."""

    completions_per_second: float = 0.0  #: samples and rejections
    output_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What the collector said last."""

    at: float  #: Redis TIME, in seconds
    since: float  #: the same, when this collector started
    out: str
    recipe: str
    producing: bool  #: a producer or `run` holds the directory
    counts: list[DatasetCounts]
    rates: dict[str, Rate] = field(default_factory=dict)
    trouble: str = ""  #: what the collector waits for

    def dump(self) -> bytes:
        """As it lies in Redis."""
        return orjson.dumps(asdict(self))


def parse_report(text: bytes | None) -> Report | None:
    """What `dump` wrote; None if there is none, or another version wrote it."""
    try:
        said = orjson.loads(text or b"")
        counts = [DatasetCounts(**one) for one in said.pop("counts")]
        rates = {name: Rate(**rate) for name, rate in said.pop("rates").items()}
        return Report(**said, counts=counts, rates=rates)
    except (ValueError, TypeError, KeyError):
        return None


def figure(name: str, *labels: str | int) -> str:
    """The name of a sum in a HASH: what is summed, and for whom (dataset, endpoint, …)."""
    return orjson.dumps([name, *labels]).decode()


def parse_figures(found: Mapping[bytes, bytes]) -> dict[tuple[Any, ...], float]:
    """(name, *labels) → sum."""
    return {tuple(orjson.loads(name)): float(number) for name, number in found.items()}


class Sums:
    """Counts what is written, until it is handed to Redis. One thread's."""

    def __init__(self) -> None:
        self._figures: Counter[str] = Counter()
        self._histograms: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()  #: per dataset, since this process started

    def answer(self, dataset: str, endpoint: str, finish: str, prompt: int, output: int, seconds: float) -> None:
        """An answer of `output` tokens to a prompt of `prompt` tokens, after `seconds`."""
        self.output_tokens[dataset] += output
        self._figures[figure("answers", dataset, endpoint, finish)] += 1
        self._figures[figure("prompt_tokens", dataset, endpoint)] += prompt
        self._figures[figure("output_tokens", dataset, endpoint)] += output
        self._figures[figure("latency_ms", dataset, endpoint)] += round(seconds * 1000)
        self._histograms[figure("latency", dataset, endpoint, bisect_left(LATENCY_SECONDS, seconds))] += 1
        self._histograms[figure("prompt", dataset, bisect_left(TOKENS, prompt))] += 1
        self._histograms[figure("output", dataset, bisect_left(TOKENS, output))] += 1

    def attempts(self, dataset: str, number: int) -> None:
        """Requests sent for a completion; all beyond the first are extra."""
        if number > 1:
            self._figures[figure("extra", dataset)] += number - 1

    def hand_over(self, pipeline: redis.client.Pipeline, keys: RunKeys) -> None:
        """Add all to Redis. What a failing Redis does not take is lost: these are figures, not counts."""
        for key, counter in ((keys.figures, self._figures), (keys.histograms, self._histograms)):
            for name, number in counter.items():
                pipeline.hincrby(key, name, number)
            counter.clear()

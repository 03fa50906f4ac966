"""What a report shows, gathered in one reading of the files.

Invariant: memory grows with the run's duration (a bin each few seconds) and the number of different lengths, never
with rows.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from app.jsonl import iterate, parse
from app.manifest import RunFile
from app.offline.audit import Lengths
from app.offline.redo import responses
from app.rundir import REJECTED, RunDir

BIN_SECONDS = 1.0
#: Nothing in flight for so long is a pause (a stop, an outage), not a gap between two answers.
PAUSE_SECONDS = 30.0
_LATENCY_BINS_PER_OCTAVE = 8
_LEAST_SECONDS = 0.001
_EXAMPLES = 3


@dataclass(slots=True)
class Course:
    """Something over time, in bins: each answer adds to a bin as much as it ran in it, so a bin has the mean over its
    time, and no bin is above what there ever was at once."""

    _changes: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, start: float, end: float, value: float) -> None:
        """`value` from start to end, Unix times."""
        first, last = int(start // BIN_SECONDS), int(end // BIN_SECONDS)
        if first == last:
            self._put(first, first + 1, value * (end - start) / BIN_SECONDS)
            return
        self._put(first, first + 1, value * (first + 1 - start / BIN_SECONDS))
        self._put(first + 1, last, value)
        self._put(last, last + 1, value * (end / BIN_SECONDS - last))

    def _put(self, first: int, until: int, value: float) -> None:
        """`value` in all bins from first on before until."""
        if value and first < until:
            self._changes[first] += value
            self._changes[until] -= value

    def points(self) -> list[tuple[float, float]]:
        """(Unix time of a change, value from then on), in order."""
        total, points = 0.0, []
        for number in sorted(self._changes):
            total += self._changes[number]
            points.append((number * BIN_SECONDS, max(0.0, total if abs(total) > 1e-6 else 0.0)))
        return points


@dataclass(slots=True)
class EndpointFacts:
    """What one endpoint gave."""

    model: str = ""
    versions: set[str] = field(default_factory=set)
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    attempts: int = 0  #: requests sent for its answers, to it or to others
    latency: Counter[int] = field(default_factory=Counter)  #: log bin → answers

    def latency_percentile(self, percent: float) -> float:
        """Seconds that so many of its answers do not exceed, to within a twelfth."""
        left = sum(self.latency.values()) * percent / 100
        for number in sorted(self.latency):
            left -= self.latency[number]
            if left <= 0:
                return latency_edge(number + 1)
        return 0.0


@dataclass(slots=True)
class Report:
    """All of it."""

    out: str
    run_file: RunFile
    inventory: dict[str, Any]
    prompt: dict[str, Lengths] = field(default_factory=dict)  #: per dataset
    output: dict[str, Lengths] = field(default_factory=dict)
    finish: dict[str, Counter[str]] = field(default_factory=dict)
    tokens: Course = field(default_factory=Course)  #: output tokens per second
    in_flight: Course = field(default_factory=Course)
    endpoints: dict[str, EndpointFacts] = field(default_factory=dict)
    rejected: dict[str, Counter[str]] = field(default_factory=dict)  #: reason → dataset → rows
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  #: reason → a few records
    events: list[dict[str, Any]] = field(default_factory=list)  #: `at`, `event`, `endpoint`, `detail`
    first: float = math.inf
    last: float = 0.0

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """Stretches inside the run with nothing in flight."""
        points = self.in_flight.points()
        return [
            (start, end) for (start, value), (end, _) in itertools.pairwise(points)
            if value == 0 and end - start >= PAUSE_SECONDS
        ]  # fmt: skip

    @property
    def working_seconds(self) -> float:
        """From the first request to the last answer, without the pauses."""
        return max(0.0, self.last - self.first - sum(end - start for start, end in self.pauses))

    @property
    def total_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(one.tokens for one in self.endpoints.values())

    @property
    def extra_requests(self) -> int:
        """Requests sent beyond one per answer: what crashes and faults cost."""
        return sum(one.attempts - one.answers for one in self.endpoints.values())


def latency_bin(seconds: float) -> int:
    """Bin of a latency: eight per doubling, from a millisecond."""
    return int(_LATENCY_BINS_PER_OCTAVE * math.log2(max(1.0, seconds * 1000)))


def latency_edge(number: int) -> float:
    """Least latency in a bin, seconds."""
    return 2.0 ** (number / _LATENCY_BINS_PER_OCTAVE) / 1000


def gather(rundir: RunDir, run_file: RunFile, inventory: dict[str, Any]) -> Report:
    """Read raw lines, rejected lines and events once."""
    made = Report(str(rundir.out), run_file, inventory)
    for dataset in rundir.datasets_on_disk():
        made.prompt[dataset], made.output[dataset] = Lengths(), Lengths()
        made.finish[dataset] = Counter()
        for _, line in responses(rundir, dataset):
            _answer(made, dataset, line)
        _rejections(made, rundir, dataset)
    made.events = _events(rundir, made.endpoints)
    return made


def _answer(made: Report, dataset: str, line: dict[str, Any]) -> None:
    tokens, seconds = line["num_output_tokens"], max(_LEAST_SECONDS, line["latency_seconds"])
    start = datetime.fromisoformat(line["started_at"]).timestamp()
    end = start + seconds
    made.first, made.last = min(made.first, start), max(made.last, end)
    made.prompt[dataset].add(line["num_prompt_tokens"])
    made.output[dataset].add(tokens)
    made.finish[dataset][line["finish_reason"]] += 1
    made.tokens.add(start, end, tokens / seconds)
    made.in_flight.add(start, end, 1)
    one = made.endpoints.setdefault(line["endpoint"], EndpointFacts())
    one.model = line["model"]
    one.versions.add(str(made.run_file.servers.get(line["server"], {}).get("version") or "?"))
    one.answers += 1
    one.tokens += tokens
    one.cut += line["finish_reason"] == "length"
    one.attempts += max(1, line["attempt"])
    one.latency[latency_bin(seconds)] += 1


def _rejections(made: Report, rundir: RunDir, dataset: str) -> None:
    for line in iterate(rundir.file(dataset, REJECTED)):
        try:
            record = parse(line.raw)
        except ValueError:
            continue
        reason = record["reason"]
        made.rejected.setdefault(reason, Counter())[dataset] += 1
        examples = made.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(record)


def _events(rundir: RunDir, urls: Collection[str]) -> list[dict[str, Any]]:
    """Lines of the run's event log that can be read and are about these endpoints, or none; [] if there is no log."""
    try:
        lines = rundir.events.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # torn by a kill: a log, nothing that results depend on
        if isinstance(event, dict) and {"at", "event"} <= event.keys() and event.get("endpoint") in (None, *urls):
            events.append(event)
    return events

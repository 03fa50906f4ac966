"""A real process dies at each step from row to sample; the run goes on by itself, and nothing is lost or doubled.

In each run a producer, a worker and a collector die, each at a place of its own. Runs go on at once, since they wait
more than they work; beside them two workers with long tasks, one of which is killed.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.verify import verify
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, extra_requests, ids, run
from tests.crashes import killed_worker

ROWS = 20  # in each of two datasets
AT_ONCE = 2
#: One request at a time, so that a dead worker has at most one in flight.
ENDPOINT = SimulatorConfig(**IDS, output_lengths="fixed", output_mean=8, step_seconds=0.004)
FILES = (RAW, TOKENIZED, REJECTED)


@dataclass(frozen=True)
class Point:
    """Die at the n-th pass of a place; then at least and at most so many requests are made again."""

    name: str
    n: int
    least: int = 0
    most: int = 0


#: Nothing is generated twice when the producer dies.
PRODUCER = [
    Point("row_read", 2), Point("row_registered", 2), Point("row_rendered", 2), Point("payload_offered", 2),
    Point("message_sent", 1),
]  # fmt: skip
#: Only what was in flight, and an answer that was not yet published, is generated again when a worker dies.
WORKER = [
    Point("message_taken", 20, most=1), Point("key_claimed", 20, most=1), Point("lease_granted", 5),
    Point("request_answered", 5, least=1, most=1), Point("response_published", 5, most=1),
    Point("message_acknowledged", 5, most=1),
]  # fmt: skip
#: Nothing is generated twice when the collector dies.
COLLECTOR = [
    Point("entry_read", 2), Point("line_written", 3), Point("raw_line_synced", 2), Point("sample_synced", 2),
    Point("rejection_synced", 2), Point("ledger_committed", 2), Point("key_forgotten", 2),
]  # fmt: skip
RUNS = [tuple(filter(None, points)) for points in itertools.zip_longest(PRODUCER, WORKER, COLLECTOR)]


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    code: int
    died: set[str]
    ids: dict[str, list[str]]
    wrong: str  #: what `verify` says, "" if it is content
    extra: int
    text: str


def play(folder: Path, points: tuple[Point, ...]) -> Outcome:
    """A whole run, in which processes die at these points."""
    folder.mkdir()
    rows = [json.loads(line) for line in (DEMO / "gsm8k.jsonl").open()]
    for name, some in (("brook", rows[:ROWS]), ("stream", [*rows[ROWS : 2 * ROWS - 1], {"question": ""}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    kill_at = ",".join(f"{point.name}:{point.n}@{folder / point.name}" for point in points)
    words = [*sorted(folder.glob("*.jsonl")), "--tokenizer", TOKENIZER, "--max-new-tokens", 8, "--concurrency", 1]
    out = folder / "out"
    with running_simulator(ENDPOINT) as endpoint:
        words += ["--endpoint", endpoint.url]
        with run(out, *words, environment={"HEADRACE_TEST_KILL_AT": kill_at}) as started:
            code, text = started.wait(100), started.text()
        died = {point.name for point in points if (folder / point.name).exists()}
        report = verify(RunDir(out))
        found = {name: ids(out, name) for name in FILES}
        return Outcome(code, died, found, "" if report.ok else report.render(), extra_requests(endpoint), text)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Every run that is asked for, and one that nobody disturbs, as futures."""
    folder = tmp_path_factory.mktemp("crashes")
    here = [item for item in request.session.items if item.module is request.module]
    asked = {item.callspec.params["point"] for item in here if hasattr(item, "callspec")}
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        futures = {"killed worker": pool.submit(killed_worker.play, folder / "killed")}
        for points in ((), *RUNS):
            if not points or asked & set(points):
                futures[points] = pool.submit(play, folder / (points[0].name if points else "undisturbed"), points)
        yield futures


@pytest.mark.parametrize("point", [*PRODUCER, *WORKER, *COLLECTOR], ids=lambda point: point.name)
@pytest.mark.timeout(300)
def test_a_process_that_dies_here_costs_what_the_table_says(point, outcomes):
    """It did die there; the run is complete by itself, with the ids of an undisturbed one, each once."""
    points = next(points for points in RUNS if point in points)
    undisturbed, outcome = outcomes[()].result(), outcomes[points].result()
    assert point.name in outcome.died, f"never passed {point}\n{outcome.text}"
    assert outcome.code == undisturbed.code == 5, outcome.text
    assert not outcome.wrong
    assert undisturbed.extra == 0
    for name in FILES:
        assert sorted(outcome.ids[name]) == sorted(undisturbed.ids[name])
        assert len(set(outcome.ids[name])) == len(outcome.ids[name])
    assert sum(one.least for one in points) <= outcome.extra <= sum(one.most for one in points), outcome.text


@pytest.mark.timeout(300)
def test_a_killed_workers_tasks_run_elsewhere_within_a_minute_and_a_living_ones_once(outcomes):
    """By the defaults: messages return after 30 s; tasks of 42 s at the living worker are kept by its heartbeats."""
    survived = outcomes["killed worker"].result()
    assert survived.elsewhere_seconds < 60
    assert survived.of_the_living == 0
    assert survived.again == 0

"""Rows of several turns: a worker dies with a turn just made, a producer at each step of what follows; none is lost."""

import json
from dataclasses import dataclass

import pytest

from app.rundir import RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.verify import verify
from tests.acceptance.harness import IDS, TOKENIZER, extra_requests, ids, run
from tests.acceptance.test_turns import OLD, assert_groups_are_whole, encoded, records, user, write_rows

pytestmark = pytest.mark.long
ROWS, TURNS = 8, 3
#: Of these only the worker's may cost a request: the one that was in flight beside the turn just made.
POINTS = {"turn_made": 4, "turn_rendered": 2, "turn_advanced": 2, "chat_handed_over": 1}
ENDPOINT = SimulatorConfig(
    **IDS, output_lengths="fixed", output_mean=8, step_seconds=0.004, frames=((encoded("So.</think>"), ()),)
)


@dataclass(frozen=True)
class Outcome:
    """What the run left."""

    code: int
    died: set[str]
    out: RunDir
    extra: int
    text: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """One run, in which a worker dies once and the producer three times."""
    folder = tmp_path_factory.mktemp("turns")
    data, out = folder / "chats.jsonl", folder / "out"
    write_rows(data, [[user(f"{n}, please"), OLD, user("More."), OLD, user("And then?")] for n in range(ROWS)])
    kill_at = ",".join(f"{name}:{n}@{folder / name}" for name, n in POINTS.items())
    with running_simulator(ENDPOINT) as endpoint:
        words = [data, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 64,
                 "--turns", "all", "--concurrency", 1]  # fmt: skip
        with run(out, *words, environment={"HEADRACE_TEST_KILL_AT": kill_at}) as started:
            code, text = started.wait(100), started.text()
        died = {name for name in POINTS if (folder / name).exists()}
        return Outcome(code, died, RunDir(out), extra_requests(endpoint), text)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.timeout(150)
def test_somebody_dies_here_and_the_run_goes_on_by_itself(point, outcome):
    """It did die there, and the run is complete."""
    assert point in outcome.died, outcome.text
    assert outcome.code == 0, outcome.text


def test_every_turn_is_there_once_and_made_once(outcome):
    """All rows with all their turns, in whole groups; a turn that was made is not made again."""
    assert verify(outcome.out).ok
    assert_groups_are_whole(records(outcome.out.out))
    found = ids(outcome.out.out)
    assert len(found) == len(set(found)) == ROWS * TURNS
    assert outcome.extra <= 1, outcome.text
    prompts = [json.dumps(one["prompt_token_ids"]) for one in records(outcome.out.out)]
    assert len(set(prompts)) == len(prompts)  # so that `extra` counts turns, not equal prompts

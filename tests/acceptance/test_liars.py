"""The liar kit: every lie that a simulated server can tell ends in a stated outcome; none enters the files.

docs/operating/endpoints.md holds the table; hangs and lost answers are in tests/integration/test_stalls.py.
"""

import contextlib
import json
from dataclasses import replace

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.faults import ANSWER_FAULTS
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, run, status, verified
from tests.belt import ROOT, until

CONFIG = SimulatorConfig(**IDS, output_mean=20, step_seconds=0.02, health_seconds=0.0)
#: Told by one server each, all at once. A 401 ends the run by design; a hang takes its time elsewhere.
LIES = [name for name in ANSWER_FAULTS if name not in ("unauthorized", "hang")]


def words(*urls: str) -> list[object]:
    """Of a run over one bundled dataset."""
    endpoints = [word for url in urls for word in ("--endpoint", url)]
    return [DEMO / "gsm8k.jsonl", *endpoints, "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--concurrency", 2]


def answers(out) -> dict[str, tuple]:
    """What is on file: id → what was sent, what came back, and why it ended."""
    lines = map(json.loads, (out / "gsm8k" / "raw_responses.jsonl").open("rb"))
    return {one["id"]: (one["prompt_token_ids"], one["output_ids"], one["finish_reason"]) for one in lines}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The answers of a server that never lies: equal prompts get equal answers everywhere."""
    out = tmp_path_factory.mktemp("truth") / "out"
    with running_simulator(CONFIG) as honest, run(out, *words(honest.url), "--concurrency", 40) as started:
        assert started.wait() == 0, started.text()
    return answers(out)


@pytest.mark.timeout(180)
def test_no_lie_about_an_answer_enters_the_files(truth, tmp_path):
    """Seventeen servers, each with its own lie in two of five answers, and an honest one: the run ends, and what is on
    file is the truth, each row once; rows that met three lies are rejected with that reason."""
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running_simulator(CONFIG)) for _ in range(len(LIES) + 1)]
        with run(out, *words(*(server.url for server in servers))) as started:
            until(lambda: sum(server.stats()["in_flight"] for server in servers) > len(LIES), 60, "work everywhere")
            for server, lie in zip(servers, LIES, strict=False):
                server.faults(**{lie: 0.4})
            assert started.wait() in (0, 5), started.text()
        told = {lie: server.stats()["faults"].get(lie, 0) for server, lie in zip(servers, LIES, strict=False)}
    assert [lie for lie, times in told.items() if not times] == []
    found, totals = answers(out), status(out)["totals"]
    assert found.items() <= truth.items()
    assert totals["tokenized"] == len(found)
    assert totals["tokenized"] + totals["rejected"] == len(truth)
    assert set(totals["rejected_by_reason"]) <= {"attempts_exhausted"}
    assert verified(out)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_health_that_lies_neither_ends_nor_feeds_anything(truth, tmp_path):
    """One says 200 and generates nothing, one says 503 and generates, one takes 20 s to say anything: all rows done."""
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        dead, bad, slow = (stack.enter_context(running_simulator(CONFIG)) for _ in range(3))
        bad.faults(health="bad")  # from the start: it has never been ready, and is used all the same
        with run(out, *words(dead.url, bad.url, slow.url)) as started:
            until(lambda: started.lines() > 5, 60, "lines")
            dead.faults(health="ok", internal_error=1.0)
            slow.faults(health="slow")
            assert started.wait() == 0, started.text()
        assert bad.stats()["completed"] > 10
        assert slow.stats()["completed"] > 10
    assert answers(out) == truth
    assert verified(out)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_only_server_says_that_it_leaves_and_stays(truth, tmp_path):
    """503 after a 200, while it generates: nothing new at first; idle for 15 s and still there, its word is void."""
    out = tmp_path / "out"
    with running_simulator(CONFIG) as liar, run(out, *words(liar.url), "--limit", 60) as started:
        until(lambda: started.lines() > 5, 60, "lines")
        liar.faults(health="bad")
        assert started.wait() == 0, started.text()
        assert "it is leaving" in started.text()
        assert "health_lies" in started.text()
    assert answers(out).items() <= truth.items()


@pytest.mark.long
def test_a_401_in_mid_run_ends_it_and_rejects_nothing(tmp_path):
    """No row can succeed until a person changes something: exit 2, one sentence, everything else pending."""
    out = tmp_path / "out"
    with running_simulator(replace(CONFIG, output_mean=40)) as server, run(out, *words(server.url)) as started:
        until(lambda: started.lines() > 5, 60, "lines")
        server.faults(unauthorized=1.0)
        assert started.wait() == 2, started.text()
        assert "wants another API key" in started.log.read_text()
    assert status(out)["totals"]["rejected"] == 0


def test_every_lie_has_its_line_in_the_table():
    """A new lie of the simulator is a new line in the documentation."""
    page = (ROOT / "docs" / "operating" / "endpoints.md").read_text(encoding="utf-8")
    assert [lie for lie in ANSWER_FAULTS if f"`{lie}`" not in page] == []

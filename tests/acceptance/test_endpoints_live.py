"""Endpoints come, go and fall over while a run goes on, as its user sees and steers it."""

import json
from dataclasses import replace

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.faults import Faults
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, ids, run, verified
from tests.belt import until

#: Slow, so that a run lasts until its test says otherwise: FAST.
STEADY = SimulatorConfig(
    **IDS, output_lengths="fixed", output_mean=25, step_seconds=0.02, max_total_num_tokens=24_000,
    faults=Faults(slow=5.0),
)  # fmt: skip
FAST = {"slow": 0.2}
ROWS = 240
NOTE = 'echo "$HEADRACE_CHANGE $HEADRACE_ENDPOINT $HEADRACE_EVIDENCE" >> {}; exit {}'


def listed(out) -> dict[str, dict]:
    """`headrace endpoints list OUT --json`, by URL."""
    done = headrace("endpoints", "list", out, "--json")
    assert done.returncode == 0, done.stderr
    return {one["url"]: one for one in json.loads(done.stdout)["endpoints"]}


def endpoints(verb: str, *words: object) -> None:
    """A change that must succeed."""
    done = headrace("endpoints", verb, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(180)
def test_endpoints_are_listed_drained_added_and_removed_while_the_run_goes_on(tmp_path):
    """Each takes effect in seconds; what runs at a drained one finishes; another model and the last one are refused."""
    out = tmp_path / "out"
    with running_simulator(STEADY) as one, running_simulator(STEADY) as two, running_simulator(STEADY) as three:
        words = [DEMO / "gsm8k.jsonl", DEMO / "glaive_tools.json", "--endpoint", one.url, "--endpoint", two.url,
                 "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--concurrency", 3, "--workers", 2]  # fmt: skip
        with run(out, *words) as started:
            until(lambda: started.lines() > 3, 60, "lines")
            shown = listed(out)
            assert set(shown) == {one.url, two.url}
            assert {(s["state"], s["model"]) for s in shown.values()} == {("closed", STEADY.model_path)}
            assert all(0 <= s["in_flight"] <= 3 and s["kv_tokens"] == 24_000 for s in shown.values())
            assert one.url in headrace("endpoints", "list", out).stdout

            endpoints("drain", out, one.url)
            asked = one.stats()["requests"]
            until(lambda: one.stats()["running"] == 0, what="what ran there finished")
            endpoints("add", out, three.url)
            until(lambda: three.stats()["completed"] > 6, what="the new one is used", seconds=60)
            assert one.stats()["requests"] <= asked + 1  # sent while we asked
            assert one.stats()["aborted"] == 0
            assert listed(out)[one.url]["state"] == "drained"

            endpoints("remove", out, one.url)
            assert set(listed(out)) == {two.url, three.url}
            gone = headrace("endpoints", "drain", out, one.url)
            assert gone.returncode == 2
            assert two.url in gone.stderr
            refused = headrace("endpoints", "remove", out, two.url, three.url)
            assert refused.returncode == 2
            assert "no endpoint left" in refused.stderr
            with running_simulator(replace(STEADY, model_path="simulated/other")) as other:
                refused = headrace("endpoints", "add", out, other.url)
                assert refused.returncode == 6
                assert "simulated/other" in refused.stderr or "teacher → other" in refused.stderr
                assert other.url not in listed(out)
            two.faults(**FAST)
            three.faults(**FAST)
            assert started.wait() == 0, started.text()
    assert len(ids(out)) == len(set(ids(out))) == ROWS
    assert verified(out)
    over = headrace("endpoints", "list", out)
    assert over.returncode == 2
    assert "No run goes on" in over.stderr


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_command_runs_once_when_an_endpoint_is_lost_and_once_when_it_is_back(tmp_path):
    """Two workers see the loss; one command, with the evidence; one that fails is one line of talk; nothing waits."""
    out, notes = tmp_path / "out", tmp_path / "notes"
    with running_simulator(STEADY) as one, running_simulator(STEADY) as two:
        words = [DEMO / "gsm8k.jsonl", "--limit", 70, "--endpoint", one.url, "--endpoint", two.url,
                 "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--concurrency", 2, "--workers", 2,
                 "--on-down", NOTE.format(notes, 3), "--on-up", NOTE.format(notes, 0)]  # fmt: skip
        with run(out, *words) as started:
            until(lambda: started.lines() > 3, 60, "lines")
            one.faults(freeze_seconds=0.1, down_seconds=1.5, load_seconds=1.0)
            one.crash()
            until(lambda: notes.exists() and "up " in notes.read_text(), 30, "both commands ran")
            until(lambda: "ended with 3" in started.log.read_text(), what="the failure is told")
            one.faults(**FAST)
            two.faults(**FAST)
            assert started.wait() == 0, started.text()
        down, up = notes.read_text().splitlines()
        assert down.startswith(f"down {one.url} ")
        assert len(down.split()) > 3  # and the evidence
        assert up.startswith(f"up {one.url} ")
        assert started.log.read_text().count("--on-down") == 1
    assert verified(out)

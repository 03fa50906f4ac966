"""Servers that are not the run's: held and named, accepted only when asked for, and nothing of theirs in the files."""

import json
from dataclasses import replace

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, run, status, verified
from tests.belt import until

pytestmark = pytest.mark.timeout(300)  # real processes, on a machine that may be busy
STEADY = SimulatorConfig(**IDS, output_mean=30, step_seconds=0.02, max_total_num_tokens=24_000)
OTHER = "simulated/student"


def words(*urls, limit=60):
    """Arguments of a run over the bundled rows."""
    endpoints = [word for url in urls for word in ("--endpoint", url)]
    return [DEMO / "gsm8k.jsonl", *endpoints, "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--limit", limit]


def raw(out):
    """The lines of all raw_responses.jsonl."""
    return [json.loads(line) for path in out.glob("*/raw_responses.jsonl") for line in path.open("rb")]


def run_file(out):
    """run.json."""
    return json.loads((out / "run.json").read_text())


def test_another_model_in_mid_run_ends_it_with_exit_6_and_nothing_of_it_in_the_files(tmp_path):
    """The only endpoint comes back as another model: both are named, held in mid-run and refused at the next start."""
    out = tmp_path / "out"
    with running_simulator(STEADY) as one:
        with run(out, *words(one.url), "--concurrency", 4) as started:
            until(lambda: started.lines() > 10, 90, what="lines on disk")
            one.faults(freeze_seconds=0.1, down_seconds=0.3, model_after_restart=OTHER)
            one.crash()
            assert started.wait(150) == 6, started.text()
        told = started.log.read_text()
        assert "simulated/teacher → simulated/student" in told
        assert f"{one.url} is held" in told
        assert "No endpoint serves the run's model any more" in told
        again = headrace("run", "--out", out, *words(one.url))
        assert again.returncode == 6
        assert "simulated/teacher → simulated/student" in again.stderr
    assert {line["model"] for line in raw(out)} == {STEADY.model_path}
    assert 10 < len(raw(out)) < 60
    assert verified(out)


@pytest.mark.long
def test_a_pool_smaller_than_the_context_is_told_and_rows_beyond_it_are_not_sent(tmp_path):
    """It would cut their answers short without a word; four of these prompts have 94 to 141 tokens."""
    out = tmp_path / "out"
    with running_simulator(replace(STEADY, max_total_num_tokens=150, step_seconds=0.001)) as one:
        done = headrace("run", "--out", out, *words(one.url, limit=20))
    assert done.returncode == 5, done.stderr
    assert f"{one.url}: its KV pool (150 tokens) is smaller than its context (32,768)" in done.stderr
    assert max(line["num_prompt_tokens"] for line in raw(out)) + 64 <= 148
    assert all(line["finish_reason"] == "stop" or line["num_output_tokens"] == 64 for line in raw(out))
    assert status(out)["totals"]["rejected_by_reason"] == {"too_long": 4}
    assert verified(out)


@pytest.mark.long
def test_the_others_go_on_while_one_is_held_and_what_is_allowed_is_used_and_recorded(tmp_path):
    """Two endpoints, one with another KV dtype: held, and named by status; with --allow-drift both serve."""
    out = tmp_path / "out"
    other = replace(STEADY, kv_cache_dtype="fp8_e5m2")
    with running_simulator(STEADY) as one, running_simulator(other) as two:
        arguments = words(one.url, two.url, limit=20)
        with run(out, *arguments) as started:
            assert started.wait() == 0, started.text()
        assert {line["endpoint"] for line in raw(out)} == {one.url}
        assert f"{two.url} is held: it serves something else" in started.log.read_text()
        assert "kv_cache_dtype auto → fp8_e5m2" in started.log.read_text()
        assert not run_file(out)["accepted_drift"]
        arguments = [*words(one.url, two.url), "--concurrency", 4]
        with run(out, *arguments, "--allow-drift", "kv_cache_dtype") as started:
            assert started.wait() == 0, started.text()
        assert two.stats()["completed"] > 2
    assert run_file(out)["accepted_drift"] == ["kv_cache_dtype"]
    servers = run_file(out)["servers"]
    assert {servers[line["server"]]["kv_cache_dtype"] for line in raw(out)} == {"auto", "fp8_e5m2"}
    assert verified(out)


@pytest.mark.long
def test_a_requirement_is_refused_at_the_start_and_held_while_running(tmp_path):
    """No endpoint meets it: exit 6, in a sentence. One of two meets it: that one is used. Nonsense: exit 2."""
    out = tmp_path / "out"
    with running_simulator(STEADY) as one, running_simulator(replace(STEADY, kv_cache_dtype="fp8_e5m2")) as two:
        alone = headrace("run", "--out", out, *words(two.url, limit=3), "--require", "kv_cache_dtype=auto")
        assert alone.returncode == 6
        assert "--require kv_cache_dtype=auto, and it has fp8_e5m2" in alone.stderr
        with run(out, *words(two.url, one.url, limit=3), "--require", "kv_cache_dtype=auto") as started:
            assert started.wait() == 0, started.text()
    assert {line["endpoint"] for line in raw(out)} == {one.url}
    wrong = headrace("run", "--out", out, *words(one.url), "--require", "colour=red")
    assert wrong.returncode == 2
    assert "kv_cache_dtype=auto" in wrong.stderr

"""`headrace run` as its user meets it: real files, real processes, simulated servers; parts of it killed on the way."""

import json
import os
import signal
from dataclasses import replace

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, ids, run, status, verified
from tests.belt import ROOT, until

DATA = ROOT / "tests" / "data" / "datasets"
INPUTS = (DEMO / "gsm8k.jsonl", DEMO / "glaive_tools.json")
ROWS = 240
STEADY = SimulatorConfig(**IDS, output_mean=40, step_seconds=0.02, max_total_num_tokens=24_000)


def arguments(*urls: str) -> list[object]:
    """Of a run over both bundled datasets."""
    endpoints = [word for url in urls for word in ("--endpoint", url)]
    return [*INPUTS, *endpoints, "--tokenizer", TOKENIZER, "--max-new-tokens", 128]


@pytest.fixture(scope="module")
def two_endpoints():
    """Two simulated servers that all runs of this module use."""
    with running_simulator(STEADY) as one, running_simulator(STEADY) as two:
        yield one, two


@pytest.fixture(scope="module")
def undisturbed(two_endpoints, tmp_path_factory):
    """Ids of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    with run(out, *arguments(*(endpoint.url for endpoint in two_endpoints))) as started:
        assert started.wait() == 0, started.text()
    found = ids(out)
    assert len(found) == len(set(found)) == ROWS
    return set(found)


def assert_whole(out, undisturbed):
    """Every id once, and the same ids as without disturbance."""
    found = ids(out)
    assert len(found) == len(set(found))
    assert set(found) == undisturbed
    assert verified(out)


def test_mixed_files_run_once_and_again_sends_nothing(two_endpoints, tmp_path):
    """Seven files of seven formats; blns holds empty rows: exit 5; the same again: exit 5 and not one request."""
    named = {
        "gsm8k": "gsm8k.jsonl", "glaive": "glaive_toolcall.json", "mt_bench": "mt_bench.jsonl",
        "humaneval": "humaneval.jsonl.gz", "arena": "arena_hard.jsonl", "arith": "arith.parquet", "blns": "blns.json",
    }  # fmt: skip
    words = [f"{name}={DATA / file}" for name, file in named.items()]
    words += [word for endpoint in two_endpoints for word in ("--endpoint", endpoint.url)]
    words += ["--tokenizer", str(TOKENIZER), "--max-new-tokens", "64"]
    out = tmp_path / "out"
    with run(out, *words) as started:
        assert started.wait() == 5, started.text()
    shown = status(out)
    totals = shown["totals"]
    assert shown["complete"]
    assert totals["rows"] == totals["tokenized"] + totals["rejected"]
    assert totals["pending"] == totals["orphans"] == 0
    assert set(totals["rejected_by_reason"]) == {"empty_prompt"}
    assert {one["dataset"] for one in shown["datasets"]} == set(named)
    assert verified(out)
    before = [endpoint.stats()["requests"] for endpoint in two_endpoints]
    with run(out, *words) as again:
        assert again.wait(30) == 5, again.text()
    assert [endpoint.stats()["requests"] for endpoint in two_endpoints] == before


@pytest.mark.long
def test_a_dataset_added_to_a_complete_run_is_run(two_endpoints, tmp_path):
    """Whether the command names the first one again or not."""
    out = tmp_path / "out"
    lines = (DEMO / "gsm8k.jsonl").read_text().splitlines(keepends=True)
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[5 * number : 5 * number + 5]))
    words = ["--endpoint", two_endpoints[0].url, "--tokenizer", TOKENIZER, "--max-new-tokens", 16]
    for inputs, counts in (
        (["a"], {"a": 5}), (["a", "b"], {"a": 5, "b": 5}), (["c"], {"a": 0, "b": 0, "c": 5}),
    ):  # fmt: skip
        with run(out, *(tmp_path / f"{name}.jsonl" for name in inputs), *words) as started:
            assert started.wait() == 0, started.text()
        shown = status(out)
        assert shown["complete"]
        assert {one["dataset"]: one["tokenized"] for one in shown["datasets"]} == counts
    assert len(ids(out)) == 15
    assert verified(out)


@pytest.mark.parametrize(
    "victim",
    [("worker",), *(pytest.param((name,), marks=pytest.mark.long) for name in ("collect", "produce", "valkey-server"))],
    ids=["worker", "collect", "produce", "valkey-server"],
)  # fmt: skip
def test_a_killed_process_is_replaced_and_nothing_is_lost(victim, two_endpoints, undisturbed, tmp_path):
    """SIGKILL of each process in mid-run: what it had started ends with it, the run goes on and ends complete."""
    out = tmp_path / "out"
    with run(out, *arguments(*(endpoint.url for endpoint in two_endpoints))) as started:
        until(lambda: started.lines() > 30, 60, what="lines on disk")
        child = started.child(*victim)
        below = child.children(recursive=True)
        child.send_signal(signal.SIGKILL)
        until(lambda: not any(process.is_running() for process in below), what="its own children end with it")
        assert started.wait() == 0, started.text()
    assert_whole(out, undisturbed)


@pytest.mark.long
def test_a_redis_that_cannot_start_is_tried_again(two_endpoints, undisturbed, tmp_path):
    """Killed, and at first it ends at once when it is started (a full disk does that, too): said, and tried again."""
    out = tmp_path / "out"
    with run(out, *arguments(*(endpoint.url for endpoint in two_endpoints))) as started:
        until(lambda: started.lines() > 30, 60, what="lines on disk")
        manifest = out / ".headrace" / "redis" / "appendonlydir" / "appendonly.aof.manifest"
        kept = manifest.read_bytes()
        manifest.write_text("no manifest")
        started.child("valkey-server").send_signal(signal.SIGKILL)
        until(lambda: "ended at once" in started.text(), what="it said that it cannot start")
        manifest.write_bytes(kept)
        assert started.wait() == 0, started.text()
    assert_whole(out, undisturbed)


@pytest.mark.long  # the seeds of tests/chaos do it, too
def test_everything_killed_at_once_resumes(two_endpoints, undisturbed, tmp_path):
    """SIGKILL of the whole run, twice; then the same command completes it."""
    out = tmp_path / "out"
    words = arguments(*(endpoint.url for endpoint in two_endpoints))
    for least in (20, 90):
        with run(out, *words) as started:
            until(lambda started=started, least=least: started.lines() > least, what="lines on disk")
            for process in started.everything():
                process.send_signal(signal.SIGKILL)
    with run(out, *words) as started:
        assert started.wait() == 0, started.text()
    assert_whole(out, undisturbed)


@pytest.mark.long
def test_the_supervisor_alone_killed_takes_everything_with_it(two_endpoints, undisturbed, tmp_path):
    """SIGKILL of the supervisor: its children end by themselves, and the same command may start at once."""
    out = tmp_path / "out"
    words = arguments(*(endpoint.url for endpoint in two_endpoints))
    with run(out, *words) as started:
        until(lambda: started.lines() > 20, what="lines on disk")
        children = started.everything()[1:]
        os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait()
        with run(out, *words) as again:
            assert again.wait() == 0, again.text()
        until(lambda: not any(child.is_running() for child in children), what="no orphan is left")
    assert_whole(out, undisturbed)


def test_endpoint_crashes_cost_nothing_but_time(undisturbed, tmp_path):
    """Several crashes of both endpoints on the way: complete, nothing rejected."""
    out = tmp_path / "out"
    with running_simulator(STEADY) as one, running_simulator(STEADY) as two:
        for endpoint in (one, two):
            endpoint.faults(crash_after_completions=30, crashes_left=2, freeze_seconds=0.3, down_seconds=1.0)
        with run(out, *arguments(one.url, two.url)) as started:
            assert started.wait() == 0, started.text()
        assert one.stats()["crashes"] + two.stats()["crashes"] >= 3
    assert_whole(out, undisturbed)
    events = [json.loads(line)["event"] for line in (out / ".headrace" / "events.jsonl").open()]
    assert events.count("endpoint_down") >= 3  # `headrace report` marks them
    assert "endpoint_up" in events


@pytest.mark.long
def test_an_endpoint_that_comes_later_and_differs_a_little_belongs_to_the_run(two_endpoints, tmp_path):
    """Away at the start, met by a worker, of another context: run.json lists it, and verify holds."""
    out, config = tmp_path / "out", replace(STEADY, context_length=16_384)
    with running_simulator(config) as late:
        late.refuse()
        with run(out, *arguments(two_endpoints[0].url, late.url), "--concurrency", 16) as started:
            until(lambda: started.lines() > 10, what="lines on disk")
            late.accept()
            assert started.wait() == 0, started.text()
        assert late.stats()["completed"] > 1  # more than the canary
    assert verified(out)


def test_ctrl_c_drains_and_the_same_command_resumes(two_endpoints, undisturbed, tmp_path):
    """SIGINT: running requests finish, the rest goes back, exit 3; then the same command completes the run."""
    out = tmp_path / "out"
    words = arguments(*(endpoint.url for endpoint in two_endpoints))
    with run(out, *words) as started:
        until(lambda: started.lines() > 20, what="lines on disk")
        started.process.send_signal(signal.SIGINT)
        assert started.wait(40) == 3, started.text()
        assert not started.everything()
    shown = status(out)
    assert shown["run"]["state"] == "stopped"
    assert shown["totals"]["rows"] == ROWS
    with run(out, *words) as started:
        assert started.wait() == 0, started.text()
    assert_whole(out, undisturbed)


def test_a_second_run_on_the_directory_is_refused_by_name_of_the_holder(two_endpoints, tmp_path):
    """Exit 2, a sentence with host and pid of the holder; the first run is not disturbed."""
    out = tmp_path / "out"
    words = arguments(*(endpoint.url for endpoint in two_endpoints))
    with run(out, *words) as started:
        until(lambda: started.lines() > 5, what="lines on disk")
        worker = started.child(" worker ")
        worker.suspend()  # or the first run is over before the second one looks
        second = headrace("run", "--out", out, *words)
        worker.resume()
        assert second.returncode == 2
        assert str(started.process.pid) in second.stderr
        assert started.wait() == 0, started.text()


def test_another_recipe_is_refused_with_the_difference(two_endpoints, undisturbed, tmp_path):
    """Started again with another temperature: exit 6 and what differs."""
    out = tmp_path / "out"
    words = [*arguments(two_endpoints[0].url), "--limit", 3]
    with run(out, *words) as started:
        assert started.wait() == 0, started.text()
    other = headrace("run", "--out", out, *words, "--temperature", 0.3)
    assert other.returncode == 6
    assert "temperature: 1.0 → 0.3" in other.stderr

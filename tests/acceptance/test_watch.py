"""A run as those see it who only look: from its own host, from another one."""

import json
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.embedded import noted_address
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, run, status
from tests.belt import ROOT, until

SLOW = SimulatorConfig(**IDS, output_mean=60, step_seconds=0.03, max_total_num_tokens=12_000, max_running_requests=24)


@pytest.fixture(scope="module")
def going(tmp_path_factory):
    """A run of some seconds, in its midst; its private Redis's URL."""
    out = tmp_path_factory.mktemp("watched") / "out"
    with running_simulator(SLOW) as endpoint:
        words = [DEMO / "gsm8k.jsonl", "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 128]
        with run(out, *words) as started:
            until(lambda: started.lines() > 10, what="first answers")
            yield started, noted_address(out / ".headrace" / "redis")


def watch(*words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "watch", *map(str, words)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_scrape_in_mid_run_parses_and_agrees(going):
    """`headrace metrics OUT`: on loopback, the numbers of the run."""
    started, _ = going
    command = [sys.executable, "-m", "app.cli.main", "metrics", str(started.out), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) as served:
        try:
            url = served.stderr.readline().split()[-1]
            with urllib.request.urlopen(url, timeout=10) as answer:
                families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
        finally:
            served.kill()
    assert url.startswith("http://127.0.0.1:")
    assert families["headrace_rows"].samples[0].labels == {"dataset": "gsm8k"}
    assert families["headrace_rows"].samples[0].value == status(started.out)["totals"]["rows"]
    assert families["headrace_endpoint_up"].samples[0].value == 1


def test_near_and_far_see_the_same_run_to_its_end(going):
    """`watch OUT` from the ledger, `watch --redis` from what the collector says: every number is there, both end."""
    started, url = going
    near, far = watch(started.out, "--json", "--every", 0.5), watch("--redis", url, "--json", "--every", 0.5)
    from_near, _ = near.communicate(timeout=90)
    far.terminate()  # its Redis was the run's own, and went with it: it would wait for ever
    from_far, _ = far.communicate(timeout=30)
    said = [[json.loads(line) for line in text.splitlines()] for text in (from_near, from_far)]
    assert started.wait() == 0, started.text()
    assert near.returncode == 0
    for lines in said:
        assert len(lines) >= 3
        busy = max(lines, key=lambda one: one["totals"]["in_flight"])
        assert busy["endpoints"][0]["in_flight_tokens"] > 0
        assert busy["endpoints"][0]["budget_tokens"] > 0
        assert any(worker["leases"] > 0 for one in lines for worker in one["workers"])  # they give signs every 5 s
        assert any(one["oldest_request"]["id"].startswith("gsm8k:") for one in lines)
        assert any(one["eta_seconds"] > 0 for one in lines)
        assert any(one["output_tokens_per_second"] > 0 for one in lines)
    final = said[0][-1]
    assert final["complete"]
    assert final["totals"] == status(started.out)["totals"]
    assert said[1][-1]["totals"]["tokenized"] > said[1][0]["totals"]["tokenized"]


def test_a_host_without_the_run_says_what_it_needs(tmp_path, redis_url):
    """No directory and no Redis, or a Redis without runs: one sentence each, exit 2."""
    for words in ([], [tmp_path / "none"], ["--redis", redis_url]):
        done = headrace("watch", *words)
        assert done.returncode == 2
        assert "--r" in done.stderr
        assert "Traceback" not in done.stderr

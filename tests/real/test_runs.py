"""Whole runs against a real SGLang: formats and tools mixed, every promise checked afterwards."""

import asyncio
import os
import shlex
import subprocess

import pytest
from pydantic import SecretStr

from tests.acceptance.harness import DEMO, headrace, ids, run, status, verified
from tests.belt import ROOT
from tests.real.prompt_ids import compare
from tests.real.runs import finished, raw
from tests.real.server import get, metric

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
DATA = ROOT / "tests" / "data" / "datasets"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The folder of the mixed run, which later tests look into."""
    return tmp_path_factory.mktemp("mixed") / "out"


def test_a_mixed_dataset_with_tools_runs_once_and_again_sends_nothing(run_words, target, mixed):
    """Six files of six formats, two with tools; parity with /v1/tokenize is asked at the start; all promises hold."""
    named = {
        "gsm8k": DEMO / "gsm8k.jsonl", "tools": DEMO / "glaive_tools.json", "bfcl": DATA / "bfcl_live_simple.json",
        "code": DATA / "humaneval.jsonl.gz", "arith": DATA / "arith.parquet", "odd": DATA / "blns.json",
    }  # fmt: skip
    words = run_words(*(f"{name}={path}" for name, path in named.items()))
    with run(mixed, *words, "--limit", 20) as started:
        assert started.wait(600) == 5, started.text()
    shown = status(mixed)
    assert shown["complete"]
    assert shown["totals"]["rows"] == shown["totals"]["tokenized"] + shown["totals"]["rejected"]
    assert set(shown["totals"]["rejected_by_reason"]) <= {"empty_prompt", "control_tokens", "too_long", "empty_output"}
    assert {one["dataset"] for one in shown["datasets"]} == set(named)
    assert verified(mixed)
    before = metric(target.url, "sglang:num_requests_total")
    with run(mixed, *words, "--limit", 20) as again:
        assert again.wait(120) == 5, again.text()
    assert metric(target.url, "sglang:num_requests_total") - before <= 3  # the canary, and what the server asks itself


def test_answers_end_in_both_ways_and_the_stop_id_stays(mixed):
    """The stop token is the last id of the answer and of its sample, with its mask at 1."""
    lines = raw(mixed)
    for line in lines:
        if line["finish_reason"] == "stop":
            assert line["matched"] == str(line["output_ids"][-1])
        else:
            assert len(line["output_ids"]) == line["max_new_tokens"]
    assert {line["finish_reason"] for line in lines} == {"length", "stop"}


def test_prompts_are_the_servers_own(target):
    """Over rows of every shape, tools among them."""
    assert asyncio.run(compare(target.url, target.tokenizer, DATA, 60, SecretStr(target.key))) == 0


def test_the_trainers_load_the_samples(mixed):
    """CONSUMERS: the command of a check that takes a tokenized_data.jsonl and ends with 0."""
    command = os.environ.get("CONSUMERS")
    if not command:
        pytest.skip("CONSUMERS is not given")
    files = sorted(mixed.glob("*/tokenized_data.jsonl"))
    assert files
    for path in files:
        done = subprocess.run([*shlex.split(command), path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_server_counts_is_what_the_files_hold(run_words, target, tmp_path):
    """Tokens generated according to /metrics: those of the files, and a canary's few beside them."""
    if get(target.url, "/metrics").status_code != 200:
        pytest.skip("the server was started without --enable-metrics")
    out = tmp_path / "out"
    before = metric(target.url, "sglang:generation_tokens_total")
    with run(out, *run_words(DEMO / "gsm8k.jsonl", urls=(target.url,)), "--limit", 25) as one:
        assert finished(one), one.text()
    made = sum(line["num_output_tokens"] for line in raw(out))
    counted = metric(target.url, "sglang:generation_tokens_total") - before
    assert 0 <= counted - made <= 16
    assert len(ids(out)) == 25
    assert verified(out)


def test_plan_reads_what_the_server_holds(run_words, target):
    """What it holds is what it says."""
    info = get(target.url, "/server_info", target.key).json()
    done = headrace("plan", "--endpoint", target.url, "--avg-tokens", 500, "--json")
    assert done.returncode == 0, done.stderr
    assert str(info["max_total_num_tokens"]) in done.stdout

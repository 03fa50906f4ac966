"""Producer, worker and collector started apart on one Redis: what ends them, and how its endpoints are looked at."""

import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from app.sglang.simulator import Faults, SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, launched, run, status, verified
from tests.belt import until, worker

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # real processes, on a machine that may be busy
STEADY = SimulatorConfig(**IDS, output_mean=30, step_seconds=0.02, max_total_num_tokens=24_000)
NOTE = 'echo "$HEADRACE_CHANGE $HEADRACE_ENDPOINT $HEADRACE_EVIDENCE" >> {}'


@contextmanager
def apart(out, redis_url, tmp_path, data, *urls, options=(), collecting=()):
    """`enqueue`, a worker and `collect`; gives the producer and the collector."""
    endpoints = [word for url in urls for word in ("--endpoint", url)]
    words = [data, *endpoints, "--redis", redis_url, "--tokenizer", TOKENIZER, "--max-new-tokens", 64, *options]
    with ExitStack() as stack:
        producer = stack.enter_context(run(out, *words, command="enqueue"))
        stack.enter_context(worker(redis_url, tmp_path))
        words = ["collect", out, "--redis", redis_url, "--run-wait", 60, *collecting]
        yield producer, stack.enter_context(launched(out, *words))


def test_one_serves_another_model_and_the_other_never_returns(redis_url, tmp_path):
    """Commands run at the collector, endpoints are listed and drained by Redis alone; then the producer ends with 6."""
    out, notes = tmp_path / "out", tmp_path / "notes"
    with running_simulator(STEADY) as one, running_simulator(STEADY) as two:
        words = {"options": ["--concurrency", 2, "--drift-wait", 8], "collecting": ["--on-down", NOTE.format(notes)]}
        with apart(out, redis_url, tmp_path, DEMO / "gsm8k.jsonl", one.url, two.url, **words) as (producer, collector):
            until(lambda: collector.lines() > 4, 90, "lines on disk")
            listed = json.loads(headrace("endpoints", "list", "--redis", redis_url, "--json").stdout)["endpoints"]
            assert {endpoint["url"] for endpoint in listed} == {one.url, two.url}
            assert headrace("endpoints", "drain", "--redis", redis_url, two.url).returncode == 0
            assert "drained" in headrace("endpoints", "list", "--redis", redis_url).stdout
            assert headrace("endpoints", "add", "--redis", redis_url, two.url).returncode == 0

            one.faults(freeze_seconds=0.1, down_seconds=0.3, model_after_restart="simulated/student")
            one.crash()
            two.faults(freeze_seconds=0.1, down_seconds=3600.0)
            two.crash()
            assert producer.wait(120) == 6, producer.text()
            assert f"{one.url}: " in producer.log.read_text()
            assert "simulated/teacher → simulated/student" in producer.log.read_text()
            down = until(lambda: {line.split()[1] for line in notes.read_text().splitlines()}, what="a command ran")
            until(lambda: len(notes.read_text().splitlines()) >= 2, what="for both")
            assert down <= {one.url, two.url}
            assert len(notes.read_text().splitlines()) == 2
    assert status(out)["totals"]["rejected"] == 0
    assert verified(out)


def test_a_parameter_that_rows_are_refused_for_ends_the_producer_and_rejects_nothing(redis_url, tmp_path):
    """Exit 2 with the endpoint's answer; every row is pending."""
    out = tmp_path / "out"
    config = replace(STEADY, instant=True, faults=Faults(refuse_above_new_tokens=16))
    with running_simulator(config) as one:
        words = {"options": ["--limit", 60]}
        with apart(out, redis_url, tmp_path, DEMO / "gsm8k.jsonl", one.url, **words) as (producer, _):
            assert producer.wait(150) == 2, producer.text()
            assert "refused each of" in producer.log.read_text()
    totals = status(out)["totals"]
    assert (totals["rejected"], totals["generated"], totals["pending"]) == (0, 0, 60)

"""Others at the same server abort, pause and swap weights while a run goes on. It must be nobody else's server."""

import asyncio
import time
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from app.sglang.client import SGLangClient, new_rid
from app.sglang.sampling import sampling_body
from tests.acceptance.harness import DEMO, headrace, run, status, verified
from tests.belt import until
from tests.real.runs import finished, raw
from tests.real.server import get, metric, post

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROWS = 24


@contextmanager
def under_way(out, words):
    """A run of some length at one server, with lines on disk and requests in flight."""
    with run(out, *words, "--limit", ROWS, "--concurrency", 4) as started:
        until(lambda: started.lines() > 4, 240, what="lines on disk")
        yield started


@pytest.fixture
def words(run_words, target):
    """Of such a run."""
    return run_words(DEMO / "gsm8k.jsonl", urls=(target.url,), max_new_tokens=100)


def test_answers_that_somebody_aborts_are_made_again(words, target, tmp_path):
    """Three times everything that runs; no row pays for it."""
    out = tmp_path / "out"
    with under_way(out, words) as started:
        for _ in range(3):
            until(lambda: _running(target) > 2, 60, what="requests in flight")
            assert post(target.url, "/abort_request", {"abort_all": True}, target.key).status_code == 200
        assert finished(started), started.text()
    assert len(raw(out)) == ROWS
    assert max(line["attempt"] for line in raw(out)) > 1
    assert verified(out)


def test_a_request_that_we_give_up_stops_at_the_server(target):
    """Cancelled on our side: seconds later nothing of it runs there."""

    async def ask():
        async with SGLangClient(SecretStr(target.key)) as client:
            sampling = sampling_body({"max_new_tokens": 1500, "ignore_eos": True})
            request = client.generate(target.url, [300] * 20, sampling, rid=new_rid(), deadline_seconds=0.7)
            with pytest.raises(Exception, match="no answer within"):
                await request

    asyncio.run(ask())
    until(lambda: _running(target) == 0, 30, what="nothing running")


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_is_waited_out(words, target, tmp_path, mode):
    """Whether the server keeps, pushes back or aborts what it runs."""
    out = tmp_path / "out"
    with under_way(out, words) as started:
        assert post(target.url, "/pause_generation", {"mode": mode}, target.key).status_code == 200
        try:
            time.sleep(8)  # what is in flight has settled, and the server was looked at some times
            assert started.process.poll() is None
            assert "it is paused" in started.text()
        finally:
            assert post(target.url, "/continue_generation", {}, target.key).status_code == 200
        assert finished(started), started.text()
    assert len(raw(out)) == ROWS
    assert "attempts_exhausted" not in status(out)["totals"]["rejected_by_reason"]
    assert verified(out)


def test_weights_of_another_version_end_the_run_and_leave_nothing_in_the_files(words, target, tmp_path):
    """Exit 6 with both versions named; when the old one is back, the same command completes the run."""
    out = tmp_path / "out"
    before = get(target.url, "/model_info", target.key).json()["weight_version"]
    with under_way(out, words) as started:
        try:
            assert _renamed(target, "another")
            assert started.wait(240) == 6, started.text()
            assert f"weight_version {before} → another" in started.log.read_text()
            again = headrace("run", "--out", out, *words, "--limit", ROWS, timeout=240)
            assert again.returncode == 6, again.stderr
        finally:
            assert _renamed(target, before)
    assert 4 < len(raw(out)) < ROWS
    with run(out, *words, "--limit", ROWS) as started:
        assert finished(started), started.text()
    assert len(raw(out)) == ROWS
    assert verified(out)


def test_weights_loaded_from_another_folder_end_the_run(words, target, models, tmp_path):
    """Under the version of the old ones: the folder gives them away."""
    out = tmp_path / "out"
    with under_way(out, words) as started:
        try:
            assert _loaded(target, models[1])
            assert started.wait(240) == 6, started.text()
            assert f"model {models[0].name} → {models[1].name}" in started.log.read_text()
        finally:
            assert _loaded(target, models[0])
    assert {line["model"].rsplit("/", 1)[-1] for line in raw(out)} == {models[0].name}
    assert verified(out)


def _renamed(target, version):
    body = {"new_version": version, "abort_all_requests": False}
    return post(target.url, "/update_weight_version", body, target.key).json()["success"]


def _loaded(target, folder):
    body = {"model_path": str(folder)}
    return post(target.url, "/update_weights_from_disk", body, target.key).json()["success"]


def _running(target):
    return metric(target.url, "sglang:num_running_reqs")

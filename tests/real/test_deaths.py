"""A real server dies in mid-run, in each of the ways in which it can: nothing is lost, nothing is twice."""

import json

import httpx
import pytest

from tests.acceptance.harness import DEMO, run, status, verified
from tests.belt import until
from tests.real.runs import finished, raw
from tests.real.server import post

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROWS = 40


@pytest.fixture(scope="module")
def victim(serve):
    """The server that dies; each test brings it back."""
    with serve() as server:
        yield server


def under_way(started, url):
    """Until lines of this server are on disk, and more is on its way."""
    until(lambda: sum(line["endpoint"] == url for line in raw(started.out)) > 4, 240, what=f"lines from {url}")


def assert_whole(out):
    """Each row once, none given up for the server's death."""
    assert len(raw(out)) == ROWS
    assert set(status(out)["totals"]["rejected_by_reason"]) <= {"empty_output"}
    assert verified(out)


def test_another_server_takes_over_when_the_scheduler_is_killed(victim, target, run_words, tmp_path):
    """The dead one keeps its sockets open and silent for seconds, and never comes back in this run."""
    out = tmp_path / "out"
    words = run_words(DEMO / "gsm8k.jsonl", urls=(victim.url, target.url), max_new_tokens=100)
    with run(out, *words, "--limit", ROWS, "--concurrency", 4) as started:
        under_way(started, victim.url)
        victim.kill_scheduler()
        assert finished(started), started.text()
        victim.wait_gone()
    assert_whole(out)


def test_a_run_waits_for_its_only_server_and_goes_on(victim, run_words, tmp_path):
    """SIGKILL of the main process with requests in flight; started again on the same port."""
    out = tmp_path / "out"
    if not victim.alive:
        victim.start()
        victim.wait_ready()
    words = run_words(DEMO / "gsm8k.jsonl", urls=(victim.url,), max_new_tokens=100)
    with run(out, *words, "--limit", ROWS, "--concurrency", 4) as started:
        under_way(started, victim.url)
        victim.kill()
        victim.start()
        victim.wait_ready()
        assert finished(started), started.text()
    assert_whole(out)


def test_a_server_that_is_told_to_stop_gets_nothing_new_and_finishes_what_it_has(victim, target, run_words, tmp_path):
    """SIGTERM: it exits soon although the run goes on, and none of its answers is lost or made twice."""
    out = tmp_path / "out"
    words = run_words(DEMO / "gsm8k.jsonl", urls=(victim.url, target.url), max_new_tokens=100)
    with run(out, *words, "--limit", ROWS, "--concurrency", 4) as started:
        under_way(started, victim.url)
        victim.terminate()
        victim.wait_gone(60)
        assert finished(started), started.text()
    assert_whole(out)
    assert [line["attempt"] for line in raw(out)] == [1] * ROWS


@pytest.mark.parametrize("what", ["an id beyond the vocabulary", "a bias beyond 32 bits"])
def test_what_we_refuse_to_send_kills_a_server(victim, what):
    """What our own checks are for: sent by hand, past them."""
    if not victim.alive:
        victim.start()
        victim.wait_ready()
    ids, sampling = [300], {"max_new_tokens": 4}
    if what == "a bias beyond 32 bits":
        sampling |= {"top_p": 0.9, "logit_bias": {"5": 1e308}}
    else:
        ids.append(json.loads((victim.model / "config.json").read_text())["vocab_size"])
    with pytest.raises(httpx.HTTPError):
        post(victim.url, "/generate", {"input_ids": ids, "sampling_params": sampling})
    victim.wait_gone()

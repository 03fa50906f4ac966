"""Endpoints that hang, lose answers or say goodbye, as real workers meet them: noticed, taken back, not charged."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import httpx
import orjson
import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.breaker import Why, parse_breaker
from app.store.keys import CHANGES, EndpointKeys, RunKeys
from app.urls import endpoint_key
from tests.belt import ROOT, manifest, published, put, until, worker
from workers.patience import LEAST_SECONDS, TIMES

KEYS = RunKeys("run1")
BUSY_SECONDS = 10.0  # this machine may have other work; benchmarks/recovery.py measures
STEADY = {"output_lengths": "fixed", "output_mean": 25, "step_seconds": 0.02}


@contextlib.contextmanager
def server_process():
    """A simulated server in a process of its own, which can be stopped as a whole; yields it and its URL."""
    words = ["simulate", "--port", "0", "--config", orjson.dumps(STEADY).decode()]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def breaker(client, url: str):
    """The breaker in Redis."""
    return parse_breaker(client.get(EndpointKeys(endpoint_key(url)).open))


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_stopped_server_and_one_that_forgets_are_noticed_and_their_requests_go_on(
    redis_client, redis_url, tmp_path
):
    """SIGSTOP: all sockets open, nothing comes; over two workers noticed in its time, charged to nobody, used again
    within 5 s of SIGCONT. One that runs on and forgets six requests: these alone are given up, each charged once."""
    steady = SimulatorConfig(**STEADY)
    with contextlib.ExitStack() as stack:
        process, url = stack.enter_context(server_process())
        forgets, other = stack.enter_context(running_simulator(steady)), stack.enter_context(running_simulator(steady))
        for name in ("w1", "w2"):
            stack.enter_context(worker(redis_url, tmp_path, name=name))
        put(redis_client, redis_url, manifest(url, forgets.url, other.url, concurrency=6), 1000)
        until(lambda: redis_client.xlen(KEYS.responses) > 18, what="all at work")
        time.sleep(2.0)  # their history: figures that move at every look
        silence = float(redis_client.hget(EndpointKeys(endpoint_key(url)).control, "silence"))
        os.kill(process.pid, signal.SIGSTOP)
        forgets.faults(hang=1.0, answer_faults_left=6)
        stopped = time.monotonic()
        until(lambda: breaker(redis_client, url), 60, "the stall is noticed")
        assert time.monotonic() - stopped < max(LEAST_SECONDS, TIMES * silence) + 6 + BUSY_SECONDS  # two looks of 3 s
        assert breaker(redis_client, url).why is Why.STALLED
        leases = EndpointKeys(endpoint_key(url)).leases
        until(lambda: redis_client.zcard(leases) == 0, what="its requests were taken back")
        os.kill(process.pid, signal.SIGCONT)
        back = time.monotonic()
        until(lambda: redis_client.zcard(leases) > 0, what="it is used again")
        assert time.monotonic() - back < 5 + BUSY_SECONDS
        until(lambda: redis_client.xlen(KEYS.responses) == 1000, 90, "all answers")
        assert breaker(redis_client, forgets.url) is None
    records = published(redis_client)
    assert {record["kind"] for record in records} == {"response"}
    assert redis_client.hvals(KEYS.charges) == [b"1"] * 6
    assert {record["attempt"] for record in records} == {1, 2}


def test_a_server_that_was_told_to_stop_gets_nothing_new_and_finishes_what_it_has(redis_client, redis_url, tmp_path):
    """503 on /ready after a 200: no request more, the running ones are answered, no loss is told."""
    slow = SimulatorConfig(output_lengths="fixed", output_mean=200, step_seconds=0.03)
    with running_simulator(slow) as leaving, running_simulator(SimulatorConfig(**STEADY)) as other:
        with worker(redis_url, tmp_path):
            put(redis_client, redis_url, manifest(leaving.url, other.url, max_new_tokens=200, concurrency=8), 600)
            until(lambda: leaving.stats()["running"] == 8, what="work there")
            ready = EndpointKeys(endpoint_key(leaving.url)).control
            until(lambda: redis_client.hget(ready, "ready") == b"1", what="its 200 was seen")
            leaving.drain()
            until(lambda: breaker(redis_client, leaving.url), 15, "the goodbye is heeded")
            assert breaker(redis_client, leaving.url).why is Why.LEAVING
            asked = leaving.stats()["requests"]
            until(lambda: leaving.stats()["running"] == 0, what="all answered there")
            assert leaving.stats()["requests"] == asked
            assert leaving.stats()["aborted"] == 0


@pytest.mark.long
def test_a_paused_server_is_waited_for_however_long_and_is_no_loss(redis_client, redis_url, tmp_path):
    """Longer than a silence is borne, and than a server that lies is believed: still paused, nothing taken back."""
    with running_simulator(SimulatorConfig(**STEADY)) as paused, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(paused.url, concurrency=8), 200)
        until(lambda: redis_client.xlen(KEYS.responses) > 30, what="work there")
        httpx.post(f"{paused.url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
        until(lambda: breaker(redis_client, paused.url), 15, "the pause is heeded")
        asked = paused.stats()["requests"]
        time.sleep(LEAST_SECONDS + 10)
        assert breaker(redis_client, paused.url).why is Why.PAUSED
        assert paused.stats()["requests"] == asked
        httpx.post(f"{paused.url}/continue_generation").raise_for_status()
        until(lambda: redis_client.xlen(KEYS.responses) == 200, 60, "all answers")
        assert breaker(redis_client, paused.url) is None
        assert paused.stats()["aborted"] == 0
    assert {record["attempt"] for record in published(redis_client)} == {1}
    assert redis_client.xlen(CHANGES) == 0

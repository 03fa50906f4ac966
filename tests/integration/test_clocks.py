"""Hosts whose clocks are hours apart: who holds what, and until when, is judged by Redis's clock alone."""

import re

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.keys import EndpointKeys, RunKeys
from app.store.scripts import SOURCES
from app.urls import endpoint_key
from tests.belt import manifest, published, put, until, worker
from workers.holdings import HOLD_TTL_MS

HOURS = 3 * 3600.0
KEYS = RunKeys("run1")
#: 8 s a task: longer than the interval at which workers sweep up messages that look old to them.
SLOW = SimulatorConfig(output_lengths="fixed", output_mean=32, step_seconds=0.25, max_running_requests=1000)


@pytest.mark.long
def test_workers_with_clocks_hours_apart_do_each_task_once(redis_client, redis_url, tmp_path):
    """One is 3 h ahead, the other 3 h behind: no claim or lease outlives its 20 s, and nothing is generated twice."""
    with (
        running_simulator(SLOW) as endpoint,
        worker(redis_url, tmp_path, "--slots", "10", name="ahead", clock_ahead_seconds=HOURS),
        worker(redis_url, tmp_path, "--slots", "10", name="behind", clock_ahead_seconds=-HOURS),
    ):
        put(redis_client, redis_url, manifest(endpoint.url), 40)
        until(lambda: endpoint.stats()["running"] == 20, what="both work")
        holders = {holder.split(b".")[0] for holder in redis_client.hvals(KEYS.holders("d"))}
        assert holders == {b"ahead", b"behind"}
        seconds, microseconds = redis_client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        for held in (KEYS.claims("d"), EndpointKeys(endpoint_key(endpoint.url)).leases):
            expiries = [expiry for _, expiry in redis_client.zrange(held, 0, -1, withscores=True)]
            assert expiries
            assert now_ms < min(expiries) <= max(expiries) <= now_ms + HOLD_TTL_MS
        until(lambda: redis_client.xlen(KEYS.responses) == 40, 60, what="40 responses")
        assert len({record["key"] for record in published(redis_client)}) == 40
        assert endpoint.stats()["requests"] == 40


def test_every_script_that_judges_an_expiry_asks_redis_for_the_time():
    """`now` is never an argument of a script."""
    for name, source in SOURCES.items():
        assert not re.search(r"ARGV: .*\bnow\b", source), name
        if re.search(r"\bnow\b", re.sub(r"--.*", "", source)):
            assert "redis.call('TIME')" in source, name

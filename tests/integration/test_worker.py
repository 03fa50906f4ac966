"""A real worker process between a real Redis and a simulated SGLang."""

import asyncio
import signal
from dataclasses import replace

import orjson

from app.celery_app import make_app
from app.sglang.client import SGLangClient, new_rid
from app.sglang.sampling import sampling_body
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.breaker import Why, breakers_at
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import CELERY_PREFIX, EPOCH, RUNS, EndpointKeys, RunKeys
from app.urls import endpoint_key
from tests.belt import manifest, published, put, until, worker

KEYS = RunKeys("run1")
SLOW = SimulatorConfig(output_lengths="fixed", output_mean=64, step_seconds=0.5, max_running_requests=1000)


def queued(client) -> int:
    return client.llen(CELERY_PREFIX + "lane.short")


def test_every_task_is_published_once_and_nothing_stays_behind(redis_client, redis_url, tmp_path):
    """Each key once in the stream with what was sent; no payload, claim, lease or unacknowledged message is left."""
    with running_simulator(SimulatorConfig(instant=True)) as endpoint, worker(redis_url, tmp_path):
        keys = put(redis_client, redis_url, manifest(endpoint.url), 200)
        until(lambda: redis_client.xlen(KEYS.responses) == 200, what="200 responses")
        until(lambda: redis_client.zcard(CELERY_PREFIX + "unacked_index") == 0, what="all acknowledged")
        records = published(redis_client)
        assert sorted(r["key"] for r in records) == sorted(keys)
        assert all(r["attempt"] == 1 and r["num_output_tokens"] == len(r["output_ids"]) for r in records)
        assert endpoint.stats()["requests"] == 200
        assert redis_client.hlen(KEYS.payload("d")) == redis_client.zcard(KEYS.claims("d")) == 0
        assert not list(redis_client.scan_iter("headrace:endpoint:*:lease*"))


def test_a_ceiling_holds_over_two_workers(redis_client, redis_url, tmp_path):
    """--concurrency 5 means five at the endpoint, however many workers ask."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.005)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path), worker(redis_url, tmp_path, name="w2"):
        put(redis_client, redis_url, manifest(endpoint.url, concurrency=5), 100)
        until(lambda: redis_client.xlen(KEYS.responses) == 100, what="100 responses")
        assert endpoint.stats()["peak_running"] == 5


def test_two_workers_of_one_name_are_two(redis_client, redis_url, tmp_path):
    """Started twice by mistake: leases and claims are told apart, so the ceiling holds, and each task is done once."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.005)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path), worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url, concurrency=5), 100)
        until(lambda: redis_client.xlen(KEYS.responses) == 100, what="100 responses")
        assert endpoint.stats()["peak_running"] == 5
        assert len(published(redis_client)) == endpoint.stats()["requests"] == 100


def test_a_cold_stop_returns_everything_and_aborts_at_the_endpoint(redis_client, redis_url, tmp_path):
    """SIGQUIT: all messages are back in the queue, no claim or lease is held, the server was told to stop."""
    with running_simulator(SLOW) as endpoint, worker(redis_url, tmp_path) as process:
        put(redis_client, redis_url, manifest(endpoint.url), 30)
        until(lambda: endpoint.stats()["running"] == 30, what="30 running")
        process.send_signal(signal.SIGQUIT)
        process.wait(20)
        assert queued(redis_client) == 30
        assert redis_client.zcard(CELERY_PREFIX + "unacked_index") == 0
        assert redis_client.zcard(KEYS.claims("d")) == 0
        assert not list(redis_client.scan_iter("headrace:endpoint:*:lease*"))
        until(lambda: endpoint.stats()["running"] == 0, what="aborted at the endpoint")


def test_draining_finishes_what_runs_and_hands_back_the_rest(redis_client, redis_url, tmp_path):
    """SIGTERM: what generates is published, what waits is back in the queue at once, exit 0."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.05)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path) as process:
        put(redis_client, redis_url, manifest(endpoint.url, concurrency=4), 30)
        until(lambda: endpoint.stats()["running"] == 4, what="4 running")
        until(lambda: redis_client.zcard(KEYS.claims("d")) == 30, what="30 claimed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        done = redis_client.xlen(KEYS.responses)
        assert done >= 4
        assert queued(redis_client) == 30 - done
        assert redis_client.zcard(KEYS.claims("d")) == 0


def test_a_drain_that_takes_too_long_hands_back_the_rest(redis_client, redis_url, tmp_path):
    """After --drain-seconds what still generates is aborted and returned."""
    with running_simulator(SLOW) as endpoint, worker(redis_url, tmp_path, "--drain-seconds", "0.5") as process:
        put(redis_client, redis_url, manifest(endpoint.url), 5)
        until(lambda: endpoint.stats()["running"] == 5, what="5 running")
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        assert queued(redis_client) == 5
        assert redis_client.zcard(KEYS.claims("d")) == 0


def test_an_endpoint_that_went_away_costs_no_row_an_attempt(redis_client, redis_url, tmp_path):
    """Refused and reset requests are made again when it answers; nothing is charged, nothing rejected."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.02)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 40)
        until(lambda: endpoint.stats()["running"] > 10, what="some running")
        endpoint.faults(freeze_seconds=0.2, down_seconds=1.5)
        endpoint.crash()
        until(lambda: redis_client.xlen(KEYS.responses) == 40, what="40 responses")
        records = published(redis_client)
        assert {r["kind"] for r in records} == {"response"}
        assert len({r["key"] for r in records}) == 40
        assert redis_client.hlen(KEYS.charges) == 0


def test_a_row_that_fails_three_times_while_others_are_served_is_rejected(redis_client, redis_url, tmp_path):
    """Wrong counts for one answer in three: charged to the row only; three charges reject it, others go on."""
    config = SimulatorConfig(instant=True)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        endpoint.faults(wrong_completion_tokens=0.5)
        put(redis_client, redis_url, manifest(endpoint.url), 6)
        until(lambda: redis_client.xlen(KEYS.responses) == 6, 60, what="6 verdicts")
        kinds = [r["kind"] for r in published(redis_client)]
        rejected = [r for r in published(redis_client) if r["kind"] == "rejected"]
        assert kinds.count("response") + len(rejected) == 6
        assert all(r["reason"] == "attempts_exhausted" for r in rejected)


def test_a_fault_of_ours_halts_the_run_and_rejects_nothing(redis_client, redis_url, tmp_path):
    """401: one sentence in Redis with exit code 2; payloads stay, nothing is rejected."""
    with running_simulator(SimulatorConfig(api_key="secret", instant=True)) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 10)
        halt = until(lambda: redis_client.get(KEYS.halt), what="halted")
        assert b'"exit_code":2' in halt
        assert b"secret" not in halt
        until(lambda: redis_client.zcard(KEYS.claims("d")) == 0, what="claims given back")
        assert redis_client.hlen(KEYS.payload("d")) == 10
        assert redis_client.xlen(KEYS.responses) == 0


def test_a_worker_whose_redis_is_gone_ends_when_told(tmp_path):
    """No broker to hand anything back to: told to stop, it still ends, within its drain time and ten seconds more."""
    server = PrivateServer(tmp_path / "redis")
    server.start()
    client = connect(server.url)
    client.set(EPOCH, 0)
    with running_simulator(SLOW) as endpoint, worker(server.url, tmp_path, "--drain-seconds", "1") as process:
        put(client, server.url, manifest(endpoint.url), 5)
        until(lambda: endpoint.stats()["running"] == 5, what="5 running")
        server.stop()
        process.send_signal(signal.SIGTERM)
        process.wait(25)
        until(lambda: endpoint.stats()["running"] == 0, what="aborted at the endpoint")


def test_nothing_of_another_model_is_published_and_the_change_is_named(redis_client, redis_url, tmp_path):
    """The server dies and is back at once with other weights: no answer of those, and a sentence with both names."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.02)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        run = manifest(endpoint.url, concurrency=20, server={"weight_version": "default"})
        put(redis_client, redis_url, run, 300)
        until(lambda: redis_client.xlen(KEYS.responses) > 20, what="some responses")
        endpoint.faults(freeze_seconds=0.0, down_seconds=0.0, weight_version_after_restart="v2")
        endpoint.crash()
        state = EndpointKeys(endpoint_key(endpoint.url)).open
        until(lambda: b"default" in (redis_client.get(state) or b""), what="the change is named")
        assert b"v2" in redis_client.get(state)
        until(lambda: redis_client.zcard(EndpointKeys(endpoint_key(endpoint.url)).leases) == 0, what="nothing runs")
        versions = {orjson.loads(record["meta_info"])["weight_version"] for record in published(redis_client)}
        assert versions == {"default"}


def test_a_swap_that_costs_no_connection_publishes_nothing_of_the_other_model(redis_client, redis_url, tmp_path):
    """Another model takes over between two requests, under the same weight version: its answers are given up."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=10, step_seconds=0.01)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        run = manifest(endpoint.url, concurrency=2, server={"model": "simulated/teacher"})
        put(redis_client, redis_url, run, 200)
        until(lambda: redis_client.xlen(KEYS.responses) > 10, what="some responses")
        endpoint.faults(model_after_restart="simulated/student", swap_now=True)
        state = EndpointKeys(endpoint_key(endpoint.url)).open
        change = "model simulated/teacher → simulated/student"
        until(lambda: change in orjson.loads(redis_client.get(state) or b"{}").get("evidence", ""), what="it is named")
        made = published(redis_client)
    with running_simulator(replace(config, instant=True)) as first:
        for record in made:
            assert record["output_ids"] == asyncio.run(_answer(first.url, record["prompt_token_ids"]))


def test_two_runs_of_different_models_at_one_address_are_judged_each_by_itself(redis_client, redis_url, tmp_path):
    """One worker knows both, one only the run whose model is gone: that one is held and says why, the other goes on."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=10, step_seconds=0.01)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        gone = manifest(endpoint.url, concurrency=2, server={"model": "simulated/teacher"})
        put(redis_client, redis_url, gone, 100)
        redis_client.sadd(RUNS, "run1", "run2")
        until(lambda: redis_client.xlen(KEYS.responses) > 10, what="some responses")
        endpoint.faults(model_after_restart="simulated/student", swap_now=True)
        there = manifest(endpoint.url, run_id="run2", server={"model": "simulated/student"})
        put(redis_client, redis_url, there, 10)
        with worker(redis_url, tmp_path, name="w2"):
            until(lambda: redis_client.xlen(RunKeys("run2").responses) == 10, what="the other run")
            names = EndpointKeys(endpoint_key(endpoint.url))
            until(lambda: b"student" in (redis_client.hget(names.differs, "run1") or b""), what="it says why")
            made = redis_client.xlen(KEYS.responses)
            held = breakers_at(redis_client, [endpoint.url], "run1")[endpoint.url]
            assert (held.why, made < 100) == (Why.DIFFERS, True)
            assert breakers_at(redis_client, [endpoint.url], "run2")[endpoint.url] is None
    assert {record["model"] for record in published(redis_client)} == {"simulated/teacher"}
    assert {record["model"] for record in published(redis_client, "run2")} == {"simulated/student"}


async def _answer(url, prompt):
    async with SGLangClient() as client:
        sampling = sampling_body({"max_new_tokens": 64})
        return (await client.generate(url, prompt, sampling, rid=new_rid(), deadline_seconds=10)).output_ids


def test_the_pool_grows_and_shrinks_while_the_worker_runs(redis_client, redis_url, tmp_path):
    """`pool_grow` and `pool_shrink` by remote control, as Flower's buttons send them, change what is held at once."""
    with running_simulator(SLOW) as endpoint, worker(redis_url, tmp_path, "--slots", "4"):
        put(redis_client, redis_url, manifest(endpoint.url), 20)
        until(lambda: endpoint.stats()["running"] == 4, what="4 running")
        control = make_app(redis_url).control
        assert "ok" in next(iter(control.pool_grow(6, reply=True, timeout=10, limit=1)[0].values()))
        until(lambda: endpoint.stats()["running"] == 10, what="10 running")
        assert "ok" in next(iter(control.pool_shrink(8, reply=True, timeout=10, limit=1)[0].values()))
        (stats,) = control.inspect(timeout=10, limit=1).stats().values()
        assert stats["pool"]["max-concurrency"] == 2

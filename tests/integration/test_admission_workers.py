"""Admission on the real path: worker processes, Redis, HTTP, and an endpoint that dies of too much."""

import asyncio
import contextlib
import threading

import pytest

from app.capacity.share import parse_share
from app.packing import unpack_task
from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault
from app.sglang.simulator import RunningSimulator, SimulatorConfig, running_simulator
from app.sglang.simulator.faults import Faults
from app.store.keys import CELERY_PREFIX, EPOCH, EXPECTED, EndpointKeys, RunKeys
from app.urls import endpoint_key
from tests.belt import manifest, put, until, worker
from tests.own_redis import OwnRedis
from workers.admission import Past
from workers.context import WorkerContext, WorkerSettings
from workers.generate import generate
from workers.holdings import Lease
from workers.stages import ask_of

KEYS = RunKeys("run1")
KV_TOKENS = 40_000


def deadly(**more) -> SimulatorConfig:
    return SimulatorConfig(
        max_total_num_tokens=KV_TOKENS, max_running_requests=1000, output_mean=400, output_sigma=0.45,
        step_seconds=0.004, faults=Faults(crash_above_running=120, crash_on_kv_full=True), **more,
    )  # fmt: skip


@pytest.mark.timeout(90)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_an_endpoint_that_dies_of_a_full_pool_is_kept_busy_and_alive(redis_client, redis_url, tmp_path, workers):
    """Nothing tuned: no crash, the pool two thirds used at its peak at least, all lengths learned by the end."""
    with running_simulator(deadly()) as endpoint, contextlib.ExitStack() as stack:
        for number in range(workers):
            stack.enter_context(worker(redis_url, tmp_path, name=f"w{number}"))
        put(redis_client, redis_url, manifest(endpoint.url, max_new_tokens=1200), 300, prompt=150)
        until(lambda: redis_client.xlen(KEYS.responses) == 300, 60, "300 responses")
        stats = endpoint.stats()
        assert stats["crashes"] == 0
        assert stats["peak_used_tokens"] > 0.66 * KV_TOKENS
        assert len(redis_client.hgetall(EXPECTED)) == 1
        control = redis_client.hgetall(EndpointKeys(endpoint_key(endpoint.url)).control)
        assert int(control[b"done"]) >= 300 - 30  # the last look may lie a moment back
        assert float(control[b"rate"]) == pytest.approx(1 / 4.3, rel=0.5)  # tokens per ms: a step of 4 ms and a bit


def test_a_server_that_takes_less_than_it_tells_gets_what_it_takes(redis_client, redis_url, tmp_path):
    """A gateway's limit, say: it settles at that, all come through, and nothing is charged."""
    config = SimulatorConfig(
        output_lengths="fixed", output_mean=20, step_seconds=0.01, max_running_requests=1000,
        faults=Faults(refuse_above_requests=10),
    )  # fmt: skip
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 80)
        control = EndpointKeys(endpoint_key(endpoint.url)).control
        ceilings = set()

        def all_came() -> bool:
            ceilings.add(int(redis_client.hget(control, "requests") or -1))
            return redis_client.xlen(KEYS.responses) == 80

        until(all_came, 60, "80 responses")
        assert any(0 < one < 16 for one in ceilings), ceilings  # less than any server gets at first
        assert endpoint.stats()["peak_running"] == 10
    assert redis_client.hlen(KEYS.charges) == 0


@pytest.mark.long
@pytest.mark.parametrize("lie", ["huge", "negative", "none", "no_pool"])
def test_a_server_that_lies_about_its_pool_is_fed_all_the_same(redis_client, redis_url, tmp_path, lie):
    """Figures that cannot be are none; of a pool that is never used, the forecast stands by itself."""
    config = SimulatorConfig(
        output_lengths="fixed", output_mean=40, step_seconds=0.01, max_running_requests=30, faults=Faults(loads=lie)
    )  # fmt: skip
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 90)
        until(lambda: redis_client.xlen(KEYS.responses) == 90, 60, "90 responses")
        stats, control = endpoint.stats(), redis_client.hgetall(EndpointKeys(endpoint_key(endpoint.url)).control)
    assert (stats["peak_running"], stats["abort_requests"]) == (30, 0)
    assert float(control[b"f"]) == 1.0
    assert redis_client.hlen(KEYS.charges) == 0


def test_what_is_recalled_goes_back_uncharged_and_is_made_elsewhere_or_later(redis_client, redis_url, tmp_path):
    """The observer names leases; their holders abort them and lease again; all end published."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=40, step_seconds=0.05, max_running_requests=1000)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 20)
        names = EndpointKeys(endpoint_key(endpoint.url))
        until(lambda: endpoint.stats()["running"] == 20, what="20 running")
        recalled = redis_client.hkeys(names.lease_info)[:5]
        redis_client.set(names.recalled, b" ".join(recalled), px=2000)
        until(lambda: redis_client.xlen(KEYS.responses) == 20, what="20 responses")
        assert endpoint.stats()["aborted"] == 5
        assert redis_client.hlen(KEYS.charges) == 0
        assert not redis_client.exists(names.leases, names.lease_info, names.lease_sums)  # none stays behind


def test_a_server_with_a_short_queue_is_not_run_into_it(redis_client, redis_url, tmp_path):
    """8 run and 2 may wait: with 12 there, those refused would wait up to ten seconds each while the server idles."""
    config = SimulatorConfig(
        output_lengths="fixed", output_mean=10, step_seconds=0.02, max_running_requests=8, max_queued_requests=2
    )
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url), 60)
        until(lambda: redis_client.xlen(KEYS.responses) == 60, 60, "60 responses")
        assert endpoint.stats()["requests"] < 60 + 20  # the first may come at once, before any of them runs


def test_a_lane_that_waits_leaves_slots_and_messages_to_others(redis_client, redis_url, tmp_path):
    """900 tasks at a ceiling of 40: the worker takes some hundred at most, and the rest as those finish."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=10, step_seconds=0.02, max_running_requests=1000)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url, concurrency=40), 900)
        until(lambda: redis_client.xlen(KEYS.responses) >= 100, what="some responses")
        assert redis_client.llen(CELERY_PREFIX + "lane.short") > 300
        until(lambda: redis_client.xlen(KEYS.responses) == 900, 60, "900 responses")
        assert not redis_client.exists(KEYS.payload("d"))


def test_a_worker_whose_tasks_wait_asks_at_its_turn(redis_client, redis_url):
    """Others wait, too: its turn comes half a second later, though its own request ended long before."""

    async def three(keys: list[str]) -> None:
        context = WorkerContext(WorkerSettings(redis_url, "w1@host"))
        await context.start()
        await asyncio.gather(*(generate(context, "run1", "d", key) for key in keys))
        await context.close()

    with running_simulator(SimulatorConfig(instant=True, output_lengths="fixed", output_mean=10)) as endpoint:
        redis_client.hset(EndpointKeys(endpoint_key(endpoint.url)).control, "turn", 10**15)
        asyncio.run(three(put(redis_client, redis_url, manifest(endpoint.url, concurrency=1), 3)))
    first, second, _ = (int(entry.split(b"-")[0]) for entry, _ in redis_client.xrange(KEYS.responses))
    assert second - first > 400


@pytest.mark.timeout(90)
def test_lane_ceilings_are_exact_over_all_workers_and_neither_lane_starves(redis_client, redis_url, tmp_path):
    """12 short and 3 long at two workers: never more of either, both full at once, all answered."""
    config = SimulatorConfig(
        output_lengths="fixed", output_mean=20, step_seconds=0.03, max_running_requests=1000, disconnect_seconds=0.1
    )
    run = manifest("", short_concurrency=12, long_concurrency=3, max_new_tokens=64)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path), worker(redis_url, tmp_path, name="w2"):
        run = run.model_copy(update={"endpoints": [endpoint.url]})
        put(redis_client, redis_url, run, 150, dataset="short")
        put(redis_client, redis_url, run, 20, dataset="long", prompt=8200)
        names, seen = EndpointKeys(endpoint_key(endpoint.url)), set()

        def finished() -> bool:
            lanes = [parse_share(share).lane for share in redis_client.hvals(names.lease_info)]
            seen.add((lanes.count("short"), lanes.count("long")))
            return redis_client.xlen(KEYS.responses) == 170

        until(finished, 60, "170 responses")
        assert max(short for short, _ in seen) == 12
        assert max(long for _, long in seen) == 3
        assert (12, 3) in seen
        assert endpoint.stats()["peak_running"] <= 15


def test_admission_ends_when_told_though_room_came_free_in_the_same_moment(redis_client, redis_url):
    """Else a worker that is told to stop would not."""

    async def stopped(blob: bytes) -> bool:
        context, run, task = WorkerContext(WorkerSettings(redis_url, "w1@host")), manifest(), unpack_task(blob)
        loop = asyncio.create_task(context.admission.run_forever())
        waits = asyncio.create_task(context.admission.lease(run, task, ask_of(run, task), Past()))
        await asyncio.sleep(0.1)  # it has looked once, and found no endpoint
        for tell in context.endpoints.when_back:
            tell()
        loop.cancel()
        done, _ = await asyncio.wait([loop], timeout=1.0)
        waits.cancel()
        await context.close()
        return loop in done

    (key,) = put(redis_client, redis_url, manifest(), 1)
    assert asyncio.run(stopped(redis_client.hget(KEYS.payload("d"), key)))


async def _generate(url: str, count: int, prompt: int) -> None:
    client = SGLangClient()
    ids = [[number] * prompt for number in range(1, count + 1)]
    calls = (client.generate(url, one, {"max_new_tokens": 1000}, rid=new_rid(), deadline_seconds=120) for one in ids)
    with contextlib.suppress(Fault):
        await asyncio.gather(*calls, return_exceptions=True)
    await client.aclose()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_after_a_loss_of_redis_the_endpoint_s_own_figure_is_the_floor_of_what_is_in_flight(
    redis_client, redis_url, tmp_path
):
    """Others fill three quarters of a pool that kills if it overflows; Redis knows nothing: the rest is used."""
    config = SimulatorConfig(
        max_total_num_tokens=KV_TOKENS, max_running_requests=1000, output_lengths="fixed", output_mean=400,
        step_seconds=0.1, admission="free_space", faults=Faults(crash_on_kv_full=True),
    )  # fmt: skip
    with running_simulator(config) as endpoint:
        threading.Thread(target=lambda: asyncio.run(_generate(endpoint.url, 2, 15_000)), daemon=True).start()
        until(lambda: endpoint.stats()["running"] == 2, what="the others run")
        redis_client.flushall()
        with worker(redis_url, tmp_path):
            put(redis_client, redis_url, manifest(endpoint.url, max_new_tokens=64), 100, prompt=150)
            until(lambda: redis_client.xlen(KEYS.responses) == 100, 120, "100 responses")
        stats = endpoint.stats()
    assert stats["crashes"] == 0
    assert stats["retractions"] == 0
    assert 0.85 * KV_TOKENS < stats["peak_used_tokens"] <= KV_TOKENS
    assert stats["peak_running"] > 20


@pytest.mark.parametrize("published", [0, 1])
def test_a_task_that_is_cancelled_with_its_answer_in_hand_keeps_no_lease(tmp_path, published):
    """Redis is away when the answer comes, and the task is cancelled before it is or while it is being published."""

    async def answered_and_cancelled(box: OwnRedis, endpoint: RunningSimulator, key: str) -> dict[str, Lease]:
        context = WorkerContext(WorkerSettings(box.url, "w1@host"))
        await context.start()
        if published:  # else Redis is told first that this endpoint answers
            context.refusals._served.add(("run1", endpoint_key(endpoint.url)))
        try:
            task = asyncio.create_task(generate(context, "run1", "d", key))
            await asyncio.to_thread(until, lambda: endpoint.stats()["running"] == 1, what="it generates")
            box.freeze()
            waits = asyncio.create_task(context.courier.command("PING"))  # whatever follows waits behind it
            await asyncio.sleep(0.1)
            endpoint.faults(slow=0.02)
            await asyncio.to_thread(until, lambda: context.endpoints._served_at, what="it is answered")
            task.cancel("the claim went to another worker")
            box.freeze(False)
            await asyncio.wait([task, waits], timeout=30)
            assert task.cancelled()
            return dict(context.holdings.leases)
        finally:
            await context.close()

    config = SimulatorConfig(output_lengths="fixed", output_mean=40, step_seconds=0.1)
    with OwnRedis(tmp_path / "redis") as box, running_simulator(config) as endpoint:
        client, names = box.client(), EndpointKeys(endpoint_key(endpoint.url))
        client.set(EPOCH, 0)
        (key,) = put(client, box.url, manifest(endpoint.url), 1)
        assert asyncio.run(answered_and_cancelled(box, endpoint, key)) == {}
        assert client.xlen(KEYS.responses) == published
        assert not client.exists(names.leases, names.lease_info, names.lease_sums, KEYS.claims("d"), KEYS.holders("d"))

"""Every transition of the breaker on a real Redis, as two workers bring it about on simulated servers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from app.sglang.client import SGLangClient
from app.sglang.faults import Fault, FaultKind
from app.sglang.sampling import sampling_body
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.breaker import ChangeLog, Why, closing, opening, parse_breaker
from app.store.courier import Courier
from app.store.keys import EndpointKeys, RunKeys
from app.store.scripts import call
from app.urls import endpoint_key
from tests.belt import manifest
from workers import endpoints as endpoints_module
from workers.context import WorkerContext, WorkerSettings
from workers.endpoints import Endpoints
from workers.holdings import Claim, Work

CONFIG = SimulatorConfig(output_lengths="fixed", output_mean=8, health_seconds=0.0)


@pytest.fixture
def endpoint():
    """A server of its own for each test."""
    with running_simulator(CONFIG) as running:
        yield running


class Pair:
    """Two workers' knowledge of endpoints, each with connections of its own."""

    def __init__(self, url: str, redis_url: str, client: SGLangClient):
        self.couriers = [Courier(redis_url) for _ in range(2)]
        self.workers = [
            Endpoints(courier, client, f"w{number}@host") for number, courier in enumerate(self.couriers)
        ]
        self.url = url

    async def fail(self, kind: FaultKind, times: int = 5) -> list[bool]:
        """So many requests of each worker fail at once; whether the endpoint served others, each time."""
        fault = Fault(kind, "it failed")
        return await asyncio.gather(
            *(one.after_fault(self.url, fault, 0.0) for one in self.workers for _ in range(times))
        )

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Both look, as they do once a second, until something is so."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.gather(*(one.look() for one in self.workers))
                await asyncio.sleep(0.02)


@asynccontextmanager
async def pair(url: str, redis_url: str, **fields) -> AsyncIterator[Pair]:
    """Both know the endpoint."""
    async with SGLangClient() as client:
        both = Pair(url, redis_url, client)
        try:
            for one in both.workers:
                one.use(manifest(url, **fields))
                await one.known(url, "run1")
            yield both
        finally:
            for one in both.workers:
                await one.close()
            for courier in both.couriers:
                await courier.close()


def play(endpoint, redis_url: str, story: Callable[[Pair], Awaitable[None]], **fields) -> None:
    """Tell a story with two workers."""

    async def main() -> None:
        async with pair(endpoint.url, redis_url, **fields) as both:
            await story(both)

    asyncio.run(main())


def breaker(client, endpoint):
    """The breaker in Redis."""
    return parse_breaker(client.get(EndpointKeys(endpoint_key(endpoint.url)).open))


def test_refused_connections_open_it_once_for_all(endpoint, redis_client, redis_url):
    """Ten refusals of two workers: open, one change in the log, nothing charged; the first evidence stays."""
    log = ChangeLog(redis_client)

    async def story(both: Pair) -> None:
        endpoint.refuse()
        assert await both.fail(FaultKind.UNREACHABLE) == [False] * 10

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint).why is Why.DIED
    assert [(change.is_down, change.evidence) for change in log.new()] == [(True, "it failed")]


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.SERVER_ERROR, FaultKind.GATEWAY, FaultKind.TIMEOUT])
def test_failures_open_it_where_a_generation_fails_too(endpoint, redis_client, redis_url, kind):
    """Reset, 5xx, timeout: one look and one canary a worker decides, however many requests failed."""

    async def story(both: Pair) -> None:
        endpoint.faults(internal_error=1.0)
        before = endpoint.stats()["faults"].get("internal_error", 0)
        assert await both.fail(kind) == [False] * 10
        assert endpoint.stats()["faults"]["internal_error"] - before <= 4  # a canary each, and a plain one

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint).why is Why.DIED


@pytest.mark.parametrize("kind", [FaultKind.SERVER_ERROR, FaultKind.WRONG_COUNTS])
def test_failures_leave_it_closed_where_a_generation_succeeds(endpoint, redis_client, redis_url, kind):
    """The request was to blame: charged."""

    async def story(both: Pair) -> None:
        assert await both.fail(kind) == [True] * 10

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint) is None


def test_connections_lost_together_blame_nobody(endpoint, redis_client, redis_url):
    """A server that died and was back before anybody looked: none of its bystanders is charged; one alone is."""

    async def story(both: Pair) -> None:
        assert await both.fail(FaultKind.DISCONNECTED) == [False] * 10
        assert await both.fail(FaultKind.DISCONNECTED, times=1) == [True] * 2

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint) is None


@pytest.mark.parametrize("kind", [FaultKind.REFUSED, FaultKind.TOO_LONG, FaultKind.BAD_IDS, FaultKind.QUEUE_FULL])
def test_a_rows_400_and_a_full_queue_never_open_it(endpoint, redis_client, redis_url, kind):
    """Not even looked at: no canary is sent."""

    async def story(both: Pair) -> None:
        sent = endpoint.stats()["requests"]
        await both.fail(kind)
        assert endpoint.stats()["requests"] == sent

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint) is None


def test_a_paused_endpoint_is_no_death(endpoint, redis_client, redis_url):
    """No canary is sent into its queue; the reason is its own."""
    log = ChangeLog(redis_client)

    async def story(both: Pair) -> None:
        await asyncio.to_thread(httpx.post, f"{endpoint.url}/pause_generation", json={})
        sent = endpoint.stats()["requests"]
        assert await both.fail(FaultKind.DISCONNECTED, times=1) == [False] * 2
        assert breaker(redis_client, endpoint).why is Why.PAUSED
        assert endpoint.stats()["requests"] == sent
        await asyncio.to_thread(httpx.post, f"{endpoint.url}/continue_generation")

    play(endpoint, redis_url, story)
    assert list(log.new()) == []


@pytest.mark.parametrize("health", [{"health": "slow", "health_slow_seconds": 20.0}, {"health": "bad"}])
def test_health_that_is_slow_or_bad_does_not_open_it(endpoint, redis_client, redis_url, health):
    """Requests fail, /health is no help, the canary generates: closed."""

    async def story(both: Pair) -> None:
        endpoint.faults(**health)
        assert await both.fail(FaultKind.SERVER_ERROR) == [True] * 10

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint) is None


def test_good_health_does_not_close_it(endpoint, redis_client, redis_url):
    """/health says 200 whatever happens, nothing generates: it opens, and stays open until one does."""

    async def story(both: Pair) -> None:
        endpoint.faults(health="ok", internal_error=1.0)
        await both.fail(FaultKind.SERVER_ERROR)
        for _ in range(20):
            await asyncio.gather(*(one.look() for one in both.workers))
            await asyncio.sleep(0.05)
        assert all(one.is_open(both.url) for one in both.workers)
        endpoint.faults(internal_error=0.0)
        await both.until(lambda: not any(one.is_open(both.url) for one in both.workers))

    play(endpoint, redis_url, story)
    assert breaker(redis_client, endpoint) is None


def test_loading_is_no_death(endpoint, redis_client, redis_url):
    """503 on everything: nothing new, but no loss is told, and what was in flight is not held against it."""
    log = ChangeLog(redis_client)

    async def story(both: Pair) -> None:
        endpoint.faults(loading=1.0, health="bad")
        await both.fail(FaultKind.UNAVAILABLE)
        assert breaker(redis_client, endpoint).why is Why.UNAVAILABLE
        endpoint.faults(loading=0.0, health="honest")
        await both.until(lambda: breaker(redis_client, endpoint) is None)

    play(endpoint, redis_url, story)
    assert list(log.new()) == []
    assert not Why.UNAVAILABLE.is_death


def test_one_canary_over_all_workers_half_opens_and_a_slow_start_follows(endpoint, redis_client, redis_url):
    """While it is down both probe in turn, never together; back, it gets one generation, then 16 requests at first."""
    log = ChangeLog(redis_client)
    control = EndpointKeys(endpoint_key(endpoint.url)).control

    async def story(both: Pair) -> None:
        endpoint.refuse()
        await both.fail(FaultKind.UNREACHABLE)
        sent = endpoint.stats()["requests"]
        looking = asyncio.create_task(both.until(lambda: breaker(redis_client, endpoint) is None))
        await asyncio.sleep(1.0)
        endpoint.accept()
        await looking
        assert endpoint.stats()["requests"] - sent == 1

    play(endpoint, redis_url, story)
    assert redis_client.hget(control, "requests") == b"16"
    assert [change.is_down for change in log.new()] == [True, False]


def test_a_canary_that_hangs_is_not_joined_by_another(endpoint, redis_client, redis_url):
    """Half-open: while one worker's trial is out, the other sends nothing."""

    async def story(both: Pair) -> None:
        endpoint.refuse()
        await both.fail(FaultKind.UNREACHABLE)
        endpoint.faults(hang=1.0)
        endpoint.accept()
        await both.until(lambda: endpoint.stats()["faults"].get("hang", 0) > 0)
        for _ in range(30):
            await asyncio.gather(*(one.look() for one in both.workers))
            await asyncio.sleep(0.02)
        assert endpoint.stats()["faults"]["hang"] == 1
        assert redis_client.hget(EndpointKeys(endpoint_key(endpoint.url)).control, "trial") == b"1"

    play(endpoint, redis_url, story)


def test_what_a_person_holds_no_worker_closes(endpoint, redis_client, redis_url):
    """Drained by a person: not probed, whatever else is found; closed by a person alone. No loss is told."""
    log = ChangeLog(redis_client)

    async def story(both: Pair) -> None:
        call(redis_client, *opening(both.url, Why.DRAINED, "drained"))
        await both.until(lambda: all(one.is_open(both.url) for one in both.workers))
        sent = endpoint.stats()["requests"]
        await both.fail(FaultKind.UNREACHABLE)
        assert not call(redis_client, *opening(both.url, Why.STALLED, "it stalled", replaces=True))
        assert not call(redis_client, *closing(both.url))
        for _ in range(10):
            await asyncio.gather(*(one.look() for one in both.workers))
        assert breaker(redis_client, endpoint).why is Why.DRAINED
        assert endpoint.stats()["requests"] == sent
        assert call(redis_client, *closing(both.url, held=True))

    play(endpoint, redis_url, story)
    assert list(log.new()) == []


def test_who_listens_again_is_tried_at_once(endpoint, redis_client, redis_url, monkeypatch):
    """While nobody listens it is knocked at in between; whoever accepts is not left waiting for the next probe."""
    monkeypatch.setattr(endpoints_module, "_PROBE_SECONDS", (600.0,))
    monkeypatch.setattr(endpoints_module, "_PROBE_TTL_MS", 600_000)  # nobody else takes over

    async def story(both: Pair) -> None:
        endpoint.refuse()
        await both.fail(FaultKind.UNREACHABLE)
        await asyncio.gather(*(one.look() for one in both.workers))
        await asyncio.sleep(0.3)  # the first probe found nobody
        endpoint.accept()
        await both.until(lambda: breaker(redis_client, endpoint) is None)

    play(endpoint, redis_url, story)


@pytest.mark.parametrize(("said", "first"), [(None, 16), (-1, 16), (3, 3), (28, 28), (300, 16)])
def test_who_is_back_gets_at_first_what_its_observer_said_if_that_is_little(endpoint, redis_client, said, first):
    """An observer looks at one that is away and says with how many it begins; else sixteen."""
    control = EndpointKeys(endpoint_key(endpoint.url)).control
    call(redis_client, *opening(endpoint.url, Why.DIED, "it died"))
    if said is not None:
        redis_client.hset(control, "requests", said)
    call(redis_client, *closing(endpoint.url))
    assert int(redis_client.hget(control, "requests")) == first


def test_a_loss_is_told_once_also_where_a_milder_reason_came_first(endpoint, redis_client):
    """leaving → died → stalled → up: one down, one up, in order; `since` is that of the beginning."""
    log = ChangeLog(redis_client)
    for why in (Why.LEAVING, Why.DIED, Why.STALLED):
        call(redis_client, *opening(endpoint.url, why, f"it {why}", replaces=True))
    call(redis_client, *closing(endpoint.url))
    call(redis_client, *closing(endpoint.url))
    down, up = log.new()
    assert (down.is_down, down.evidence, up.is_down) == (True, "it died", False)
    assert down.since == up.since
    assert list(log.new()) == []


def test_a_router_that_would_drop_a_parameter_of_the_run_is_held(redis_url):
    """One that was not there at the start, so that only the worker meets it."""
    sampling = sampling_body({"max_new_tokens": 8, "logit_bias": {"5": 1.0}})

    async def main(url: str) -> str:
        async with SGLangClient() as client:
            courier = Courier(redis_url)
            worker = Endpoints(courier, client, "w1@host")
            worker.use(manifest(url).model_copy(update={"sampling": sampling}))
            try:
                with pytest.raises(Fault):
                    await worker.known(url, "run1")
                return worker.breaker(url).evidence
            finally:
                await worker.close()
                await courier.close()

    with running_simulator(replace(CONFIG, behind_router=True)) as router:
        assert asyncio.run(main(router.url)) == "it is sglang-router, which drops logit_bias without a word"


def test_a_run_of_which_nothing_comes_any_more_leaves_its_endpoints_alone(endpoint, redis_client, redis_url):
    """Not while a claim of it is here; a new message makes it known again, and its endpoints are asked who they are."""
    run = manifest(endpoint.url)
    redis_client.set(RunKeys(run.run_id).manifest, run.model_dump_json())

    async def main() -> None:
        context = WorkerContext(WorkerSettings(redis_url, "w1@host"))
        claim = Claim(run.run_id, "d", "key", "w1@host/1")
        later = time.monotonic() + 1000
        try:
            await context.run(run.run_id)
            await context.endpoints.known(endpoint.url, "run1")
            context.holdings.claims[claim] = Work(asyncio.current_task())
            context.leave_idle_runs(later)
            assert context.endpoints.urls == [endpoint.url]
            del context.holdings.claims[claim]
            context.leave_idle_runs(time.monotonic())
            assert context.endpoints.urls == [endpoint.url]
            context.leave_idle_runs(later)
            assert context.endpoints.urls == []
            assert context.endpoints.info(endpoint.url) is None
            await context.run(run.run_id)
            assert (await context.endpoints.known(endpoint.url, "run1")).url == endpoint.url
        finally:
            await context.close()

    asyncio.run(main())


def test_each_goodbye_is_believed_anew(endpoint, redis_client, redis_url, monkeypatch):
    """One that left idle and came back is, when it leaves idle again, not taken for one that says so and stays."""
    monkeypatch.setattr("workers.endpoints._LINGER_SECONDS", 3.0)

    async def goodbye(both: Pair) -> None:
        for one in both.workers:
            await one.readiness(endpoint.url)  # its 200 is seen
        endpoint.drain()
        await both.workers[0].open(endpoint.url, "it is leaving", why=Why.LEAVING)
        enough = time.monotonic() + 1.0  # a canary would be back by then, and close it
        await both.until(lambda: time.monotonic() > enough)
        assert breaker(redis_client, endpoint).why is Why.LEAVING

    async def story(both: Pair) -> None:
        await goodbye(both)
        endpoint.drain(False)
        await both.until(lambda: not any(one.is_open(endpoint.url) for one in both.workers))
        await asyncio.sleep(3.0)
        await goodbye(both)

    play(endpoint, redis_url, story)

"""Who was there when an endpoint died: counted once per death over all workers, and kept in less and less company."""

import asyncio

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.sglang.simulator import Faults, SimulatorConfig, running_simulator
from app.store import scripts
from app.store.courier import Courier
from app.store.keys import DEATHS, EPOCH, EXPECTED, EndpointKeys, RunKeys
from tests.belt import manifest, published, put, until, worker
from workers.admission import lease_keys
from workers.suspects import Suspicion, implicate, name_of

ONE, TWO = EndpointKeys("one"), EndpointKeys("two")


def ask(client, *requests, endpoints=(ONE,)):
    """requests: (task key, company, endpoints it may use, urgent). Returns their places."""
    words = [
        word for key, company, may, urgent in requests
        for word in (f"w@h:1:{name_of('r', key)}", "short", 10, 1, "kind", may, urgent, company)
    ]  # fmt: skip
    keys = [EPOCH, EXPECTED, *(key for names in endpoints for key in lease_keys(names))]
    ceilings = [-1, -1, -1, 10_000, -1] * len(endpoints)
    return scripts.call(client, "lease", keys, [10_000, 0, len(endpoints), *ceilings, *words])[3:]


def end(client, key, names=ONE):
    """The task's request is over."""
    lease = f"w@h:1:{name_of('r', key)}"
    scripts.call(client, "release_lease", [names.leases, names.lease_info], [lease])


def innocents(count):
    return [(f"i{n}", 0, "1", 0) for n in range(count)]


def deaths(url, endpoint, *keys):
    """What is known of these tasks, each asking as its worker does when its request failed."""

    async def ask_all():
        courier = Courier(url)
        try:
            return [await implicate(courier, endpoint, "r", key) for key in keys]
        finally:
            await courier.close()

    return asyncio.run(ask_all())


def opened(client, since, **state):
    client.set(ONE.open, orjson.dumps({"since": since, "evidence": "refused", "why": "died", **state}))


def test_a_death_is_counted_once_for_all_that_were_there(redis_client, redis_url):
    """However many of them ask, and in whichever worker they are; the next death is another one."""
    assert ask(redis_client, ("a", 0, "1", 0), ("b", 0, "1", 0), ("c", 0, "1", 0)) == [1, 1, 1]
    opened(redis_client, 100.5)
    assert deaths(redis_url, "one", "a", "b", "a") == [Suspicion((3,))] * 3
    end(redis_client, "c")
    assert deaths(redis_url, "one", "c") == [Suspicion((3,))]
    opened(redis_client, 200.5)
    assert deaths(redis_url, "one", "a", "b", "c") == [Suspicion((3, 2)), Suspicion((3, 2)), Suspicion((3,))]


@pytest.mark.parametrize("why", ["unavailable", "leaving", "differs", "drained"])
def test_an_endpoint_that_did_not_die_implicates_nobody(redis_client, redis_url, why):
    """Loading, leaving, another model; and one whose breaker is closed again."""
    ask(redis_client, ("a", 0, "1", 0))
    assert deaths(redis_url, "one", "a") == [Suspicion()]
    opened(redis_client, 100.5, why=why)
    assert deaths(redis_url, "one", "a") == [Suspicion()]
    assert not redis_client.exists(DEATHS)


def test_a_suspect_never_has_more_company_than_it_may(redis_client):
    """Neither by joining others nor by others joining it; and it holds nobody up while it waits."""
    assert ask(redis_client, *innocents(4)) == [1, 1, 1, 1]
    assert ask(redis_client, ("s", 4, "1", 0), ("i9", 0, "1", 0)) == [0, 1]
    for key in ("i0", "i1"):
        end(redis_client, key)
    assert ask(redis_client, ("s", 4, "1", 0), ("i5", 0, "1", 0), ("i6", 0, "1", 0)) == [1, 0, 0]
    end(redis_client, "s")
    assert ask(redis_client, ("i5", 0, "1", 0), ("i6", 0, "1", 0)) == [1, 1]


def test_an_endpoint_empties_for_a_suspect_that_waited_long_and_the_others_go_on_elsewhere(redis_client):
    """Alone at the first endpoint once that is empty; nobody joins it there, and everybody may use the second."""
    both = (ONE, TWO)
    assert ask(redis_client, ("a", 0, "10", 0), ("b", 0, "10", 0), endpoints=both) == [1, 1]
    assert ask(redis_client, ("s", 1, "11", 1), ("c", 0, "11", 0), endpoints=both) == [2, 1]  # it waited for nothing
    assert ask(redis_client, ("t", 1, "10", 1), ("d", 0, "11", 0), endpoints=both) == [0, 0]
    for key in "abc":
        end(redis_client, key)
    assert ask(redis_client, ("d", 0, "11", 0), ("t", 1, "10", 1), endpoints=both) == [0, 1]
    end(redis_client, "s", TWO)
    assert ask(redis_client, ("d", 0, "11", 0), ("e", 0, "11", 0), endpoints=both) == [2, 2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2, 5]), st.sampled_from(["10", "01", "11"]), st.booleans(),
                                st.integers(0, 3)), max_size=25))  # fmt: skip
def test_whatever_comes_and_goes_nobody_exceeds_the_company_of_a_suspect_that_is_there(redis_client, steps):
    """At each endpoint, after each decision: no more requests than the smallest company of those held."""
    redis_client.flushall()
    redis_client.set(EPOCH, 0)
    held = {ONE: {}, TWO: {}}
    for number, (company, may, urgent, ended) in enumerate(steps):
        for names, there in held.items():
            for key in list(there)[:ended]:
                end(redis_client, key, names)
                del there[key]
        batch = [(f"{number}-{n}", company if n == 0 else 0, may, int(urgent)) for n in range(4)]
        for (key, asked, *_), place in zip(batch, ask(redis_client, *batch, endpoints=(ONE, TWO)), strict=True):
            if place:
                held[(ONE, TWO)[place - 1]][key] = asked
        for there in held.values():
            assert len(there) <= min((company for company in there.values() if company), default=1000)


def test_company_is_halved_until_a_task_is_alone_and_twice_alone_is_guilt():
    """By the stated bound; bystanders of one death, and tasks alone by chance, are not suspect."""
    for first in (1, 2, 3, 57, 100, 1000):
        suspicion, crashes = Suspicion(), 0
        while not suspicion.is_guilty:
            crashes += 1
            company = suspicion.company or first
            suspicion = Suspicion((*suspicion.companies, company))
        assert crashes == max(4, 3 + first.bit_length() - 1)
    assert Suspicion((100,)).company == 0
    assert Suspicion((100, 57)).company == 28
    assert not Suspicion((1, 1)).is_guilty
    assert not Suspicion((1, 1, 1)).is_guilty


def test_bystanders_of_an_endpoint_that_dies_of_load_are_never_rejected(redis_client, redis_url, tmp_path):
    """It dies whenever it has answered twenty: everybody is answered once, nothing charged, no suspicion is left."""
    faults = Faults(crash_after_completions=20, freeze_seconds=0.05, down_seconds=0.2)
    config = SimulatorConfig(output_lengths="geometric", output_mean=20, step_seconds=0.01, faults=faults)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, manifest(endpoint.url, concurrency=16), 80)
        until(lambda: redis_client.xlen(RunKeys("run1").responses) == 80, 90, "80 answers")
        assert endpoint.stats()["crashes"] >= 3
    assert {record["kind"] for record in published(redis_client)} == {"response"}
    assert not redis_client.exists(DEATHS, RunKeys("run1").charges)

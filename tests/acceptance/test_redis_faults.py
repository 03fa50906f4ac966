"""What Redis can do to a run in progress: the run says so, goes on by itself, ends complete, and doubles nothing.

One run for the whole module, long enough for every fault; the last test lets it end and proves it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from app.manifest import read_run_file
from app.rundir import RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.running import RunningSimulator
from app.store.keys import EPOCH, RunKeys
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, Run, ids, run, verified
from tests.belt import until
from tests.own_redis import OwnRedis
from tests.proxy import Proxy
from tests.proxy import proxy as proxied

MOST = 12  #: --concurrency: what may run at the endpoint at once, whatever happens
WANTED = 140 * 5
STEADY = SimulatorConfig(**IDS, output_lengths="fixed", output_mean=40, step_seconds=0.04)


@dataclass
class Scene:
    """The run, its Redis, the proxy between them, and its endpoint."""

    run: Run
    redis: OwnRedis
    proxy: Proxy
    endpoint: RunningSimulator
    spent: int = 0  #: answers that may have been made for nothing

    def await_words(self, words: str, before: int) -> None:
        """The run says this, after having said it `before` times."""
        until(lambda: self.said(words) > before, what=f"the run says {words!r}\n{self.run.text()}")

    def said(self, words: str) -> int:
        """How often it said it to its user."""
        return self.run.log.read_text(errors="replace").count(words)

    def assert_goes_on(self, again: int = 0) -> None:
        """Lines come, the pool was never overfull, and at most `again` answers more than before were made for nothing.

        Which ones were is known once those in flight have ended: so the sum is taken by the last test.
        """
        self.spent += again
        lines = self.run.lines()
        until(lambda: self.run.lines() > lines + 2 * MOST, 60, what=f"it goes on\n{self.run.text()}")
        assert self.endpoint.stats()["peak_running"] <= MOST


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    """Answers on disk and a full pool."""
    folder = tmp_path_factory.mktemp("redis-faults")
    with OwnRedis(folder / "redis") as redis, proxied(redis.url) as proxy, running_simulator(STEADY) as endpoint:
        redis.client().set(EPOCH, 0)  # nobody held anything before: nothing has to settle at the start
        words = [DEMO / "gsm8k.jsonl", "--samples", WANTED // 140, "--endpoint", endpoint.url, "--redis", proxy.url,
                 "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--concurrency", MOST,
                 "--high-water", 50]  # fmt: skip
        with run(folder / "out", *words) as started:
            until(lambda: started.lines() > MOST and endpoint.stats()["running"] == MOST, 100, what="a full pool")
            yield Scene(started, redis, proxy, endpoint)


def test_killed_and_started_again_with_its_aof(scene):
    """Requests in flight go on meanwhile, and their results are kept."""
    scene.redis.kill()
    scene.await_words("Redis does not answer", 0)
    scene.redis.start()
    scene.assert_goes_on()


def test_all_clients_kicked_several_times_within_three_seconds(scene):
    """The consumers come back every time."""
    client = scene.redis.client()
    for _ in range(6):
        for kind in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", kind)
        time.sleep(0.5)
    scene.assert_goes_on()


def test_reached_through_a_flaky_network(scene):
    """Connections reset in the middle of commands, slow, and for a while refused."""
    for _ in range(3):
        scene.proxy.cut()
        time.sleep(0.3)
    scene.proxy.delay(0.2)
    scene.proxy.cut()
    time.sleep(1.0)
    scene.proxy.delay(0.0)
    scene.proxy.refuse()
    time.sleep(1.0)
    scene.proxy.accept()
    scene.assert_goes_on()


def test_frozen(scene):
    """Nobody answers and no connection breaks: the run says so, and goes on when Redis does."""
    before = scene.said("Redis does not answer")
    scene.redis.freeze()
    scene.await_words("Redis does not answer", before)
    time.sleep(2.0)
    scene.redis.freeze(False)
    scene.assert_goes_on()


def test_full_while_running_and_raised_later(scene):
    """Workers survive, results in hand are kept; the run says so, and goes on when there is memory again."""
    client, worker = scene.redis.client(), scene.run.child("worker")
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
    scene.await_words("Redis is full", 0)
    time.sleep(2.0)
    client.config_set("maxmemory", 0)
    scene.assert_goes_on()
    assert worker.is_running()


@pytest.mark.parametrize("how", ["flushed", "started again empty"])
def test_a_redis_that_forgot_everything(how, scene):
    """It is told the run again, workers assert what they hold, and no second pool-full comes on top of the first."""
    if how == "flushed":
        scene.redis.client().flushall()
    else:
        scene.redis.kill()
        scene.redis.start(aof=False)
    manifest = RunKeys(read_run_file(RunDir(scene.run.out).run_json).run_id).manifest
    until(lambda: scene.redis.client().exists(manifest), what="Redis is told the run again")
    scene.assert_goes_on(again=2 * MOST)


def test_after_all_that_it_ends_complete_and_nothing_is_doubled(scene):
    """Each id once; more was generated only where Redis had forgotten what was in its stream."""
    scene.endpoint.faults(slow=0.1)
    assert scene.run.wait(110) == 0, scene.run.text()
    found = ids(scene.run.out)
    assert len(found) == len(set(found)) == WANTED
    assert verified(scene.run.out)
    stats = scene.endpoint.stats()
    assert stats["peak_running"] <= MOST
    print("EXTRA", stats["completed"] - 1 - WANTED)
    assert stats["completed"] - 1 - WANTED <= scene.spent

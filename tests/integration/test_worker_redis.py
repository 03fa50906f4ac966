"""A worker whose Redis refuses commands: it stays, keeps what it holds, and works again when it may."""

import pickle
import signal

from app.celery_app import GENERATE_TASK, make_app
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.keys import CELERY_PREFIX, EPOCH, RunKeys
from tests.belt import lost, manifest, put, until, worker
from tests.own_redis import OwnRedis

KEYS = RunKeys("run1")


def test_a_worker_that_takes_messages_from_a_full_redis_stays(tmp_path):
    """A message that cannot be noted as taken ends the connection, not the worker; with memory all are done."""
    with OwnRedis(tmp_path / "redis") as box, running_simulator(SimulatorConfig(instant=True)) as endpoint:
        client = box.client()
        client.set(EPOCH, 0)
        run, lane = manifest(endpoint.url), CELERY_PREFIX + "lane.short"
        with worker(box.url, tmp_path) as process:
            put(client, box.url, run, 1)
            until(lambda: client.xlen(KEYS.responses) == 1, what="the worker works")
            process.send_signal(signal.SIGSTOP)
            put(client, box.url, run, 30)
            client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
            process.send_signal(signal.SIGCONT)
            until(lambda: "Connection to broker lost" in (tmp_path / "w1.log").read_text(), what="it is refused")
            client.config_set("maxmemory", 0)
            until(lambda: client.llen(lane) == 0, what="the rest is taken")
            lost(client, box.url, run.run_id).send_again(["d"], at_once=True)
            until(lambda: client.xlen(KEYS.responses) == 30, what="all are done")
            assert process.poll() is None


def test_a_worker_that_is_started_before_its_redis_waits_for_it(tmp_path):
    """It says so, once, and works when it is there."""
    box = OwnRedis(tmp_path / "redis")
    said = (tmp_path / "w1.log").read_text
    with worker(box.url, tmp_path):
        until(lambda: "waiting for it" in said(), what="it says that it waits")
        with box:
            until(lambda: "serves the lanes" in said(), what="it works")
    assert said().count("waiting for it") == 1


class _Exploit:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


def test_a_pickled_message_is_never_opened(redis_client, redis_url, tmp_path):
    """Whoever can write to Redis can't run code in a worker: refused, and the worker goes on."""
    trap = tmp_path / "trap"
    with running_simulator(SimulatorConfig(instant=True)) as endpoint, worker(redis_url, tmp_path) as process:
        with make_app(redis_url).connection() as connection:
            headers = {"task": GENERATE_TASK, "id": "x", "lang": "py", "argsrepr": "", "kwargsrepr": ""}
            connection.default_channel.basic_publish(
                connection.default_channel.prepare_message(
                    pickle.dumps(_Exploit(str(trap))), content_type="application/x-python-serialize",
                    content_encoding="binary", headers=headers, properties={"correlation_id": "x"},
                ),
                exchange="", routing_key="lane.short",
            )  # fmt: skip
        put(redis_client, redis_url, manifest(endpoint.url), 5)
        until(lambda: redis_client.xlen(KEYS.responses) == 5, what="the others are done")
        assert process.poll() is None
    assert not trap.exists()
    assert "ContentDisallowed" in (tmp_path / "w1.log").read_text()

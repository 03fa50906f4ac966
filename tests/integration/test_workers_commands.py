"""`headrace workers list|scale|stop` and Flower, on real workers in the midst of their work."""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import psutil
import pytest

from app.flower_server import BUCKETS
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.keys import CELERY_PREFIX, EPOCH, RunKeys
from app.store.live import workers_at
from tests.acceptance.harness import headrace
from tests.belt import ROOT, manifest, published, put, until, worker
from tests.own_redis import OwnRedis

KEYS = RunKeys("run1")
SLOW = SimulatorConfig(output_lengths="fixed", output_mean=64, step_seconds=0.5, max_running_requests=1000)
BRISK = SimulatorConfig(output_lengths="fixed", output_mean=40, step_seconds=0.05, max_running_requests=1000)


def slots(client) -> dict[str, int]:
    """Name without its host → slots, of all workers."""
    return {one.name.split("@")[0]: one.slots for one in workers_at(client)}


def test_scale_spreads_slots_over_all_workers_and_they_take_effect_at_once(redis_client, redis_url, tmp_path):
    """Two workers of 2 and 4 slots: 20 altogether are 10 each, and 20 requests run; the list says so."""
    one = worker(redis_url, tmp_path, "--slots", "2")
    with running_simulator(SLOW) as endpoint, one, worker(redis_url, tmp_path, "--slots", "4", name="w2"):
        put(redis_client, redis_url, manifest(endpoint.url), 40)
        until(lambda: endpoint.stats()["running"] == 6, what="6 running")
        done = headrace("workers", "scale", 20, "--redis", redis_url)
        assert done.returncode == 0, done.stderr
        assert "2 → 10" in done.stdout
        assert "4 → 10" in done.stdout
        until(lambda: endpoint.stats()["running"] == 20, what="20 running")
        until(lambda: slots(redis_client) == {"w1.short-long": 10, "w2.short-long": 10}, what="the list")
        listed = json.loads(headrace("workers", "list", "--redis", redis_url, "--json").stdout)["workers"]
        assert [(one["slots"], one["lanes"]) for one in listed] == [(10, ["short", "long"])] * 2
        for n, said in ((4, "10 → 2"), (20, "2 → 10"), (4, "10 → 2")):  # faster than workers give signs
            assert said in headrace("workers", "scale", n, "--redis", redis_url).stdout
        until(lambda: slots(redis_client) == {"w1.short-long": 2, "w2.short-long": 2}, what="the last word")
        refused = headrace("workers", "scale", 1, "--redis", redis_url)
        assert (refused.returncode, "2 workers need a slot each" in refused.stderr) == (2, True)


def test_a_stopped_worker_hands_over_and_loses_nothing(redis_client, redis_url, tmp_path):
    """`workers stop` drains one of two: it ends by itself with 0, the other does the rest, each key once."""
    with running_simulator(BRISK) as endpoint, worker(redis_url, tmp_path, "--slots", "10") as leaving:
        with worker(redis_url, tmp_path, "--slots", "10", name="w2"):
            keys = put(redis_client, redis_url, manifest(endpoint.url), 60)
            until(lambda: endpoint.stats()["running"] == 20, what="both at work")
            until(lambda: len(slots(redis_client)) == 2, what="both have signed")
            name = next(one.name for one in workers_at(redis_client) if one.name.startswith("w1."))
            assert headrace("workers", "stop", name, "--redis", redis_url).returncode == 0
            assert leaving.wait(30) == 0
            until(lambda: redis_client.xlen(KEYS.responses) == 60, what="60 responses")
            assert sorted(one["key"] for one in published(redis_client)) == sorted(keys)
            assert [one["attempt"] for one in published(redis_client)] == [1] * 60  # nothing was generated twice
            assert list(slots(redis_client)) == ["w2.short-long"]


def test_stopping_waits_for_nobody_longer_than_its_drain_time(redis_client, redis_url, tmp_path):
    """Answers of 32 s and --drain-seconds 0: it ends at once, and all it held is back in the lane."""
    arguments = ("--slots", "6", "--drain-seconds", "0")
    with running_simulator(SLOW) as endpoint, worker(redis_url, tmp_path, *arguments) as leaving:
        put(redis_client, redis_url, manifest(endpoint.url), 6)
        until(lambda: endpoint.stats()["running"] == 6, what="6 running")
        (name,) = until(lambda: [one.name for one in workers_at(redis_client)], what="its sign")
        assert headrace("workers", "stop", name, "--redis", redis_url).returncode == 0
        assert leaving.wait(20) == 0
        assert redis_client.llen(CELERY_PREFIX + "lane.short") == 6
        assert redis_client.zcard(KEYS.claims("d")) == 0


def test_whoever_is_not_there_cannot_be_stopped(redis_url):
    """One sentence with the names that are."""
    done = headrace("workers", "stop", "w9", "--redis", redis_url)
    assert (done.returncode, "No worker w9; there are: none." in done.stderr) == (2, True)


@contextmanager
def flower_at(redis_url):
    """A Flower on a Redis: asks for a path with or without the password."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "flower", "--port", "0"], cwd=ROOT, text=True,
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        env={**os.environ, "HEADRACE_BASIC_AUTH": "me:pass word", "HEADRACE_REDIS": redis_url},
    )  # fmt: skip
    try:
        base = next(line for line in process.stderr if "Flower at" in line).split()[3]
        assert base.startswith("http://127.0.0.1:")

        def ask(path: str, login: str | None = "me:pass word", method: str = "GET"):
            request = urllib.request.Request(base + path, method=method)
            if login:
                request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read().decode()
            return json.loads(text) if text.startswith("{") else text

        yield ask
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


@pytest.fixture
def flower(redis_url):
    """A Flower on this test's Redis."""
    with flower_at(redis_url) as ask:
        yield ask


def pool_size(flower, name: str) -> int:
    """Slots as the worker itself tells Flower."""
    return flower("/api/workers?refresh=1")[name]["stats"]["pool"]["max-concurrency"]


def test_flower_shows_rows_lanes_and_workers_behind_a_password(flower, redis_client, redis_url, tmp_path):
    """Task id and args are readable, lanes are queues, Grow and Shrink change how many run, Shut Down drains, runtimes
    are counted up to ten minutes; no password: 401."""
    for login in (None, "me:wrong"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            flower("/api/tasks", login)
    with running_simulator(BRISK) as endpoint, worker(redis_url, tmp_path, "--slots", "2") as process:
        until(lambda: list(flower("/api/workers?refresh=1")), what="the worker in Flower")
        name = next(iter(flower("/api/workers")))
        assert name.startswith("w1.short-long@")
        put(redis_client, redis_url, manifest(endpoint.url), 60)
        tasks = until(lambda: {i: t for i, t in flower("/api/tasks").items() if t["args"]}, what="tasks received")
        task_id, task = next(iter(tasks.items()))
        assert task_id.startswith("d:")
        assert task["args"].startswith("d row ")
        assert {one["name"] for one in flower("/api/queues/length")["active_queues"]} == {"lane.short", "lane.long"}
        flower(f"/api/worker/pool/grow/{name}?n=8", method="POST")
        until(lambda: endpoint.stats()["peak_running"] > 2, what="more at once")
        assert pool_size(flower, name) == 10
        flower(f"/api/worker/pool/shrink/{name}?n=7", method="POST")
        assert pool_size(flower, name) == 3
        until(lambda: endpoint.stats()["running"] == 3, what="fewer at once")
        edges = set(re.findall(r'flower_task_runtime_seconds_bucket{.*le="([^"]+)"', flower("/metrics")))
        assert {float(edge) for edge in edges} == {*BUCKETS, float("inf")}
        flower(f"/api/worker/shutdown/{name}", method="POST")
        assert process.wait(30) == 0
        assert redis_client.zcard(KEYS.claims("d")) == 0


@pytest.mark.long
def test_flower_shows_no_secret_on_any_page(tmp_path, monkeypatch):
    """Neither the password of its Redis nor a worker's API key: pages, answers, its own and the worker's arguments."""
    secrets = ("sk-very-secret-key", "very-secret-password")
    monkeypatch.setenv("HEADRACE_API_KEY", secrets[0])
    config = SimulatorConfig(output_lengths="fixed", output_mean=40, step_seconds=0.05, api_key=secrets[0])
    with OwnRedis(tmp_path / "redis") as box, running_simulator(config) as endpoint:
        rights = ["on", f">{secrets[1]}", "~*", "&*", "+@all"]
        box.client().execute_command("ACL", "SETUSER", "headrace", *rights)
        url = box.url.replace("redis://", f"redis://headrace:{secrets[1]}@")
        monkeypatch.setenv("HEADRACE_REDIS", url)
        box.client().set(EPOCH, 0)
        with flower_at(url) as ask, worker(box.url, tmp_path, "--slots", "2") as process:
            name = next(iter(until(lambda: ask("/api/workers?refresh=1"), what="the worker in Flower")))
            put(box.client(), box.url, manifest(endpoint.url), 60)
            tasks = until(lambda: ask("/api/tasks"), what="tasks")
            task = next(iter(tasks))
            paths = ["/", "/workers", "/tasks", "/broker", "/metrics", f"/worker/{name}", f"/task/{task}",
                     "/api/workers", "/api/tasks", "/api/queues/length", f"/api/task/info/{task}"]  # fmt: skip
            shown = {path: str(ask(path)) for path in paths}
            assert all(len(text) > 10 for text in shown.values())
            assert not [(path, one) for path, text in shown.items() for one in secrets if one in text]
            lines = psutil.Process(process.pid).cmdline() + psutil.Process().children(recursive=True)[0].cmdline()
            assert not [word for word in lines for one in secrets if one in word]
    assert not [path for path in tmp_path.rglob("*.log") for one in secrets if one in path.read_text()]

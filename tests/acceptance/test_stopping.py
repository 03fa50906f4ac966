"""Every way to stop a run: nothing stays held in Redis or running at the endpoint, and the same command resumes."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.cli import watch, watching
from app.errors import Incomplete
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.keys import CELERY_PREFIX, EPOCH
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, Run, ids, run, verified
from tests.belt import ROOT, until
from tests.own_redis import OwnRedis

SLOW = SimulatorConfig(**IDS, output_lengths="fixed", output_mean=40, step_seconds=0.05)
MOST, ROWS = 8, 30


@pytest.fixture
def endpoint():
    """It answers within seconds until a pool is full, and then not at all."""
    with running_simulator(SLOW) as one:
        yield one


@pytest.fixture
def redis_box(tmp_path):
    """A Redis that is there afterwards, to be looked into."""
    with OwnRedis(tmp_path / "redis") as box:
        box.client().set(EPOCH, 0)
        yield box


def words(endpoint, *more: object) -> list[object]:
    """Of a run of a few rows."""
    return [DEMO / "gsm8k.jsonl", "--limit", ROWS, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER,
            "--max-new-tokens", 64, "--concurrency", MOST, *more]  # fmt: skip


def await_full(endpoint) -> None:
    """The pool is full, and nothing ends by itself any more."""
    until(lambda: endpoint.stats()["running"] == MOST, 60, what="a full pool")
    endpoint.faults(slow=10_000.0)


def assert_nothing_is_held(endpoint, client) -> None:
    """No request at the endpoint; no lease, claim or unacknowledged message in Redis; messages are back."""
    until(lambda: endpoint.stats()["running"] == 0, what="requests are aborted at the endpoint")
    held = [key for kind in ("endpoint:*:lease*", "run:*:claims:*", "run:*:holders:*") for key in
            client.scan_iter(f"headrace:{kind}")]  # fmt: skip
    assert held == []
    assert client.zcard(CELERY_PREFIX + "unacked_index") == 0
    payloads = sum(map(client.hlen, client.scan_iter("headrace:run:*:payload:*")))
    assert client.llen(CELERY_PREFIX + "lane.short") == payloads >= MOST


def assert_resumes(endpoint, out, arguments) -> None:
    """The same command ends complete, each id once."""
    endpoint.faults(slow=0.1)
    with run(out, *arguments) as again:
        assert again.wait(100) == 0, again.text()
    found = ids(out)
    assert len(found) == len(set(found)) == ROWS
    assert verified(out)


@pytest.mark.long
def test_sigterm_drains_for_drain_seconds_then_hands_back(endpoint, redis_box, tmp_path):
    """What takes longer than --drain-seconds is aborted; exit 3."""
    arguments = words(endpoint, "--redis", redis_box.url, "--drain-seconds", 1)
    with run(tmp_path / "out", *arguments) as started:
        await_full(endpoint)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(30) == 3, started.text()
        assert_nothing_is_held(endpoint, redis_box.client())
    assert_resumes(endpoint, tmp_path / "out", arguments)


def test_a_second_ctrl_c_stops_at_once(endpoint, redis_box, tmp_path, monkeypatch):
    """Nobody waits for a drain of ten minutes; exit 3. Who watches, near or far, is told that the run stands still."""
    arguments = words(endpoint, "--redis", redis_box.url, "--drain-seconds", 600)
    with run(tmp_path / "out", *arguments) as started:
        await_full(endpoint)
        started.process.send_signal(signal.SIGINT)
        until(lambda: "once more to stop at once" in started.log.read_text(), what="it drains")
        assert endpoint.stats()["running"] == MOST
        started.process.send_signal(signal.SIGINT)
        assert started.wait(30) == 3, started.text()
        assert_nothing_is_held(endpoint, redis_box.client())
    monkeypatch.setattr(watch, "_STILL_SECONDS", 0.0)
    monkeypatch.setattr(watching, "COLLECTOR_SECONDS", 0.0)
    for place in ((tmp_path / "out", None), (None, redis_box.url)):
        with pytest.raises(Incomplete, match="stands still, with 30 rows pending"):
            watch.watch_command(*place, None, as_json=True, every_seconds=0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_stopped_while_it_starts_ends_as_any_stopped_run(endpoint, tmp_path, number):
    """Its tokenizer is being loaded; children that stand by go with it."""
    with run(tmp_path / "out", *words(endpoint)) as started:
        until(lambda: len(started.everything()) > 2, what="children that stand by")
        everything = started.everything()
        started.process.send_signal(number)
        assert started.wait(30) == 3, started.text()
    assert not any(one.is_running() for one in everything)
    assert "Traceback" not in started.text()


@pytest.mark.long
def test_whoever_is_frozen_keeps_nobody_from_stopping(endpoint, tmp_path):
    """A process that hears no signal, and a Redis that does not answer: killed; nothing is left, the run resumes."""
    arguments = words(endpoint)
    with run(tmp_path / "out", *arguments) as started:
        await_full(endpoint)
        everything = started.everything()
        for frozen in ("worker", "valkey-server"):
            started.child(frozen).suspend()
        for _ in range(2):
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert started.wait(75) == 3, started.text()
        until(lambda: not any(one.is_running() for one in everything), what="nothing is left")
    assert_resumes(endpoint, tmp_path / "out", arguments)


def test_a_lost_terminal_drains(endpoint, redis_box, tmp_path):
    """SIGHUP when a window is closed or a connection is lost; nobody can be told any more."""
    arguments = words(endpoint, "--redis", redis_box.url, "--drain-seconds", 1)
    with in_terminal(tmp_path / "out", *arguments) as (one, hang_up):
        await_full(endpoint)
        hang_up()
        assert one.wait(30) == 3, one.text()
        assert_nothing_is_held(endpoint, redis_box.client())


@pytest.mark.long
def test_a_container_that_is_stopped_resumes(endpoint, tmp_path):
    """SIGTERM, and SIGKILL for everything before the drain is over: as `docker stop` with too short a --time."""
    arguments = words(endpoint)
    with run(tmp_path / "out", *arguments) as started:
        await_full(endpoint)
        started.process.send_signal(signal.SIGTERM)
        until(lambda: "once more to stop at once" in started.log.read_text(), what="it drains")
        for process in started.everything():
            process.send_signal(signal.SIGKILL)
        started.process.wait()
    until(lambda: endpoint.stats()["running"] == 0, what="requests end with their connections")
    assert_resumes(endpoint, tmp_path / "out", arguments)


@contextmanager
def in_terminal(out, *arguments: object) -> Iterator[tuple[Run, object]]:
    """A run with a terminal of its own; `hang_up` closes it."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "run", "--out", str(out), *map(str, arguments)], cwd=ROOT,
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)
    started = Run(out, process, out.parent / "none")
    open_ends = [master]
    try:
        yield started, lambda: os.close(open_ends.pop())
    finally:
        for end in open_ends:
            os.close(end)
        for left in started.everything():
            left.send_signal(signal.SIGKILL)
        process.wait()

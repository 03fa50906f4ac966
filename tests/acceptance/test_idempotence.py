"""What is done twice, at once or after a kill, counts once: producers, collectors, `retry`, on a shared Redis."""

import json
import signal

import pytest

from app.celery_app import CELERY_PREFIX
from app.lanes import Lane
from app.manifest import read_run_file
from app.rundir import RAW, SUPERSEDED, RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import noted_address
from app.store.keys import RunKeys
from tests.acceptance.harness import (
    DEMO,
    IDS,
    TOKENIZER,
    extra_requests,
    headrace,
    ids,
    launched,
    run,
    status,
    verified,
)
from tests.belt import until, worker

ENDPOINT = SimulatorConfig(**IDS, output_lengths="fixed", output_mean=8, step_seconds=0.002)
ROWS = 60


@pytest.fixture
def words(tmp_path, redis_url):
    """Arguments of a run on the shared Redis, but for its endpoint; two datasets."""
    rows = (DEMO / "gsm8k.jsonl").read_text().splitlines(keepends=True)[:ROWS]
    for name, some in (("brook", rows[: ROWS // 2]), ("stream", rows[ROWS // 2 :])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
    paths = [tmp_path / "brook.jsonl", tmp_path / "stream.jsonl"]
    return [*paths, "--tokenizer", TOKENIZER, "--max-new-tokens", 16, "--redis", redis_url]


def collecting(out, redis_url, **environment):
    """A collector in a process of its own."""
    return launched(out, "collect", out, "--redis", redis_url, environment=environment)


def keys_of(out) -> RunKeys:
    """Where Redis has this run."""
    return RunKeys(read_run_file(RunDir(out).run_json).run_id)


def assert_whole(out, endpoint):
    """Each row once, and one request for each."""
    assert len(ids(out)) == len(set(ids(out))) == ROWS
    assert verified(out)
    assert extra_requests(endpoint) == 0


def test_an_enqueue_killed_in_mid_batch_and_lost_messages_cost_nothing(words, redis_url, redis_client, tmp_path):
    """Killed between payloads and messages; given again; three messages lost on the way: one request for each row."""
    out = tmp_path / "out"
    with running_simulator(ENDPOINT) as endpoint:
        words += ["--endpoint", endpoint.url]
        with run(out, *words, command="enqueue", environment={"HEADRACE_TEST_KILL_AT": "payload_offered:2"}) as killed:
            assert killed.wait() == -signal.SIGKILL
        keys, lane = keys_of(out), CELERY_PREFIX + Lane.SHORT.queue
        assert redis_client.hlen(keys.payload("stream")) == ROWS // 2
        assert redis_client.llen(lane) == ROWS // 2  # of the other dataset alone
        with run(out, *words, command="enqueue") as again, collecting(out, redis_url):
            redis_client.lpop(lane, 3)  # as a worker does that dies before it notes what it took
            with worker(redis_url, tmp_path):
                assert again.wait() == 0, again.text()
        assert_whole(out, endpoint)


@pytest.mark.long
def test_two_producers_and_two_collectors_at_once(words, redis_url, tmp_path):
    """The lock forgotten by a filesystem, say: each line once all the same; the second collector names the first."""
    out = tmp_path / "out"
    with running_simulator(ENDPOINT) as endpoint:
        words += ["--endpoint", endpoint.url]
        with run(out, *words, command="enqueue") as one:
            until(lambda: "enqueueing" in one.text(), what="the first producer at work")
            with launched(out, "produce", out, "--redis", redis_url) as other, collecting(out, redis_url) as first:
                until(lambda: "writing the files" in first.text(), what="the first collector at work")
                with collecting(out, redis_url) as second:
                    with worker(redis_url, tmp_path):
                        assert other.wait() == 0, other.text()
                        assert one.wait() == 0, one.text()
                    assert second.wait() == 2, second.text()
                    assert f"pid {first.process.pid}" in second.text()
        assert status(out)["totals"]["rows"] == ROWS
        assert_whole(out, endpoint)


@pytest.mark.long
def test_an_answer_put_aside_does_not_come_back_from_the_stream(words, redis_url, redis_client, tmp_path):
    """The collector dies between disk and Redis, `retry` follows at once: rows asked again get new answers only."""
    out, cut = tmp_path / "out", ["--max-new-tokens", 4]
    with running_simulator(ENDPOINT) as endpoint, worker(redis_url, tmp_path):
        words += ["--endpoint", endpoint.url, *cut]
        with run(out, *words, "--no-wait", command="enqueue") as enqueued:
            assert enqueued.wait() == 0, enqueued.text()
        until(lambda: redis_client.xlen(keys_of(out).responses) == ROWS, what="all answers")
        with collecting(out, redis_url, HEADRACE_TEST_KILL_AT="ledger_committed") as killed:
            assert killed.wait() == -signal.SIGKILL
        assert len(ids(out)) == ROWS  # on disk, and all of them still in the stream
        assert redis_client.xlen(keys_of(out).responses) == ROWS
        asked = headrace("retry", out, "--reason", "truncated", "--max-new-tokens", 32)
        assert asked.returncode == 0, asked.stderr
        with collecting(out, redis_url) as collector:
            until(lambda: redis_client.xlen(keys_of(out).responses) == 0, what="the old answers are forgotten")
            assert ids(out) == []
            with run(out, *words, command="enqueue") as again:
                assert again.wait() == 0, again.text() + collector.text()
        allowed = {json.loads(line)["max_new_tokens"] for path in out.glob(f"*/{RAW}") for line in path.open()}
        assert allowed == {32}
        assert len(ids(out, SUPERSEDED)) == len(ids(out)) == ROWS
        assert verified(out)


@pytest.mark.long
def test_killed_with_everything_in_flight_it_goes_on_at_once(words, tmp_path):
    """On a restart nobody waits until what the dead held expires: not even if that were in an hour."""
    out, slow = tmp_path / "out", SimulatorConfig(**IDS, output_lengths="fixed", output_mean=64, step_seconds=1.0)
    with running_simulator(slow) as endpoint:
        words = [*words[:-2], "--endpoint", endpoint.url, "--max-new-tokens", 64]
        with run(out, *words) as started:
            until(lambda: endpoint.stats()["running"] == ROWS, 60, what="all in flight")
            started.process.send_signal(signal.SIGSTOP)  # it would mend what follows
            started.child("worker").kill()
            client, keys = connect(noted_address(RunDir(out).redis)), keys_of(out)
            in_an_hour = (client.time()[0] + 3600) * 1000
            for dataset in ("brook", "stream"):
                client.zadd(keys.claims(dataset), dict.fromkeys(client.hkeys(keys.holders(dataset)), in_an_hour))
            for process in started.everything():
                process.kill()
        with run(out, *words):
            until(lambda: extra_requests(endpoint) == ROWS, 60, what="all sent again")

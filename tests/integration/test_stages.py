"""Answers made in stages are the answers that whole requests bring; what a crash leaves of them is gone on with."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.capacity.lengths import bin_beyond, bin_of, kind_of, later, parse_curve
from app.capacity.share import Share
from app.celery_app import GENERATE_TASK, make_app
from app.lanes import Lane
from app.manifest import RunManifest
from app.packing import pack_task, unpack_task
from app.records import Made, Task
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store import scripts
from app.store.holders import forget_worker
from app.store.keys import EXPECTED, EndpointKeys, RunKeys, lengths
from app.store.names import worker_name
from app.urls import endpoint_key
from tests.belt import manifest, published, put, until, worker
from workers.context import WorkerContext, WorkerSettings

STAGE, ALLOWANCE, ROWS = 8, 40, 120


def spell(ids: Sequence[int]) -> str:
    """A text that can be put together from its parts, without special tokens."""
    return "".join(f"<{token}>" for token in ids if token != EOS)


EOS = SimulatorConfig.eos_id
ENDPOINT = SimulatorConfig(output_lengths="lognormal", output_mean=20, step_seconds=0.0005, decode=spell)
OF_ONE_ATTEMPT = {"endpoint", "latency_seconds", "meta_info", "recipe", "server", "stages", "started_at"}
NOWHERE = EndpointKeys("none")


def run_of(url: str, run_id: str, **fields: object) -> RunManifest:
    """A run whose model stops at the simulated one's id."""
    return manifest(url, run_id=run_id, max_new_tokens=ALLOWANCE, stop_ids=[EOS], **fields)


def records(client, run_id: str, count: int = ROWS) -> dict[str, dict]:
    """What came of a run, by key."""
    until(lambda: client.xlen(RunKeys(run_id).responses) == count, what=f"{count} responses of {run_id}")
    return {record["key"]: record for record in published(client, run_id)}


def test_answers_in_stages_are_those_of_whole_requests(redis_client, redis_url, tmp_path):
    """Ids, text, finish reason, counts and attempts are the same, also where one stops at a stage's last place."""
    with running_simulator(ENDPOINT) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, run_of(endpoint.url, "whole"), ROWS)
        put(redis_client, redis_url, run_of(endpoint.url, "staged", stage_tokens=STAGE), ROWS)
        whole, staged = records(redis_client, "whole"), records(redis_client, "staged")
    for key, record in whole.items():
        told = {name: value for name, value in staged[key].items() if name not in OF_ONE_ATTEMPT}
        assert told == {name: value for name, value in record.items() if name not in OF_ONE_ATTEMPT}
        assert staged[key]["stages"] == -(-record["num_output_tokens"] // STAGE)
    ends = [(one["finish_reason"], one["num_output_tokens"] % STAGE) for one in whole.values()]
    assert ("stop", 0) in ends  # the trap: the server calls it a length
    assert ("length", 0) in ends
    assert ("stop", 3) in ends


def in_halves(ids: Sequence[int]) -> str:
    """As a tokenizer of bytes does it: two ids make a letter, and what is no letter is shown as such."""
    return bytes(0xC3 if token % 2 else 0xA9 for token in ids if token != EOS).decode(errors="replace")


def test_a_character_on_a_boundary_is_whole_in_the_text(redis_client, redis_url, tmp_path):
    """The text is that of all ids together, as of an answer made at once."""
    config = replace(ENDPOINT, decode=in_halves)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        put(redis_client, redis_url, run_of(endpoint.url, "whole"), 40)
        put(redis_client, redis_url, run_of(endpoint.url, "staged", stage_tokens=7), 40)
        whole, staged = records(redis_client, "whole", 40), records(redis_client, "staged", 40)
    assert any("é" in record["text"] and record["num_output_tokens"] > 7 for record in whole.values())
    assert {key: record["text"] for key, record in staged.items()} == \
        {key: record["text"] for key, record in whole.items()}  # fmt: skip


def test_a_worker_that_dies_between_two_stages_costs_none(redis_client, redis_url, tmp_path, monkeypatch):
    """Killed when its fourth stage was kept: whoever takes the task asks for the fifth; no id is made twice."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=ALLOWANCE, step_seconds=0.0005, decode=spell)
    monkeypatch.setenv("HEADRACE_TEST_KILL_AT", "stage_kept:4")
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path) as process:
        (key,) = put(redis_client, redis_url, run_of(endpoint.url, "staged", stage_tokens=STAGE), 1)
        assert process.wait(60) == -signal.SIGKILL
        assert endpoint.stats()["generated_tokens"] == 4 * STAGE
        monkeypatch.delenv("HEADRACE_TEST_KILL_AT")
        forget_worker(redis_client, worker_name("w1"), "staged", ["d"])
        make_app(redis_url).send_task(GENERATE_TASK, ("staged", "d", key), queue=Lane.SHORT.queue)  # as a producer does
        put(redis_client, redis_url, run_of(endpoint.url, "whole"), 1)
        with worker(redis_url, tmp_path, name="w2"):
            (record,) = records(redis_client, "staged", 1).values()
            (whole,) = records(redis_client, "whole", 1).values()
            assert endpoint.stats()["generated_tokens"] == 2 * ALLOWANCE
    assert (record["stages"], record["attempt"]) == (5, 1)
    assert (record["output_ids"], record["text"]) == (whole["output_ids"], whole["text"])


def test_a_stage_that_was_cut_is_no_end_of_an_answer(redis_client, redis_url, tmp_path):
    """Answers of 17 in stages of 7: each has a later one that got further than 7, and one that ended at 3."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=17, step_seconds=0.0005)
    with running_simulator(config) as endpoint, worker(redis_url, tmp_path):
        run = run_of(endpoint.url, "staged", stage_tokens=7)
        put(redis_client, redis_url, run, 5)
        records(redis_client, "staged", 5)
        kind = kind_of(run.recipe, "d", Lane.SHORT.value)
        ended = [lambda: redis_client.hgetall(lengths(kind)), lambda: redis_client.hgetall(lengths(later(kind)))]
        until(lambda: sum(map(int, ended[1]().values())) == 10, what="ten later stages")
        assert ended[0]() == {b"%d" % bin_of(17): b"5"}
        assert ended[1]() == {b"%d" % bin_beyond(7): b"5", b"%d" % bin_of(3): b"5"}


def test_answers_in_a_later_stage_count_as_longer_than_the_first(redis_client, redis_url):
    """30 short ones ended and 60 go on: a first stage's forecast must not believe that all end before it does."""
    url = "http://127.0.0.1:9"
    names, kind = EndpointKeys(endpoint_key(url)), kind_of("recipe", "d", Lane.SHORT.value)
    redis_client.hset(lengths(kind), bin_of(50), 30)
    for number in range(60):
        redis_client.hset(names.lease_info, str(number), str(Share("short", 200, 100, 1, later(kind))))

    async def learn() -> None:
        context = WorkerContext(WorkerSettings(redis_url, "w1@host"))
        context.endpoints.use(manifest(url))
        await context.observer._learn()
        await context.close()

    asyncio.run(learn())
    assert parse_curve(redis_client.hget(EXPECTED, kind).decode()).alive(99) == pytest.approx(60 / 90, abs=0.05)


def test_a_stage_is_kept_by_whoever_holds_the_key_alone(redis_client):
    """A holder whose claim went to another one, or whose key is in the stream, changes nothing; leases end."""
    keys = RunKeys("run1")
    names = [keys.payload("d"), keys.claims("d"), keys.holders("d"), keys.published("d"), NOWHERE.leases,
             NOWHERE.lease_info]  # fmt: skip
    claim = [keys.payload("d"), keys.claims("d"), keys.holders("d"), keys.halt, "deaths"]
    redis_client.hset(keys.payload("d"), "k", "task")
    scripts.call(redis_client, "claim", claim, ["k", "mine", 20_000, ""])
    redis_client.hset(NOWHERE.lease_info, "lease", "share")
    assert scripts.call(redis_client, "staged", names, ["k", "other", "theirs", "lease"]) == 0
    assert redis_client.hlen(NOWHERE.lease_info) == 0
    assert redis_client.hget(keys.payload("d"), "k") == b"task"
    assert scripts.call(redis_client, "staged", names, ["k", "mine", "ours", "lease"]) == 1
    assert redis_client.hget(keys.payload("d"), "k") == b"ours"
    redis_client.sadd(keys.published("d"), "k")
    redis_client.hdel(keys.payload("d"), "k")
    assert scripts.call(redis_client, "staged", names, ["k", "mine", "late", "lease"]) == 0
    assert not redis_client.hexists(keys.payload("d"), "k")


def test_what_was_made_travels_with_its_task():
    """Ids, text and counts come back from Redis as they were; a task without stages is as it ever was."""
    fresh = Task(
        key="k", dataset="d", row_id="r", source_id="", row_number=1, turn=0, turns=1, completion_index=0,
        max_new_tokens=9, prompt_token_ids=[1, 2, 3], chat=b"chat",
    )  # fmt: skip
    made = Made(output_ids=[70_000, 5], text="té", stages=2, started_at="2026-01-01", latency_seconds=0.5)
    staged = Task(**{name: getattr(fresh, name) for name in Task.__slots__ if name != "made"}, made=made)
    assert unpack_task(pack_task(fresh)) == fresh
    assert unpack_task(pack_task(staged)) == staged

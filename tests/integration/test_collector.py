"""The collector on a real stream and real files: each entry once, whatever was cut short before."""

import threading

import orjson
import pytest

from app.errors import UsageError
from app.identity import task_key
from app.ledger import Ledger
from app.manifest import Recipe, RunFile, read_run_file, write_run_file
from app.offline.retry import Retry, retry
from app.offline.switch import alone
from app.packing import compress
from app.reasons import Reason
from app.records import RejectedRecord, ResponseRecord, completion_id, line_of
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED, RunDir
from app.samples import SampleFilters
from app.store import scripts
from app.store.keys import DEATHS, EndpointKeys, RunKeys
from tests.belt import until
from tests.run_on_disk import a_row
from tests.run_on_disk import response as on_disk
from workers.collector import Collector

KEYS = RunKeys("run1")
NOWHERE = EndpointKeys("none")


def response(number: int, output: tuple[int, ...] = (7, 8, 9), dataset: str = "d") -> ResponseRecord:
    row = f"{number:024x}"
    return ResponseRecord(
        key=task_key("recipe", dataset, row, 0, 0), id=completion_id(dataset, row, 0, 0), primary_id=f"{dataset}:{row}",
        dataset=dataset, row_id=row, source_id="", row_number=number, turn=0, turns=1, completion_index=0,
        prompt_token_ids=[1, 2], output_ids=list(output), text="t", finish_reason="length", matched="",
        num_prompt_tokens=2, num_output_tokens=len(output), max_new_tokens=3, recipe="recipe", model="m",
        endpoint="http://e", server="s", attempt=1, stages=1, started_at="2026-01-01T00:00:00+00:00",
        latency_seconds=0.1, meta_info="{}",
    )  # fmt: skip


def rejection(number: int) -> RejectedRecord:
    row = f"{number:024x}"
    return RejectedRecord(
        key=task_key("recipe", "d", row, 0, -1), id=completion_id("d", row, 0, -1), primary_id=f"d:{row}", dataset="d",
        row_id=row, source_id="", row_number=number, stage="read", reason="unreadable", detail="line 1", attempts=0,
        at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def publish(client, *records) -> None:
    for record in records:
        kind = "response" if isinstance(record, ResponseRecord) else "rejected"
        d = record.dataset
        keys = [KEYS.responses, KEYS.payload(d), KEYS.claims(d), KEYS.holders(d), KEYS.published(d), NOWHERE.leases,
                NOWHERE.lease_info, DEATHS]  # fmt: skip
        scripts.call(client, "publish", keys, [record.key, d, kind, compress(line_of(record)), "", ""])


@pytest.fixture
def rundir(tmp_path):
    """An empty run directory."""
    return RunDir(tmp_path / "out")


def collect(rundir, client) -> None:
    """Collect what is there, and stop."""
    collector = Collector(rundir, client, "run1", SampleFilters())
    collector.stopping.set()
    collector.run()


def lines(rundir, name: str, dataset: str = "d") -> list[dict]:
    path = rundir.file(dataset, name)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def test_each_entry_becomes_its_lines_and_redis_forgets_it(rundir, redis_client):
    """Raw line, sample or rejection, ledger; then stream and published set are empty."""
    publish(redis_client, response(1), response(2, output=()), rejection(3), response(4, dataset="e"))
    collect(rundir, redis_client)
    assert [r["row_number"] for r in lines(rundir, RAW)] == [1, 2]
    assert lines(rundir, TOKENIZED)[0]["loss_mask"] == [0, 0, 1, 1, 1]
    assert {r["reason"] for r in lines(rundir, REJECTED)} == {"empty_output", "unreadable"}
    assert len(lines(rundir, RAW, "e")) == 1
    assert redis_client.xlen(KEYS.responses) == redis_client.scard(KEYS.published("d")) == 0
    with Ledger.open(rundir) as ledger:
        assert {one.dataset: one.responses for one in ledger.counts()} == {"d": 2, "e": 1}


def test_an_entry_that_comes_twice_is_written_once(rundir, redis_client):
    """A Redis that forgot may bring a response again: the files have it, so it is acknowledged unwritten."""
    publish(redis_client, response(1))
    collect(rundir, redis_client)
    publish(redis_client, response(1, output=(5, 5, 5)))
    collect(rundir, redis_client)
    assert [r["output_ids"] for r in lines(rundir, RAW)] == [[7, 8, 9]]
    assert redis_client.xlen(KEYS.responses) == 0


def test_entries_handed_to_a_collector_that_died_are_written_by_the_next(rundir, redis_client):
    """Read and not acknowledged: the next one takes them over."""
    redis_client.xgroup_create(KEYS.responses, "collector", id="0", mkstream=True)
    publish(redis_client, response(1), response(2))
    redis_client.xreadgroup("collector", "collector", {KEYS.responses: ">"})
    collect(rundir, redis_client)
    assert len(lines(rundir, RAW)) == 2


def test_a_torn_tail_is_cut_before_anything_is_appended(rundir, redis_client):
    """Half a line at the end of a file, in the middle of a character: cut; the next line stands alone."""
    publish(redis_client, response(1))
    collect(rundir, redis_client)
    with rundir.file("d", RAW).open("ab") as file:
        file.write(line_of(response(2))[:-20] + "é".encode()[:1])
    publish(redis_client, response(3))
    collect(rundir, redis_client)
    assert [r["row_number"] for r in lines(rundir, RAW)] == [1, 3]


def test_a_raw_line_without_sample_gets_its_sample_at_the_next_start(rundir, redis_client):
    """Killed between the two files: derived again, the entry acknowledged unwritten."""
    rundir.file("d", RAW).parent.mkdir(parents=True)
    rundir.file("d", RAW).write_bytes(line_of(response(1)))
    publish(redis_client, response(1))
    collect(rundir, redis_client)
    assert len(lines(rundir, RAW)) == len(lines(rundir, TOKENIZED)) == 1


@pytest.mark.parametrize("damage", [b'"output_ids":"12"', b'"output_ids":[7,'])
def test_a_damaged_response_without_sample_is_set_aside_and_the_others_go_on(rundir, redis_client, damage):
    """It is pending again, stands in superseded.jsonl, and holds nobody up."""
    publish(redis_client, *map(response, (1, 2, 3)))
    collect(rundir, redis_client)
    path = rundir.file("d", RAW)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"output_ids":[7,8,9]', damage) + third)
    rundir.file("d", TOKENIZED).unlink()
    publish(redis_client, response(4))
    collect(rundir, redis_client)
    assert [line["row_number"] for line in lines(rundir, RAW)] == [1, 3, 4]
    assert len(lines(rundir, TOKENIZED)) == 3
    assert damage in rundir.file("d", SUPERSEDED).read_bytes()
    publish(redis_client, response(2))
    collect(rundir, redis_client)
    assert [line["row_number"] for line in lines(rundir, RAW)] == [1, 3, 4, 2]
    assert len(lines(rundir, TOKENIZED)) == 4


def test_a_lost_ledger_is_rebuilt_and_nothing_is_written_twice(rundir, redis_client):
    """Delete it, bring the entry again: the files tell."""
    publish(redis_client, response(1), rejection(2))
    collect(rundir, redis_client)
    rundir.ledger.unlink()
    publish(redis_client, response(1), rejection(2))
    collect(rundir, redis_client)
    assert len(lines(rundir, RAW)) == len(lines(rundir, REJECTED)) == 1


def test_a_redis_that_forgot_its_group_is_served_again(rundir, redis_client):
    """FLUSHALL while collecting: the group is made anew, what is published after is written."""
    collector = Collector(rundir, redis_client, "run1", SampleFilters())
    thread = threading.Thread(target=lambda: (setattr(collector, "_ledger", Ledger.open(rundir)), collector.run()))
    thread.start()
    publish(redis_client, response(1))
    until(lambda: len(lines(rundir, RAW)) == 1)
    redis_client.flushall()
    publish(redis_client, response(2))
    until(lambda: len(lines(rundir, RAW)) == 2)
    collector.stopping.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_collector_that_lost_the_writer_lock_writes_nothing_more(rundir, redis_client):
    """Stopped for long and replaced: the entry stays for the one that has the lock now."""

    def refuse() -> None:
        raise UsageError("taken over")

    collector = Collector(rundir, redis_client, "run1", SampleFilters())
    collector.refuse_if_lost = refuse
    collector.stopping.set()
    publish(redis_client, response(1))
    with pytest.raises(UsageError, match="taken over"):
        collector.run()
    assert lines(rundir, RAW) == []
    collect(rundir, redis_client)
    assert len(lines(rundir, RAW)) == 1


@pytest.mark.parametrize("turns", [1, 3])
def test_an_answer_that_was_put_aside_is_not_written_when_it_is_delivered_once_more(rundir, redis_client, turns):
    """A crash between disk and Redis, then `retry`: the old answer is dropped, the new one written; chats likewise."""
    old, new = ([on_disk(a_row(1), "d", turn=t, turns=turns, finish_reason="length", matched="", output_ids=ids)
                 for t in range(turns)] for ids in ([7, 8], [7, 9]))  # fmt: skip
    publish_group(redis_client, old)
    collect(rundir, redis_client)
    recipe = Recipe(tokenizer={}, rendering={}, sampling={"max_new_tokens": 3})
    write_run_file(rundir.run_json, RunFile(run_id="run1", created_at="", headrace="", recipe=recipe,
                                            recipe_fingerprint="recipe"))  # fmt: skip
    with alone(rundir, "testing"):
        assert retry(rundir, read_run_file(rundir.run_json), Retry(Reason.TRUNCATED)) == {"d": 1}
    publish_group(redis_client, old)
    collect(rundir, redis_client)
    assert not lines(rundir, RAW)
    publish_group(redis_client, new)
    collect(rundir, redis_client)
    assert [one["output_ids"] for one in lines(rundir, RAW)] == [[7, 9]] * turns


def publish_group(client, records: list[ResponseRecord]) -> None:
    """The raw lines of a completion as one entry, whatever became of the key before."""
    blob = compress(b"".join(map(line_of, records)))
    client.xadd(KEYS.responses, {"dataset": "d", "key": records[0].key, "kind": "response", "blob": blob})

"""Chats between two turns on a real Redis, and their lines in real files."""

import contextlib
import os
import threading
from concurrent.futures import Future
from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from app.celery_app import make_app
from app.chats import opening, start_of
from app.cli.main import cli
from app.identity import task_key
from app.ledger import Ledger
from app.manifest import Limits, Recipe, RunFile
from app.offline.audit import audit
from app.offline.torn import mend
from app.packing import compress, pack_task, unpack_task
from app.records import Conversation, ResponseRecord, Task, completion_id, line_of
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED, RunDir
from app.samples import SampleFilters
from app.sglang.simulator import SimulatorConfig
from app.sglang.simulator.model import Model
from app.sglang.simulator.requests import Ask
from app.store import scripts
from app.store.keys import CELERY_PREFIX, DEATHS, EndpointKeys, RunKeys
from app.tokenization import Renderer, RenderOptions
from app.verify import verify
from producers.conveyor import Conveyor, Stopped
from producers.rendering import parcel_of
from producers.turns import Turns, next_of
from tests.belt import manifest, until
from tests.run_on_disk import RECIPE, a_row, response
from workers.collector import Collector

KEYS = RunKeys("run1")
E1 = EndpointKeys("e1")
PAYLOAD, TURNED, CLAIMS = KEYS.payload("chat"), KEYS.turned("chat"), KEYS.claims("chat")
TURNED_KEYS = [TURNED, PAYLOAD, CLAIMS, KEYS.holders("chat"), KEYS.published("chat"), KEYS.sent, KEYS.charges,
               E1.leases, E1.lease_info, DEATHS]  # fmt: skip
STOP = 163_586  # <|im_end|>
KEY = task_key("recipe", "chat", a_row(1), 0, 0)


@pytest.fixture(scope="module")
def renderer():
    """The bundled tokenizer."""
    from tests.acceptance.harness import TOKENIZER

    return Renderer(RenderOptions(str(TOKENIZER)))


def turned(client, key: str, holder: str, blob: bytes = b"made") -> int:
    return scripts.call(client, "turned", TURNED_KEYS, [key, holder, blob, "lease", key])


def claim(client, key: str, holder: str):
    keys = [PAYLOAD, CLAIMS, KEYS.holders("chat"), KEYS.halt, DEATHS]
    return scripts.call(client, "claim", keys, [key, holder, 10_000, key])


# --- the scripts


def test_a_made_turn_waits_outside_the_payloads_and_holds_nothing(redis_client):
    """Claim, lease, counts of requests, charges and deaths are gone; a second delivery finds nothing to do."""
    redis_client.hset(PAYLOAD, "a", b"x")
    redis_client.zadd(E1.leases, {"lease": 1})
    redis_client.hset(KEYS.sent, "a", 2)
    redis_client.hset(DEATHS, "a", "100,57")
    claim(redis_client, "a", "w1")
    assert turned(redis_client, "a", "w1") == 1
    assert redis_client.hgetall(TURNED) == {b"a": b"made"}
    assert not any(redis_client.exists(key) for key in (PAYLOAD, CLAIMS, KEYS.sent, DEATHS, E1.leases))
    assert claim(redis_client, "a", "w2") == [b"gone"]


def test_a_turn_made_by_somebody_whose_claim_went_elsewhere_is_dropped(redis_client):
    """The holder's work stands; and what is in the stream is over."""
    redis_client.hset(PAYLOAD, "a", b"x")
    claim(redis_client, "a", "w2")
    assert turned(redis_client, "a", "w1") == 0
    assert redis_client.exists(TURNED) == 0
    redis_client.sadd(KEYS.published("chat"), "b")
    assert turned(redis_client, "b", "w1") == 0


def test_a_turn_made_while_redis_forgot_everything_is_kept(redis_client):
    """No payload, no claim: the chat in hand is all there is."""
    assert turned(redis_client, "a", "w1") == 1


def test_a_chat_advances_once(redis_client):
    """Twice the same next turn, by a producer that was killed in between: one payload, the second call does nothing."""
    turned(redis_client, "a", "w1")
    assert scripts.call(redis_client, "advance", [TURNED, PAYLOAD], ["a", b"1"]) == [1]
    assert scripts.call(redis_client, "advance", [TURNED, PAYLOAD], ["a", b"2", "b", b"3"]) == [0, 0]
    assert redis_client.hgetall(PAYLOAD) == {b"a": b"1"}


# --- what follows a turn


def a_task(*said: str, given: list[dict] | None = None, renderer: Renderer, **changes) -> Task:
    """A chat of three questions after these answers."""
    given = given or [{"role": "user", "content": f"Question {n}?"} for n in range(3)]
    row, made = a_row(1), b""
    for turn, text in enumerate(said):
        ids = [*renderer.encode(text), STOP]
        made += line_of(response(row, turn=turn, turns=3, output_ids=ids, matched=str(STOP), **changes))
    return Task(
        key=KEY, dataset="chat", row_id=row, source_id="7", row_number=3, turn=0,
        turns=3, completion_index=0, max_new_tokens=64, prompt_token_ids=[],
        chat=start_of(Conversation(given), 64) + made,
    )  # fmt: skip


def test_the_next_prompt_holds_what_the_model_said(renderer):
    """And the next question of the data; key and completion are those of the chat, the id is the next turn's."""
    found = next_of(a_task("Hm.</think>Four.", renderer=renderer), renderer, manifest("http://e"), False)
    task = unpack_task(found.parcel.blob)
    assert "<think></think>Hm." not in renderer.decode(task.prompt_token_ids)
    assert "Four.<|im_end|><|im_user|>user<|im_middle|>Question 1?<|im_end|>" in renderer.decode(task.prompt_token_ids)
    assert (task.turn, task.turns, found.parcel.key) == (1, 3, KEY)
    assert found.parcel.task_id == completion_id("chat", a_row(1), 1, 0)


def test_a_chat_that_is_over_is_handed_over_as_a_whole(renderer):
    """Its lines say how many turns it got, how each history repeats, and why it ended."""
    found = next_of(a_task("One.", "Two.", "Three.", renderer=renderer), renderer, manifest("http://e"), False)
    written = [orjson.loads(line) for line in found.lines.splitlines()]
    notes = [orjson.loads(one["meta_info"])["chat"] for one in written]
    assert (found.kind, found.parcel, [one["turns"] for one in written]) == ("response", None, [3, 3, 3])
    assert notes[0] == {}
    assert notes[2] == {"history": "rewritten", "differs_at": 3, "ended": "complete", "turns_given": 3,
                        "results_passed_over": 0}  # fmt: skip


def test_an_answer_that_was_cut_ends_its_chat(renderer):
    """Half an answer is no history: what was made is kept, and says so."""
    task = a_task("One.", "Tw", renderer=renderer, finish_reason="length")
    found = next_of(task, renderer, manifest("http://e"), False)
    written = [orjson.loads(line) for line in found.lines.splitlines()]
    assert [one["turns"] for one in written] == [2, 2]
    assert orjson.loads(written[1]["meta_info"])["chat"]["ended"] == "length"


def test_a_turn_that_no_endpoint_has_room_for_rejects_the_row(renderer):
    """By the turn's own id, and in words."""
    run = manifest("http://e", limits={"http://e": Limits(context_tokens=70)})
    found = next_of(a_task("One. " * 20, renderer=renderer), renderer, run, False)
    record = orjson.loads(found.lines)
    place = ("chat", a_row(1), 1, 0)
    assert (found.kind, record["reason"], record["id"]) == ("rejected", "too_long", completion_id(*place))
    assert record["key"] == task_key("recipe", *place)
    assert record["detail"].startswith("turn 2 of 3: ")


CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


def test_tool_results_of_the_data_answer_the_calls_of_a_simulated_model(renderer):
    """A whole chat with the simulated model, which calls each time: the result stands under its own id, and the last
    call, that the data has nothing for, ends the chat."""
    config = SimulatorConfig(
        id_low=256, id_high=4000, output_lengths="fixed", output_mean=5,
        frames=((tuple(renderer.encode("Hm.</think>So. ")), tuple(renderer.encode(CALL))),),
    )  # fmt: skip
    model = Model(config, "m", "v")
    call = {"id": "old", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    given = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Nothing.", "tool_call_id": "old"},
        {"role": "user", "content": "Sure?"},
    ]
    task = replace(
        a_task(given=given, renderer=renderer), prompt_token_ids=renderer.render(opening(Conversation(given)))
    )
    prompts = []
    while True:
        prompts.append(renderer.decode(task.prompt_token_ids))
        job, request = model.start(Ask("r", task.prompt_token_ids, 64))
        ids = model.output_ids(job, request.tokens, over=True)
        made = response(a_row(1), turn=task.turn, turns=3, prompt_token_ids=task.prompt_token_ids, output_ids=ids,
                        matched=str(STOP))  # fmt: skip
        done = next_of(replace(task, chat=task.chat + line_of(made)), renderer, manifest("http://e"), False)
        if done.parcel is None:
            break
        task = unpack_task(done.parcel.blob)
    assert len(prompts) == 2
    assert "## Return of functions.look:7\nNothing.<|im_end|>" in prompts[1]
    assert "Sure?" not in prompts[1]
    last = orjson.loads(orjson.loads(done.lines.splitlines()[-1])["meta_info"])["chat"]
    assert (last["ended"], last["turns_given"]) == ("unanswered_calls", 3)


class Now:
    """A pool that renders in this process."""

    def __init__(self, renderer):
        self._terms = renderer, manifest("http://e"), False

    def apply(self, work, items):
        future: Future = Future()
        future.set_result(work(items, *self._terms))
        return future


@pytest.fixture
def rundir(tmp_path):
    """An empty run directory."""
    return RunDir(tmp_path / "out")


def test_what_waits_is_sent_on_or_ended_and_what_the_files_have_is_dropped(redis_client, redis_url, renderer, rundir):
    """One message in the lane for the next turn; a whole chat in the stream; nothing waits any more."""
    conveyor = Conveyor(redis_client, make_app(redis_url), "run1", 20, lambda: False)
    with Ledger.open(rundir) as ledger:
        turns = Turns(conveyor, Now(renderer), ledger)
        for said, expected in ((("One.",), (1, 0)), (("One.", "Two.", "Three."), (0, 1))):
            redis_client.flushall()
            redis_client.hset(TURNED, KEY, pack_task(a_task(*said, renderer=renderer)))
            assert conveyor.count_outstanding(["chat"]) == 1
            turns.go_on(["chat"])
            turns.go_on(["chat"])
            assert (redis_client.llen(CELERY_PREFIX + "lane.short"), redis_client.xlen(KEYS.responses)) == expected
            assert (redis_client.hlen(TURNED), conveyor.count_outstanding(["chat"])) == (0, 1)
        collect(rundir, redis_client)
        ledger.catch_up()
        redis_client.hset(TURNED, KEY, pack_task(a_task("One.", renderer=renderer)))
        turns.go_on(["chat"])
        turns.go_on(["chat"])
        assert conveyor.count_outstanding(["chat"]) == redis_client.llen(CELERY_PREFIX + "lane.short") == 0


def test_chats_go_on_while_a_lane_is_full(redis_client, redis_url, renderer, rundir):
    """A producer that waits for room sends the next turns meanwhile: they take no room that others have."""
    stop = threading.Event()
    conveyor = Conveyor(redis_client, make_app(redis_url), "run1", 1, stop.is_set)
    made = pack_task(a_task("One.", renderer=renderer))
    parcels = [parcel_of(replace(a_task(renderer=renderer), key=f"{n:032x}", prompt_token_ids=[1])) for n in range(3)]

    def put() -> None:
        with Ledger.open(rundir) as ledger:
            turns = Turns(conveyor, Now(renderer), ledger)
            conveyor.while_waiting = lambda: turns.go_on(["chat"])
            with contextlib.suppress(Stopped):
                conveyor.put(parcels)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        until(lambda: redis_client.llen(CELERY_PREFIX + "lane.short") == 1, what="a full lane")
        redis_client.hset(TURNED, KEY, made)
        until(lambda: redis_client.hexists(PAYLOAD, KEY), what="the next turn")
    finally:
        stop.set()
        thread.join(20)


def test_a_template_that_drops_earlier_reasoning_shows_and_trains_on_each_answer_once(
    deepseek_tokenizer, rundir, redis_client
):
    """Later prompts lack what was thought before: `rewritten`, in the raw lines and the audit. A sample is its own
    prompt as sent, mask 0, and the ids of its own turn as returned, mask 1; no other answer is in a mask."""
    renderer, end = Renderer(RenderOptions(str(deepseek_tokenizer))), 1
    given = [{"role": "user", "content": f"Question {n}?"} for n in range(3)]
    start = renderer.render(opening(Conversation(given)))
    task = replace(a_task(given=given, renderer=renderer), prompt_token_ids=start)
    answers = [[*renderer.encode(f"<think>\nHm {n}.\n</think>\n\nAnswer {n}."), end] for n in range(3)]
    prompts = []
    for turn, answer in enumerate(answers):
        prompts.append(task.prompt_token_ids)
        made = response(a_row(1), turn=turn, turns=3, prompt_token_ids=prompts[-1], output_ids=answer, matched=str(end))
        found = next_of(replace(task, chat=task.chat + line_of(made)), renderer, manifest("http://e"), False)
        task = unpack_task(found.parcel.blob) if found.parcel else task
    assert [text.count("Hm") for text in map(renderer.decode, prompts)] == [0, 0, 0]
    assert "Answer 1." in renderer.decode(prompts[2])
    publish(redis_client, [ResponseRecord(**orjson.loads(line)) for line in found.lines.splitlines()])
    collect(rundir, redis_client)
    samples = [orjson.loads(line) for line in rundir.file("chat", TOKENIZED).read_bytes().splitlines()]
    assert [one["input_ids"] for one in samples] == [p + a for p, a in zip(prompts, answers, strict=True)]
    assert [one["loss_mask"] for one in samples] == [
        [0] * len(p) + [1] * len(a) for p, a in zip(prompts, answers, strict=True)
    ]
    recipe = Recipe(tokenizer={}, rendering={}, sampling={})
    run_file = RunFile(run_id="run1", created_at="", headrace="", recipe=recipe, recipe_fingerprint="recipe",
                       filters=SampleFilters().to_json())  # fmt: skip
    (seen,) = audit(rundir, run_file, None).datasets
    assert (seen.histories, seen.chats) == ({"rewritten": 2}, {"complete": 1})


# --- the files


def group(number: int, turns: int = 3, **last) -> list:
    """The raw lines of a row; `last` changes its last one."""
    row = a_row(number)
    return [response(row, turn=t, turns=turns, **(last if t == turns - 1 else {})) for t in range(turns)]


def publish(client, *groups) -> None:
    for records in groups:
        keys = [KEYS.responses, PAYLOAD, CLAIMS, KEYS.holders("chat"), KEYS.published("chat"), E1.leases, E1.lease_info,
                DEATHS]  # fmt: skip
        blob = compress(b"".join(map(line_of, records)))
        scripts.call(client, "publish", keys, [records[0].key, "chat", "response", blob, "", ""])


def collect(rundir, client, filters: SampleFilters | None = None) -> None:
    """Collect what is there, and stop."""
    collector = Collector(rundir, client, "run1", filters or SampleFilters())
    collector.stopping.set()
    collector.run()


def turns_of(rundir, name: str) -> list[tuple[str, int]]:
    """(row, turn) of the lines of a file."""
    places = [orjson.loads(line)["id"].split(":") for line in rundir.file("chat", name).read_bytes().splitlines()]
    return [(row, int(turn)) for _, row, turn, _ in places]


def lines_of(rundir, name: str) -> list[bytes]:
    path = rundir.file("chat", name)
    return path.read_bytes().splitlines() if path.exists() else []


def whole(*numbers: int) -> list[tuple[str, int]]:
    return [(a_row(n), turn) for n in numbers for turn in range(3)]


def test_a_group_is_written_as_a_whole(rundir, redis_client):
    """All its raw lines and samples, in order; one completion for the ledger; verify holds."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    assert turns_of(rundir, RAW) == turns_of(rundir, TOKENIZED) == whole(1, 2)
    with Ledger.open(rundir) as ledger:
        (counts,) = ledger.counts()
        assert (counts.responses, counts.samples, counts.orphans) == (6, 6, 2)
    assert verify(rundir).ok, verify(rundir).render()


def test_a_turn_that_makes_no_sample_takes_its_row_along(rundir, redis_client):
    """One rejection with the turn's id, no sample of the others; verify and `tokenize` agree."""
    publish(redis_client, group(1), group(2, finish_reason="length", matched=""))
    collect(rundir, redis_client, SampleFilters(truncated="drop"))
    assert turns_of(rundir, TOKENIZED) == whole(1)
    assert turns_of(rundir, REJECTED) == [(a_row(2), 2)]
    assert verify(rundir).ok, verify(rundir).render()


@pytest.mark.parametrize("name", [RAW, TOKENIZED])
@pytest.mark.parametrize("kept", [1, 2])
def test_half_a_group_at_the_end_is_cut_and_made_again(rundir, redis_client, name, kept):
    """A kill in the middle of the write, between two of its lines or in one."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    path = rundir.file("chat", name)
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[: 3 + kept]) + written[3 + kept][:40])
    if name == RAW:
        rundir.file("chat", TOKENIZED).write_bytes(
            b"".join(rundir.file("chat", TOKENIZED).read_bytes().splitlines(keepends=True)[:3]))  # fmt: skip
    publish(redis_client, group(2), group(3))
    collect(rundir, redis_client)
    assert turns_of(rundir, RAW) == turns_of(rundir, TOKENIZED) == whole(1, 2, 3)
    assert not rundir.file("chat", SUPERSEDED).exists()  # the end is cut, no file is written anew
    assert verify(rundir).ok, verify(rundir).render()


def test_a_line_taken_from_the_middle_is_found_and_its_row_made_again(rundir, redis_client):
    """What is left of it moves away, so that no id stands twice when it is made anew."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    path = rundir.file("chat", RAW)
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[:1] + written[2:]))
    assert "incomplete_turns" in verify(rundir).findings
    publish(redis_client, group(1))
    collect(rundir, redis_client)
    assert turns_of(rundir, RAW) == turns_of(rundir, TOKENIZED) == whole(2, 1)
    assert turns_of(rundir, SUPERSEDED) == [(a_row(1), 0), (a_row(1), 2)]
    assert verify(rundir).ok, verify(rundir).render()


def exchange(path, *order: int) -> None:
    """The first lines of a file in another order, as a hand would write them: no size changes."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[n] for n in order] + lines[len(order) :]))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 3, 2, 1, 4, 5), (0, 3, 1, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("name", [RAW, TOKENIZED])
def test_turns_in_another_order_are_named_and_put_right_without_generating(rundir, redis_client, name, order):
    """Within a row, or between two rows; in either file. Nothing is lost, nothing moves away, nothing waits."""
    publish(redis_client, group(1), group(2), group(3))
    collect(rundir, redis_client)
    exchange(rundir.file("chat", name), *order)
    assert set(verify(rundir).findings) == {"turns_apart"}
    mended = mend(rundir)
    assert (mended.put_in_order > 0) == (name == RAW)
    assert mended.set_aside == 0
    collect(rundir, redis_client)
    assert sorted(turns_of(rundir, RAW)) == sorted(turns_of(rundir, TOKENIZED)) == sorted(whole(1, 2, 3))
    assert not lines_of(rundir, SUPERSEDED)
    assert verify(rundir).ok, verify(rundir).render()


def test_an_exchange_before_samples_are_derived_keeps_nobody_waiting(rundir, redis_client):
    """Killed between raw lines and samples, and then edited: the collector puts the turns right and goes on."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    rundir.file("chat", TOKENIZED).unlink()
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
    path, before = rundir.file("chat", RAW), rundir.file("chat", RAW).stat()
    exchange(path, 1, 0)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # an editor that leaves no trace
    collector = Collector(rundir, redis_client, "run1", SampleFilters())
    collector._mend_if_dirty()
    collector.close()
    assert sorted(turns_of(rundir, TOKENIZED)) == sorted(whole(1, 2))
    assert verify(rundir).ok, verify(rundir).render()


def test_a_turn_that_stands_twice_is_superseded_and_two_that_differ_are_made_again(rundir, redis_client):
    """A copied line moves away. Of two different ones nobody can say which is true: the row is made again."""
    publish(redis_client, group(1), group(2), group(3))
    collect(rundir, redis_client)
    path = rundir.file("chat", RAW)
    lines = path.read_bytes().splitlines(keepends=True)
    other = line_of(response(a_row(2), turn=1, turns=3, text="another"))
    path.write_bytes(b"".join([*lines[:2], lines[1], *lines[2:5], other, *lines[5:]]))
    mended = mend(rundir)
    assert (mended.put_in_order, mended.set_aside) == (1, 1)
    assert sorted(turns_of(rundir, RAW)) == sorted(whole(1, 3))
    assert sorted(turns_of(rundir, SUPERSEDED)) == sorted([(a_row(1), 1), *whole(2), (a_row(2), 1)])


def test_the_last_line_taken_from_a_finished_file_makes_its_row_pending(rundir, redis_client):
    """Its samples are still whole; raw lines come first, so the row is not."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    path = rundir.file("chat", RAW)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert mend(rundir).set_aside == 1
    assert turns_of(rundir, RAW) == turns_of(rundir, TOKENIZED) == whole(1)
    assert verify(rundir).ok, verify(rundir).render()


def test_deriving_again_says_what_it_put_right_and_drops_nothing(rundir, redis_client):
    """`headrace tokenize`: as many samples as before."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    rundir.run_json.write_bytes(orjson.dumps({
        "run_id": "run1", "created_at": "2026-01-01", "headrace": "0", "recipe_fingerprint": RECIPE,
        "recipe": {"tokenizer": {}, "rendering": {"turns": "all"}, "sampling": {}},
        "filters": SampleFilters().to_json(),
    }))  # fmt: skip
    exchange(rundir.file("chat", RAW), 1, 0)
    done = CliRunner().invoke(cli, ["tokenize", str(rundir.out), "--json"], standalone_mode=False)
    said = orjson.loads(done.stdout)
    assert said["chats"] == {"put_in_order": 1, "set_aside": 0, "to_derive": 0}
    assert [(one["responses"], one["samples"]) for one in said["datasets"]] == [(6, 6)]
    assert "1 chats had their turns in another order" in done.stderr
    assert verify(rundir).ok, verify(rundir).render()


def test_a_sample_taken_from_the_middle_is_derived_again_with_its_row(rundir, redis_client):
    """The raw lines are whole: nothing is generated."""
    publish(redis_client, group(1), group(2))
    collect(rundir, redis_client)
    path = rundir.file("chat", TOKENIZED)
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[:1] + written[2:]))
    collect(rundir, redis_client)
    assert turns_of(rundir, TOKENIZED) == whole(2, 1)
    assert turns_of(rundir, RAW) == whole(1, 2)
    assert verify(rundir).ok, verify(rundir).render()


def test_a_group_that_comes_twice_is_written_once(rundir, redis_client):
    """As every entry."""
    publish(redis_client, group(1))
    collect(rundir, redis_client)
    publish(redis_client, group(1))
    collect(rundir, redis_client)
    assert turns_of(rundir, RAW) == whole(1)

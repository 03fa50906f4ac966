"""The producer's end of Redis: marks that hold, lanes that do not starve each other, keys that are sent once."""

import os
import threading

import orjson
import pytest

from app.celery_app import GENERATE_TASK, make_app
from app.lanes import Lane
from app.packing import pack_task
from app.records import Task
from app.store.keys import CELERY_PREFIX, RunKeys
from producers.conveyor import Conveyor, Stopped
from producers.lost import Lost
from producers.rendering import Parcel
from tests.belt import until
from tests.own_redis import OwnRedis

KEYS = RunKeys("run1")


def parcels(lane: Lane, first: int, count: int) -> list[Parcel]:
    """Tasks whose own lengths put them in this lane."""
    allowance = 64 if lane is Lane.SHORT else 100_000
    prompt = [1, 2, 3] if lane is Lane.SHORT else [1] * 9000
    found = []
    for number in range(first, first + count):
        task = Task(
            key=f"{number:032x}", dataset="d", row_id=f"{number:024x}", source_id="", row_number=number, turn=0,
            turns=1, completion_index=0, max_new_tokens=allowance, prompt_token_ids=prompt,
        )  # fmt: skip
        found.append(Parcel(task.key, task.id, "d", number, lane, pack_task(task)))
    return found


def queued(client, lane: Lane) -> int:
    return client.llen(CELERY_PREFIX + lane.queue)


@pytest.fixture
def stop():
    """Set to make a waiting conveyor give up."""
    return threading.Event()


@pytest.fixture
def celery(redis_url):
    """The application that workers have, too."""
    return make_app(redis_url)


@pytest.fixture
def conveyor(redis_client, celery, stop):
    """With a mark of 20 tasks a lane."""
    return Conveyor(redis_client, celery, "run1", 20, stop.is_set)


@pytest.fixture
def lost(conveyor, redis_client):
    """What got lost behind it."""
    return Lost(conveyor, redis_client, "run1")


def in_background(action):
    """Run it in a thread; returns the thread and a list that gets what it raised."""
    raised: list[Exception] = []

    def call() -> None:
        try:
            action()
        except Stopped as exc:
            raised.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, raised


def test_a_full_lane_waits_and_goes_on_when_there_is_room(conveyor, redis_client):
    """Never more than the mark in a lane; what waited is sent when the lane is emptied."""
    conveyor.put(parcels(Lane.LONG, 100, 20))  # the other lane is not hungry, so nothing is set aside for it
    thread, _ = in_background(lambda: conveyor.put(parcels(Lane.SHORT, 0, 50)))
    until(lambda: queued(redis_client, Lane.SHORT) == 20)
    seen = 20
    while seen < 50:
        assert queued(redis_client, Lane.SHORT) <= 20
        seen += len(redis_client.lpop(CELERY_PREFIX + Lane.SHORT.queue, 20) or [])
    thread.join(20)
    assert not thread.is_alive()
    assert queued(redis_client, Lane.LONG) == 20


def test_a_full_lane_does_not_starve_the_other(conveyor, redis_client):
    """Long tasks beyond the mark are set aside while short ones are wanted, and come back when there is room."""
    conveyor.put(parcels(Lane.LONG, 0, 60))
    assert queued(redis_client, Lane.LONG) == 20
    conveyor.put(parcels(Lane.SHORT, 100, 5))
    assert queued(redis_client, Lane.SHORT) == 5
    thread, _ = in_background(conveyor.put_aside_back)
    taken = 0
    while taken < 60:
        taken += len(redis_client.lpop(CELERY_PREFIX + Lane.LONG.queue, 20) or [])
    thread.join(20)
    assert not thread.is_alive()
    assert redis_client.hlen(KEYS.payload("d")) == 65


def test_what_was_done_while_it_waited_for_room_is_not_sent(conveyor, redis_client):
    """A worker had it in hand when Redis forgot it: by the time there is room the files have it."""
    done: set[int] = set()
    conveyor.still_missing = lambda some: [parcel for parcel in some if parcel.number not in done]
    conveyor.put(parcels(Lane.LONG, 0, 60))
    done |= set(range(30, 50))
    thread, _ = in_background(conveyor.put_aside_back)
    while thread.is_alive():
        redis_client.lpop(CELERY_PREFIX + Lane.LONG.queue, 20)
    assert redis_client.hlen(KEYS.payload("d")) == 40


def test_a_stop_ends_the_wait(conveyor, stop, redis_client):
    """A producer that waits for room leaves when it is told to."""
    conveyor.put(parcels(Lane.LONG, 100, 20))
    thread, raised = in_background(lambda: conveyor.put(parcels(Lane.SHORT, 0, 50)))
    until(lambda: queued(redis_client, Lane.SHORT) == 20)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_a_key_that_redis_knows_is_not_sent_again(conveyor, redis_client):
    """Sending twice leaves one payload and one message."""
    conveyor.put(parcels(Lane.SHORT, 0, 5))
    conveyor.put(parcels(Lane.SHORT, 3, 5))
    assert redis_client.hlen(KEYS.payload("d")) == queued(redis_client, Lane.SHORT) == 8


def test_lost_messages_are_sent_again_and_live_ones_are_not(conveyor, lost, redis_client):
    """While a message waits nothing is sent again; a payload seen twice without message or claim gets one."""
    conveyor.put(parcels(Lane.SHORT, 0, 7))
    assert lost.send_again(["d"], at_once=True) == 0
    redis_client.delete(CELERY_PREFIX + Lane.SHORT.queue)
    redis_client.zadd(KEYS.claims("d"), {f"{6:032x}": 4e12})
    assert lost.send_again(["d"]) == 0
    assert lost.send_again(["d"]) == 6
    assert queued(redis_client, Lane.SHORT) == 6


def test_many_lost_messages_are_sent_again_by_and_by(redis_client, celery):
    """A Redis is not stopped by one command with all of them in it."""
    conveyor = Conveyor(redis_client, celery, "run1", 2000, lambda: False)
    lost = Lost(conveyor, redis_client, "run1")
    conveyor.put(parcels(Lane.SHORT, 0, 1200))
    redis_client.delete(CELERY_PREFIX + Lane.SHORT.queue)
    redis_client.config_resetstat()
    assert lost.send_again(["d"], at_once=True) == queued(redis_client, Lane.SHORT) == 1200
    assert redis_client.info("commandstats")["cmdstat_lpush"]["calls"] == 3


def test_lost_messages_are_sent_again_though_other_runs_never_leave_a_lane_empty(conveyor, lost, redis_client):
    """Once what waited behind them has been taken, and again what came after that; never while they wait themselves."""
    lane = CELERY_PREFIX + Lane.SHORT.queue
    conveyor.put(parcels(Lane.SHORT, 0, 3))
    for _ in range(3):
        assert lost.send_again(["d"]) == 0
    assert queued(redis_client, Lane.SHORT) == 3
    redis_client.delete(lane)
    for other in (b"first", b"second"):
        redis_client.lpush(lane, other)
        assert lost.send_again(["d"]) == (0 if other == b"first" else 3)
        assert lost.send_again(["d"]) == 0
        redis_client.lrem(lane, 1, other)


def test_what_the_files_have_by_now_is_dropped_instead_of_sent_again(conveyor, lost, redis_client):
    """A claim that expired, of an answer that came by another way."""
    conveyor.put(parcels(Lane.SHORT, 0, 3))
    assert lost.send_again(["d"]) == 0
    conveyor.still_missing = lambda some: [parcel for parcel in some if parcel.number != 1]
    redis_client.zadd(KEYS.claims("d"), {f"{1:032x}": 1, f"{2:032x}": 1})
    assert lost.send_again(["d"]) == 1
    assert redis_client.hlen(KEYS.payload("d")) == 2


def test_a_redis_that_forgot_its_last_seconds_gives_no_answered_task_out_again(tmp_path):
    """Killed before it wrote down what it had said: all that it takes for waiting is compared with the files."""
    done: set[int] = set()
    with OwnRedis(tmp_path / "redis") as box:
        client = box.client()
        conveyor = Conveyor(client, make_app(box.url), "run1", 1000, lambda: False)
        lost = Lost(conveyor, client, "run1")
        conveyor.still_missing = lambda some: [parcel for parcel in some if parcel.number not in done]
        conveyor.put(parcels(Lane.SHORT, 0, 700))
        assert lost.send_again(["d"]) == 0
        (written,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
        size = written.stat().st_size
        done |= set(range(600))
        client.hdel(KEYS.payload("d"), *(f"{number:032x}" for number in done))
        box.kill()
        os.truncate(written, size)
        box.start()
        assert client.hlen(KEYS.payload("d")) == 700
        assert lost.send_again(["d"]) == 0
        assert client.hlen(KEYS.payload("d")) == 100


def test_a_task_message_is_small_and_readable(conveyor, redis_client):
    """About 1 KB, without the prompt; Flower shows dataset and row, and the id people know."""
    (parcel,) = parcels(Lane.LONG, 7, 1)
    conveyor.put([parcel])
    message = redis_client.lindex(CELERY_PREFIX + Lane.LONG.queue, 0)
    assert len(message) < 1500
    assert b'"argsrepr": "d row 7"' in message
    assert f'"id": "{parcel.task_id}"'.encode() in message


@pytest.mark.parametrize("lane", Lane)
def test_a_message_is_what_celery_would_send_itself(conveyor, celery, redis_client, lane):
    """Field for field, in the same list; the delivery tag alone is each message's own."""
    (parcel,) = parcels(lane, 7, 1)
    conveyor.put([parcel])
    celery.send_task(
        GENERATE_TASK, ("run1", "d", parcel.key), task_id=parcel.task_id, queue=lane.queue, ignore_result=True,
        argsrepr="d row 7", kwargsrepr="",
    )  # fmt: skip
    theirs, ours = map(orjson.loads, redis_client.lrange(CELERY_PREFIX + lane.queue, 0, -1))
    tags = {message["properties"].pop("delivery_tag") for message in (theirs, ours)}
    assert ours == theirs
    assert len(tags) == 2


def test_a_message_that_is_sent_again_has_a_delivery_tag_of_its_own(conveyor, lost, redis_client):
    """Workers keep what they took by that: two with one would be acknowledged together."""
    some = parcels(Lane.SHORT, 0, 3)
    conveyor.put(some)
    redis_client.zadd(KEYS.claims("d"), {parcel.key: 1 for parcel in some})
    assert lost.send_again(["d"]) == 3
    sent = map(orjson.loads, redis_client.lrange(CELERY_PREFIX + Lane.SHORT.queue, 0, -1))
    assert len({message["properties"]["delivery_tag"] for message in sent}) == 6

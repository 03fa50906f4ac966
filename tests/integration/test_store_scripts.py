"""The Lua scripts on a real Redis: each transition, and what a repeated or late call does."""

import itertools
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.capacity.lengths import parse_curve
from app.capacity.peak import Forecast, Held
from app.capacity.share import Share, parse_share
from app.store import scripts
from app.store.holders import forget_all
from app.store.keys import DEATHS, EPOCH, EXPECTED, SEEN, WOKE, EndpointKeys, RunKeys
from workers.admission import lease_keys

RUN = RunKeys("r1")
E1, E2 = EndpointKeys("e1"), EndpointKeys("e2")
PAYLOAD, CLAIMS, HOLDERS, PUBLISHED = RUN.payload("d"), RUN.claims("d"), RUN.holders("d"), RUN.published("d")


def offer(client, *pairs):
    return scripts.call(client, "offer", [PAYLOAD, PUBLISHED], list(pairs))


def claim(client, key, holder, ttl=10_000):
    return scripts.call(client, "claim", [PAYLOAD, CLAIMS, HOLDERS, RUN.halt, DEATHS], [key, holder, ttl, f"r:{key}"])


def publish(client, key, lease="", blob=b"x"):
    keys = [RUN.responses, PAYLOAD, CLAIMS, HOLDERS, PUBLISHED, E1.leases, E1.lease_info, DEATHS]
    return scripts.call(client, "publish", keys, [key, "d", "response", blob, lease, f"r:{key}"])


def lease(client, requests, ceilings=((-1, -1, -1, -1, -1),), endpoints=(E1,), ttl=10_000, settle=10_000):
    """requests: (id, lane, prompt tokens, may) with an allowance of 1. Returns [settling_ms, place, place, …]."""
    keys = [EPOCH, EXPECTED, *(k for e in endpoints for k in lease_keys(e))]
    asked = [word for name, lane, prompt, may in requests for word in (name, lane, prompt, 1, "kind", may, "0", 0)]
    words = [ttl, settle, len(endpoints), *(n for c in ceilings for n in c), *asked]
    answer = scripts.call(client, "lease", keys, words)
    return [answer[0], *answer[3:]]


def test_a_key_is_offered_once(redis_client):
    """A key that waits, or is in the stream, is not accepted again."""
    assert offer(redis_client, "a", b"1", "b", b"2") == [1, 1]
    assert offer(redis_client, "a", b"other", "c", b"3") == [0, 1]
    assert redis_client.hget(PAYLOAD, "a") == b"1"
    claim(redis_client, "a", "w1")
    publish(redis_client, "a")
    assert offer(redis_client, "a", b"1") == [0]


def test_a_live_foreign_claim_is_respected_and_a_dead_one_is_not(redis_client):
    """One holder at a time; the holder itself may claim again; an expired claim is free."""
    offer(redis_client, "a", b"1")
    assert claim(redis_client, "a", "w1", ttl=150) == [b"claimed", b"1", b""]
    assert claim(redis_client, "a", "w2") == [b"held"]
    assert claim(redis_client, "a", "w1", ttl=150) == [b"claimed", b"1", b""]
    deadline = time.monotonic() + 5
    while (answer := claim(redis_client, "a", "w2")) == [b"held"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answer == [b"claimed", b"1", b""]
    assert claim(redis_client, "nothing", "w1") == [b"gone"]


def test_publishing_is_all_or_nothing_and_once(redis_client):
    """The response enters the stream, payload, claim and lease end; a second publish of the key adds nothing."""
    offer(redis_client, "a", b"1")
    claim(redis_client, "a", "w1")
    lease(redis_client, [("L1", "short", 10, "1")])
    assert publish(redis_client, "a", lease="L1") == 1
    assert redis_client.xlen(RUN.responses) == 1
    assert not redis_client.exists(PAYLOAD, CLAIMS, HOLDERS, E1.leases, E1.lease_info)
    assert publish(redis_client, "a") == 0
    assert redis_client.xlen(RUN.responses) == 1


def test_commit_forgets_exactly_the_given_entries(redis_client):
    """What the files have leaves stream, published set and counters; the rest stays."""
    other = "d2"
    for key in ("a", "b", "c"):
        offer(redis_client, key, b"1")
        publish(redis_client, key)
        redis_client.hincrby(RUN.sent, key, 1)
        redis_client.hincrby(RUN.charges, key, 1)
    redis_client.sadd(RUN.published(other), "x", "y")
    redis_client.xgroup_create(RUN.responses, "collector", id="0")
    ((_, entries),) = redis_client.xreadgroup("collector", "c", {RUN.responses: ">"})
    assert scripts.call(
        redis_client, "commit", [RUN.responses, RUN.sent, RUN.charges, PUBLISHED, RUN.published(other)],
        ["collector", 2, entries[0][0], entries[2][0], "a", "c", 1, "0-1", "x"],
    ) == 3  # fmt: skip
    assert redis_client.xrange(RUN.responses) == entries[1:2]
    assert redis_client.xpending(RUN.responses, "collector")["pending"] == 1
    assert redis_client.smembers(PUBLISHED) == {b"b"}
    assert redis_client.smembers(RUN.published(other)) == {b"y"}
    assert redis_client.hkeys(RUN.sent) == redis_client.hkeys(RUN.charges) == [b"b"]


def test_an_expired_claim_and_an_unclaimed_key_are_orphaned(redis_client):
    """Expired claims are found always, unclaimed keys only when asked; a live claim never."""
    offer(redis_client, "dead", b"1", "live", b"2", "new", b"3")
    claim(redis_client, "dead", "w1", ttl=1)
    claim(redis_client, "live", "w2")
    keys = [PAYLOAD, CLAIMS, HOLDERS]
    deadline = time.monotonic() + 5
    while not (found := scripts.call(redis_client, "orphaned", keys, [0, 10])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == [b"dead"]
    assert set(scripts.call(redis_client, "orphaned", keys, [1, 10])) == {b"dead", b"new"}


def test_renewing_sets_claims_anew_and_names_those_that_are_lost(redis_client):
    """After a loss of Redis a heartbeat brings claims back; a key that somebody else holds by now is reported."""
    offer(redis_client, "mine", b"1", "theirs", b"2")
    claim(redis_client, "theirs", "w2")
    lost = scripts.call(redis_client, "renew_claims", [CLAIMS, HOLDERS], [10_000, "mine", "w1", "theirs", "w1"])
    assert lost == [b"theirs"]
    assert claim(redis_client, "mine", "w3") == [b"held"]


@pytest.mark.parametrize(
    ("ceilings", "requests", "granted"),
    [
        ((2, -1, -1, -1, -1), [("a", "short", 1), ("b", "long", 1), ("c", "short", 1)], [1, 1, 0]),
        ((-1, 1, -1, -1, -1), [("a", "short", 1), ("b", "short", 1), ("c", "long", 1)], [1, 0, 1]),
        ((-1, -1, -1, 100, -1), [("a", "short", 60), ("b", "short", 50), ("c", "short", 40)], [1, 0, 0]),
        ((-1, -1, -1, 100, -1), [("big", "long", 500), ("b", "short", 50)], [1, 0]),
    ],
    ids=["all", "lane", "tokens-in-order", "an-empty-endpoint-takes-anything"],
)
def test_ceilings_hold(redis_client, ceilings, requests, granted):
    """Requests of all, of a lane, and tokens; nobody of a lane overtakes an elder that waits."""
    answer = lease(redis_client, [(*r, "1") for r in requests], ceilings=(ceilings,))
    assert answer == [0, *granted]


def test_the_freer_endpoint_is_chosen_and_an_open_one_never(redis_client):
    """Requests go to the largest free share; an open breaker grants nothing; a request goes only where it may."""
    two = {"endpoints": (E1, E2), "ceilings": ((-1, -1, -1, 100, -1), (-1, -1, -1, 1000, -1))}
    assert lease(redis_client, [("a", "short", 50, "11"), ("b", "short", 50, "10")], **two) == [0, 2, 1]
    redis_client.set(E2.open, "{}")
    assert lease(redis_client, [("c", "short", 60, "11"), ("d", "short", 10, "11")], **two) == [0, 0, 0]


def test_expired_leases_free_their_share(redis_client):
    """A holder that died returns its share after the lease's time, under load."""
    assert lease(redis_client, [("a", "short", 100, "1")], ceilings=((-1, -1, -1, 100, -1),), ttl=80) == [0, 1]
    deadline = time.monotonic() + 5
    while True:
        answer = lease(redis_client, [("b", "short", 100, "1")], ceilings=((-1, -1, -1, 100, -1),))
        if answer == [0, 1] or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert answer == [0, 1]
    assert redis_client.hkeys(E1.lease_info) == [b"b"]


def test_a_redis_that_forgot_everything_admits_nothing_until_it_settled(redis_client):
    """An unknown epoch starts a pause in which holders assert their leases again."""
    redis_client.flushall()
    first = lease(redis_client, [("a", "short", 1, "1")], settle=200)
    assert 0 < first[0] <= 200
    assert first[1] == 0
    deadline = time.monotonic() + 5
    while (answer := lease(redis_client, [("a", "short", 1, "1")], settle=200))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answer == [0, 1]


def ask(client, *requests, budget=100, per_minute=-1):
    """requests: (id, lane, prompt tokens, urgent). Returns their places at E1."""
    return answered(client, *requests, budget=budget, per_minute=per_minute)[3:]


def answered(client, *requests, budget=100, per_minute=-1):
    """The same; returns all that is answered."""
    asked = ((name, lane, prompt, 1, "kind", "1", urgent, 0) for name, lane, prompt, urgent in requests)
    words = [word for words in asked for word in words]
    keys = [EPOCH, EXPECTED, *lease_keys(E1)]
    return scripts.call(client, "lease", keys, [10_000, 0, 1, -1, -1, -1, budget, per_minute, *words])


def release(client, name):
    """Its holder gives it back."""
    scripts.call(client, "release_lease", [E1.leases, E1.lease_info], [name])


def test_leases_without_their_sums_are_added_up_anew(redis_client):
    """An older version wrote them, or a person took some away: what is held counts all the same."""
    assert ask(redis_client, ("a", "short", 40, 0), ("b", "short", 40, 0)) == [1, 1]
    redis_client.delete(E1.lease_sums)
    assert ask(redis_client, ("c", "short", 40, 0)) == [0]
    redis_client.delete(E1.lease_sums)
    redis_client.hset(E1.lease_sums, "short 1 1796004900000 kind", "2 80 3200")  # as they were written before
    assert ask(redis_client, ("c", "short", 40, 0)) == [0]
    redis_client.zrem(E1.leases, "a")
    redis_client.hdel(E1.lease_info, "a")
    assert ask(redis_client, ("c", "short", 40, 0)) == [1]
    for name in "bc":
        release(redis_client, name)
    assert not redis_client.exists(E1.leases, E1.lease_info, E1.lease_sums)


def test_those_who_wait_ask_by_turns(redis_client):
    """Each is told a later moment than the one before, none one that is far; who got all it asked for takes no turn."""
    assert answered(redis_client, ("a", "short", 90, 0))[2:] == [3, 1]

    def turn(number: int) -> int:
        _, _, pause, place = answered(redis_client, (f"w{number}", "short", 20, 0))
        assert place == 0
        assert 3 <= pause <= 500
        return int(redis_client.get(SEEN)) + pause

    turns = list(map(turn, range(20)))
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(turns))
    before = redis_client.hget(E1.control, "turn")
    assert answered(redis_client, ("b", "short", 1, 0))[2:] == [3, 1]
    assert redis_client.hget(E1.control, "turn") == before
    redis_client.hset(E1.control, "turn", 10**15)  # a clock that was put back
    turn(20)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    held=st.lists(st.tuples(
        st.integers(1, 3000), st.integers(1, 5000), st.integers(0, 20_000), st.sampled_from([True, True, True, False])
    ), max_size=40),
    prompt=st.integers(1, 3000), rate=st.sampled_from([0.05, 0.3]),
)  # fmt: skip
def test_the_script_and_the_pure_module_predict_the_same_peak(redis_client, held, prompt, rate):
    """Requests of any age, kind and allowance: a pool of that size takes one more, one a little smaller does not."""
    curve = parse_curve("0:1 500:0.9 1000:0.6 2000:0.3 4000:0")
    names, curves = EndpointKeys("same"), {"known": curve, "unknown": None}
    redis_client.delete(*names.all)
    redis_client.hset(EXPECTED, "known", curve.dump())
    redis_client.hset(names.control, mapping={"rate": rate, "at": 10**15})
    seconds, microseconds = redis_client.time()
    now = seconds * 1000 + microseconds // 1000
    kinds = ["known" if known else "unknown" for *_, known in held]
    shares = [Share("short", *h[:2], now - h[2] - h[2] % 8, kind) for h, kind in zip(held, kinds, strict=True)]
    words = [word for n, share in enumerate([Share("short", 1, 1, now, "known"), *shares]) for word in (n, str(share))]
    scripts.call(redis_client, "renew_leases", [names.leases, names.lease_info], [60_000, *words])

    def takes(pool):
        asked = ["new", "short", prompt, 5000, "known", "1", "0", 0]
        keys = [EPOCH, EXPECTED, *lease_keys(names)]
        return scripts.call(redis_client, "lease", keys, [60_000, 0, 1, -1, -1, -1, pool, -1, *asked])[3] == 1

    def peak():
        seconds, microseconds = redis_client.time()
        now = seconds * 1000 + microseconds / 1000
        made = [share.made(now, rate) for share in (Share("short", 1, 1, now, "known"), *shares)]
        all_of = [Share("short", 1, 1, int(now), "known"), *shares]
        there = [Held(s.prompt_tokens + m, m, s.allowance, curves[s.kind]) for s, m in zip(all_of, made, strict=True)]
        candidate = Held(prompt, 0, 5000, curve)
        return Forecast(there, [candidate]).peak_with(candidate)

    slack = 40 * 50 * rate + 0.005 * peak()  # of the time that passes between the two, and of neighbours in a group
    def takes_at_once(sign):
        while True:  # what is held grows meanwhile
            began = time.monotonic()
            taken = takes(int(peak() + sign * slack))
            if time.monotonic() - began < 0.04:
                return taken
            scripts.call(redis_client, "release_lease", [names.leases, names.lease_info], ["new"])

    assert not takes_at_once(-1)
    assert takes_at_once(1)


def test_who_waited_long_reserves_its_place_and_neither_lane_starves_the_other(redis_client):
    """Once urgent, what others free is kept for it, whichever lane and worker they are of; then they go on."""
    assert ask(redis_client, ("a", "short", 50, 0), ("b", "short", 40, 0)) == [1, 1]
    assert ask(redis_client, ("big", "long", 80, 1)) == [0]
    release(redis_client, "b")
    assert ask(redis_client, ("c", "short", 40, 0)) == [0]
    release(redis_client, "a")
    assert ask(redis_client, ("c", "short", 40, 0), ("big", "long", 80, 1)) == [0, 1]
    assert not redis_client.exists(E1.reserved)


def test_a_request_larger_than_the_pool_goes_alone(redis_client):
    """Its reservation empties the endpoint, it goes, and nobody joins it."""
    assert ask(redis_client, ("a", "short", 50, 0)) == [1]
    assert ask(redis_client, ("giant", "long", 5000, 1)) == [0]
    assert ask(redis_client, ("b", "short", 1, 0)) == [0]
    release(redis_client, "a")
    assert ask(redis_client, ("b", "short", 1, 0), ("giant", "long", 5000, 1), ("c", "short", 1, 0)) == [0, 1, 0]


def test_requests_per_minute_are_counted_over_all_workers(redis_client):
    """A burst of one second's worth, then what the minute gives; a repeated call gets nothing for free."""
    requests = [(f"r{n}", "short", 1, 0) for n in range(10)]
    assert sum(ask(redis_client, *requests, budget=10_000, per_minute=180)) == 3
    assert sum(ask(redis_client, *requests[3:], budget=10_000, per_minute=180)) == 0
    redis_client.hincrby(E1.control, "rpm_at", -1000)
    assert sum(ask(redis_client, *requests[3:], budget=10_000, per_minute=180)) == 3


def test_what_lease_lua_writes_is_what_the_worker_asserts(redis_client):
    """The share in Redis and the one a heartbeat sets again are the same text."""
    ask(redis_client, ("a", "short", 50, 0))
    text = redis_client.hget(E1.lease_info, "a")
    assert str(parse_share(text)).encode() == text
    assert parse_share(text).prompt_tokens == 50


@pytest.fixture
def frozen(redis_client):
    """Makes it a minute since anybody reached this Redis, in which what w1 holds expired."""

    def freeze() -> None:
        redis_client.decrby(SEEN, 60_000)
        redis_client.zadd(CLAIMS, {"a": 1})
        redis_client.zadd(E1.leases, {"L1": 1})

    offer(redis_client, "a", b"1", "b", b"2")
    claim(redis_client, "a", "w1")
    lease(redis_client, [("L1", "short", 90, "1")], ceilings=((-1, -1, -1, 100, -1),))
    return freeze


def test_what_expired_while_redis_was_frozen_is_nobodys_yet(redis_client, frozen):
    """Whoever comes first takes neither the claim nor the share of a holder that could not renew; then it may."""
    frozen()
    assert claim(redis_client, "a", "w2") == [b"held"]
    assert scripts.call(redis_client, "orphaned", [PAYLOAD, CLAIMS, HOLDERS], [0, 10]) == []
    settling, place = lease(redis_client, [("L2", "short", 90, "1")], ceilings=((-1, -1, -1, 100, -1),))
    assert settling > 0
    assert place == 0
    assert scripts.call(redis_client, "renew_claims", [CLAIMS, HOLDERS], [10_000, "a", "w1"]) == []
    scripts.call(redis_client, "renew_leases", [E1.leases, E1.lease_info], [10_000, "L1", "short 90 1 1 kind"])
    assert lease(redis_client, [("L2", "short", 90, "1")], ceilings=((-1, -1, -1, 100, -1),)) == [0, 0]
    assert claim(redis_client, "b", "w2") == [b"claimed", b"2", b""]


def test_what_is_not_renewed_after_redis_was_frozen_is_free(redis_client, frozen):
    """Two heartbeats later whoever was silent is taken for dead."""
    frozen()
    assert claim(redis_client, "a", "w2") == [b"held"]
    redis_client.delete(WOKE)  # what its expiry does
    assert scripts.call(redis_client, "orphaned", [PAYLOAD, CLAIMS, HOLDERS], [0, 10]) == [b"a"]
    assert lease(redis_client, [("L2", "short", 90, "1")], ceilings=((-1, -1, -1, 100, -1),)) == [0, 1]


def test_a_new_start_forgets_who_held_what_and_keeps_what_was_learned(redis_client):
    """Leases and breakers of dead processes end; f, pace and the level at which an endpoint died are still known."""
    lease(redis_client, [("a", "short", 10, "1")], settle=0)
    redis_client.set(E1.open, "{}")
    redis_client.set(E1.learned, "{}")
    redis_client.hset(E1.control, "f", "0.9")
    redis_client.hset(EXPECTED, "kind", "0:1.0000 100:0.0000")
    forget_all(redis_client)
    assert not redis_client.exists(E1.leases, E1.lease_info, E1.open)
    assert redis_client.exists(E1.learned, E1.control, EXPECTED) == 3
    assert lease(redis_client, [("b", "short", 10, "1")]) == [0, 1]


def test_a_server_that_was_stopped_for_a_while_is_at_work_at_once(redis_client):
    """Nobody held anything meanwhile: what waits is sent again and leases are granted, though the last sign is old."""
    offer(redis_client, "a", "blob")
    redis_client.set(SEEN, 1)
    forget_all(redis_client)
    assert scripts.call(redis_client, "orphaned", [PAYLOAD, CLAIMS, HOLDERS], [1, 10]) == [b"a"]
    assert lease(redis_client, [("b", "short", 10, "1")]) == [0, 1]

"""Whatever several workers lease, release and let expire: the predicted peak at each grant is within f * KV.

On the real script and a real Redis. The peak is computed anew here, in Python, from what Redis says is held.
"""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from app.capacity.lengths import parse_curve
from app.capacity.peak import Forecast, Held
from app.capacity.share import parse_share
from app.lanes import Lane
from app.store import scripts
from app.store.keys import EPOCH, EXPECTED, SEEN, EndpointKeys
from workers.admission import lease_keys

KV_TOKENS = 20_000
ENDPOINTS = (EndpointKeys("p1"), EndpointKeys("p2"))
CURVE = parse_curve("0:1 500:0.9 1000:0.6 2000:0.3 4000:0")
KINDS = {"known": CURVE, "unknown": None}
ASKED = st.lists(
    st.tuples(
        st.sampled_from(list(Lane)), st.integers(1, 9000), st.integers(1, 5000), st.sampled_from(list(KINDS)),
        st.sampled_from(["11", "10", "01"]), st.booleans(),
    ), min_size=1, max_size=12,
)  # fmt: skip


class Fleet(RuleBasedStateMachine):
    """Two endpoints, any number of workers."""

    client = None  # set by the test

    @initialize(
        f=st.sampled_from([0.5, 1.0, 1.3]), rate=st.sampled_from([0.0, 0.01, 5.0]), foreign=st.sampled_from([0, 4000]),
        ceilings=st.sampled_from([(-1, -1, -1), (4, -1, -1), (-1, 2, 1)]), learned=st.sampled_from([-1, 3]),
    )  # fmt: skip
    def begin(self, f, rate, foreign, ceilings, learned):
        """An empty Redis, and what an observer wrote."""
        self.client.flushall()
        self.client.set(EPOCH, 0)
        self.client.hset(EXPECTED, "known", CURVE.dump())
        self.f, self.foreign, self.ceilings, self.learned, self.number = f, foreign, ceilings, learned, 0
        for names in ENDPOINTS:
            self.client.hset(names.control, mapping={
                "f": f, "rate": rate, "foreign": foreign, "requests": learned, "at": 10**15,
            })  # fmt: skip

    def ask(self, asked, ttl):
        """One call; returns (now, place of each, ids of each)."""
        words, ids = [], []
        for lane, prompt, allowance, kind, may, urgent in asked:
            self.number += 1
            ids.append(f"w:{self.number}")
            words += [ids[-1], lane.value, prompt, allowance, kind, may, "1" if urgent else "0", 0]
        keys = [EPOCH, EXPECTED, *(key for names in ENDPOINTS for key in lease_keys(names))]
        endpoint = [*self.ceilings, KV_TOKENS, -1]
        _, _, _, *places = scripts.call(self.client, "lease", keys, [ttl, 0, 2, *endpoint, *endpoint, *words])
        return int(self.client.get(SEEN)), places, ids

    def held(self, names, now, ids=()):
        """(granted before, lane, request) of every lease, as the script should see it; ids: of those granted now."""
        rate = float(self.client.hget(names.control, "rate"))
        for lease, text in self.client.hgetall(names.lease_info).items():
            share = parse_share(text)
            made = share.made(now, rate)
            request = Held(share.prompt_tokens + made, made, share.allowance, KINDS[share.kind])
            yield lease.decode() not in ids, share.lane, request

    @rule(asked=ASKED, ttl=st.sampled_from([1, 60_000]))
    def lease(self, asked, ttl):
        """A grant fits, or it found the endpoint empty; nobody joins where an elder of its lane was refused."""
        now, places, ids = self.ask(asked, ttl)
        everybody = [Held(prompt, 0, allowance, KINDS[kind]) for _, prompt, allowance, kind, *_ in asked]
        everybody += [request for names in ENDPOINTS for *_, request in self.held(names, now)]
        for place, names in zip((1, 2), ENDPOINTS, strict=True):
            if place not in places:
                continue
            held = list(self.held(names, now, ids))
            forecast = Forecast([request for before, _, request in held if before], everybody)
            for request in (request for before, _, request in held if not before):
                forecast.add(request)
            alone = len(held) == 1  # it found nothing held there that lives
            assert alone or forecast.peak + self.foreign <= self.f * KV_TOKENS * 1.001
            self.check_ceilings(held)
        self.check_order(asked, places)

    def check_ceilings(self, held):
        """Of all, of each lane, and the learned one."""
        lanes = [lane for _, lane, _ in held]
        everything, short, long = self.ceilings
        for count, most in (
            (len(held), everything), (lanes.count("short"), short), (lanes.count("long"), long),
            (len(held), self.learned),
        ):  # fmt: skip
            assert most < 0 or count <= most

    def check_order(self, asked, places):
        """Who was refused at an endpoint is overtaken there by nobody of its lane."""
        for elder, (lane, *_, may, _) in enumerate(asked):
            if places[elder]:
                continue
            for younger in range(elder + 1, len(asked)):
                if asked[younger][0] is lane and places[younger]:
                    assert may[places[younger] - 1] == "0"

    @rule(which=st.integers(0, 10), at=st.sampled_from(ENDPOINTS))
    def release(self, which, at):
        """A holder gives its lease back."""
        leases = self.client.zrange(at.leases, 0, -1)
        if leases:
            lease = leases[which % len(leases)]
            scripts.call(self.client, "release_lease", [at.leases, at.lease_info], [lease])

    @rule(which=st.integers(0, 10), at=st.sampled_from(ENDPOINTS), older=st.sampled_from([0, 700]))
    def assert_anew(self, which, at, older):
        """A heartbeat; also one that tells a share otherwise than Redis knows it."""
        leases = self.client.zrange(at.leases, 0, -1)
        if leases:
            lease = leases[which % len(leases)]
            share = parse_share(self.client.hget(at.lease_info, lease))
            share = dataclasses.replace(share, granted_ms=share.granted_ms - older)
            scripts.call(self.client, "renew_leases", [at.leases, at.lease_info], [60_000, lease, str(share)])

    @invariant()
    def all_keys_tell_the_same(self):
        """Every lease has its share, every share its lease, and the sums are those of the shares."""
        for names in ENDPOINTS:
            assert set(self.client.zrange(names.leases, 0, -1)) == set(self.client.hkeys(names.lease_info))
            groups = defaultdict(list)
            for text in self.client.hvals(names.lease_info):
                share = parse_share(text)
                lane, _, allowance, granted, *kind = str(share).split()
                groups[" ".join((granted, lane, allowance, *kind)).encode()].append(share.prompt_tokens)
            sums = {key: f"{len(group)} {sum(group)} {sum(n * n for n in group)}" for key, group in groups.items()}
            assert self.client.hgetall(names.lease_sums) == {key: text.encode() for key, text in sums.items()}


@pytest.mark.timeout(120)
def test_the_predicted_peak_at_each_grant_is_within_f_times_the_pool(redis_client):
    """Ceilings hold, an empty endpoint takes anything, and nobody overtakes an elder of its lane."""
    Fleet.client = redis_client
    run_state_machine_as_test(
        Fleet,
        settings=settings(max_examples=60, stateful_step_count=12, deadline=None,
                          suppress_health_check=list(HealthCheck)),
    )  # fmt: skip

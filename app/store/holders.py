"""Ending what dead processes held, where it is certain that they are dead: on this machine, by their supervisor.

Everywhere else claims and leases end by their own expiry.
"""

from collections.abc import Iterable

import redis

from app.store.keys import EPOCH, PREFIX, SEEN, WOKE, RunKeys

_BATCH = 1000


def forget_all(client: redis.Redis) -> None:
    """On a private server that nobody uses yet: end whatever was held, so that work goes on at once.

    Messages are sent again from their payloads; leases, claims and open breakers of the last run mean nothing now. What
    was learned of an endpoint stays: how much it takes, its pace, and the level at which it died.
    """
    dead = [
        key for pattern in ("endpoint:*", "run:*:claims:*", "run:*:holders:*", "worker*", "celery:*")
        for key in client.scan_iter(PREFIX + pattern, count=_BATCH)
        if not key.endswith((b":learned", b":control"))
    ]  # fmt: skip
    for start in range(0, len(dead), _BATCH):
        client.delete(*dead[start : start + _BATCH])
    client.delete(SEEN, WOKE)  # a server that was stopped for a while was not cut off from anybody
    client.set(EPOCH, 0)


def forget_worker(client: redis.Redis, worker: str, run_id: str, datasets: Iterable[str]) -> int:
    """End the claims and leases of one dead worker; its keys are sent again at the next look. Returns how many.

    worker: its full node name, `name@host`.
    """
    keys, count = RunKeys(run_id), 0
    for dataset in datasets:
        held = [
            key for key, holder in client.hgetall(keys.holders(dataset)).items()
            if holder.startswith(f"{worker}/".encode())
        ]  # fmt: skip
        if held:
            client.zadd(keys.claims(dataset), dict.fromkeys(held, 0), xx=True)
            count += len(held)
    for leases in list(client.scan_iter(PREFIX + "endpoint:*:leases", count=_BATCH)):
        mine = [lease for lease in client.zrange(leases, 0, -1) if lease.startswith(f"{worker}:".encode())]
        if mine:
            client.zadd(leases, dict.fromkeys(mine, 0), xx=True)
    return count

"""`headrace workers`: who serves the lanes, with how many slots; more of them, fewer, or one worker less."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from app.celery_app import make_app
from app.cli.inspect import redis_of
from app.cli.talk import say, show
from app.errors import OK, StorageError, UsageError
from app.store.connection import connect, translated
from app.store.live import WorkerNow, workers_at

_REPLY_SECONDS = 5.0
_MOST_SLOTS = 10_000


def list_command(out: Path | None, redis_url: str | None, as_json: bool) -> int:
    """`headrace workers list`."""
    url = redis_of(out, redis_url)
    workers = _workers(url)
    if as_json:
        show(_json(workers, {}))
        return OK
    show(_table(workers, {}))
    say(f"another one, on any host that reaches it: headrace worker --redis {url}" if "@" not in url else
        "another one, on any host: headrace worker --redis URL")  # fmt: skip
    return OK


def scale_command(total: int, out: Path | None, redis_url: str | None, as_json: bool) -> int:
    """`headrace workers scale N`: N slots altogether, spread evenly over the workers that do not drain."""
    url = redis_of(out, redis_url)
    workers = [one for one in _workers(url) if not one.draining]
    if not workers:
        raise UsageError("No worker gave a sign of late; start one with `headrace worker --redis URL`.")
    if total < len(workers):
        raise UsageError(f"{len(workers)} workers need a slot each; `headrace workers stop NAME` stops one.")
    if total > _MOST_SLOTS * len(workers):
        raise UsageError(f"A worker holds {_MOST_SLOTS:,} tasks at most; start more of them with `headrace worker`.")
    share, more = divmod(total, len(workers))
    wanted = {one.name: share + (number < more) for number, one in enumerate(workers)}
    before = _resize(url, wanted)
    workers = [replace(one, slots=before.get(one.name, one.slots)) for one in workers]
    reached = {one.name: wanted[one.name] if one.name in before else one.slots for one in workers}
    if as_json:
        show(_json(workers, reached))
    else:
        show(_table(workers, reached))
    if silent := [one.name for one in workers if one.name not in before]:
        raise StorageError(f"No answer from {', '.join(silent)} in {_REPLY_SECONDS:g} s; the others were changed.")
    return OK


def stop_command(names: tuple[str, ...], out: Path | None, redis_url: str | None) -> int:
    """`headrace workers stop NAME...`: each drains and ends; what it held is taken by the others."""
    url = redis_of(out, redis_url)
    known = [one.name for one in _workers(url)]
    for name in names:
        if name not in known:
            raise UsageError(f"No worker {name}; there are: {', '.join(known) or 'none'}.")
    with contextlib.closing(make_app(url)) as celery, translated(url):
        celery.control.broadcast("shutdown", destination=list(names))
    say(f"{', '.join(names)}: draining")
    return OK


def _workers(url: str) -> list[WorkerNow]:
    with contextlib.closing(connect(url)) as client, translated(url):
        return workers_at(client)


def _resize(url: str, wanted: dict[str, int]) -> dict[str, int]:
    """Set the slots of workers; how many each had before, of those that answered."""
    before: dict[str, int] = {}
    with contextlib.closing(make_app(url)) as celery, translated(url):
        for name, n in wanted.items():
            order = {"destination": [name], "reply": True, "timeout": _REPLY_SECONDS, "limit": 1}
            for reply in celery.control.broadcast("slots", arguments={"n": n}, **order) or ():
                before |= {one: said["before"] for one, said in reply.items() if "before" in said}
    return before


def _json(workers: list[WorkerNow], slots: dict[str, int]) -> str:
    said = [
        {
            "name": one.name, "lanes": list(one.lanes), "slots": slots.get(one.name, one.slots), "claims": one.claims,
            "leases": one.leases, "waiting": one.waiting, "draining": one.draining,
            "age_seconds": round(one.age_seconds, 1),
        }
        for one in workers
    ]  # fmt: skip
    return json.dumps({"workers": said}, ensure_ascii=False)


def _table(workers: list[WorkerNow], wanted: dict[str, int]) -> str:
    slots = {one.name: _slots(one.slots, wanted.get(one.name, one.slots)) for one in workers}
    width = max([24, *(len(one.name) for one in workers)])
    room = max([12, *(2 + len(one) for one in slots.values())])
    lines = [f"{'worker':<{width}}{'slots':>{room}}{'at endpoints':>14}{'waiting':>10}"]
    for one in workers:
        state = "  draining" if one.draining else ""
        lines.append(f"{one.name:<{width}}{slots[one.name]:>{room}}{one.leases:>14,}{one.waiting:>10,}{state}")
    total = sum(wanted.get(one.name, one.slots) for one in workers)
    return "\n".join([*lines, f"{'total':<{width}}{total:>{room},}{sum(one.leases for one in workers):>14,}"])


def _slots(now: int, wanted: int) -> str:
    return f"{now:,}" if now == wanted else f"{now:,} → {wanted:,}"

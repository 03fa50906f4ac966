"""Looking at a run from outside: the ledger for what is on file, Redis (if it can be found) for what is under way."""

import contextlib
from typing import Any

from redis.exceptions import RedisError

from app.errors import UsageError
from app.inventory import Live, RunFacts, inventory
from app.ledger import Ledger
from app.lock import holder
from app.manifest import RunFile
from app.rundir import RunDir
from app.settings import load_settings
from app.store.connection import connect
from app.store.embedded import noted_address
from app.store.live import RunNow, look

#: No endpoint serves the run's model for so long: the run ends with exit code 6. The second where some do not answer.
ALL_DIFFER_SECONDS, OTHERS_AWAY_SECONDS = 10.0, 600.0


def inventory_of(rundir: RunDir, run_file: RunFile, redis_url: str | None) -> dict[str, Any]:
    """The inventory of a run, running or not; the ledger mends itself on the way."""
    now = find_run(rundir, run_file, redis_url)
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        if holder(rundir.lock) is None and not any(one.rows for one in ledger.counts()):
            _read_input_again(rundir, ledger)
        return inventory(facts_of(rundir, run_file, now), ledger.counts(), live_of(now))


def _read_input_again(rundir: RunDir, ledger: Ledger) -> None:
    """A ledger that was lost has what the files say; which rows the input has, only the input says."""
    from producers.catalog import rows_of
    from producers.inputs import parse_inputs

    with contextlib.suppress(UsageError):  # the input is gone: the counts of the files are what is left
        settings = load_settings(rundir.private / "settings.json")
        for _ in rows_of(parse_inputs(settings.inputs), settings, ledger):
            pass


def facts_of(rundir: RunDir, run_file: RunFile, now: RunNow | None, state: str | None = None) -> RunFacts:
    """What run.json and the lock say; `state` if the caller knows it better."""
    if state is None and holder(rundir.lock) is not None:
        state = state_of(now)
    return RunFacts(out=str(rundir.out), id=run_file.run_id, recipe=run_file.recipe_fingerprint, state=state)


def state_of(now: RunNow | None) -> str:
    """What a run that somebody works on does."""
    return "waiting" if now is None or waiting_for(now) else "running"


def waiting_for(now: RunNow | None) -> str:
    """What a run waits for, in a sentence; "" if for nothing."""
    if now is None:
        return "Redis does not answer"
    if now.endpoints and all(endpoint.open_since is not None for endpoint in now.endpoints):
        return "; ".join(f"{endpoint.url}: {endpoint.evidence}" for endpoint in now.endpoints)
    return ""


def troubles(now: RunNow | None) -> str:
    """Lines about endpoints that get nothing now, for people; "" if there are none."""
    away = [endpoint for endpoint in (now.endpoints if now else []) if endpoint.open_since is not None]
    lines = [f"{one.url} is {'held' if one.differs else 'away'}: {one.evidence}\n" for one in away]
    return "".join(["\n", *lines]) if lines else ""


def nobody_serves(now: RunNow | None) -> tuple[str, float] | None:
    """If no endpoint serves the run and one serves something else instead: a sentence, and the seconds after which that
    is final. Shorter if all do; where others are away, they may come back as what they were."""
    held = [endpoint for endpoint in (now.endpoints if now else []) if endpoint.differs]
    if not held or any(endpoint.open_since is None for endpoint in now.endpoints):
        return None
    alone = len(held) == len(now.endpoints)
    sentence = "; ".join(f"{endpoint.url}: {endpoint.evidence}" for endpoint in held)
    return sentence, ALL_DIFFER_SECONDS if alone else OTHERS_AWAY_SECONDS


def live_of(now: RunNow | None, completions_per_second: float = 0.0) -> Live | None:
    """The part of a look that the inventory shows."""
    return now and Live(now.queued, now.in_flight, completions_per_second)


def find_run(rundir: RunDir, run_file: RunFile, redis_url: str | None) -> RunNow | None:
    """A look at the run's Redis: the one given, the private one, or the one of its settings. None if none answers."""
    try:
        settings = load_settings(rundir.private / "settings.json")
    except UsageError:  # without them we know less, and the files still say what is done
        settings = None
    url = redis_url or noted_address(rundir.redis) or (settings.redis if settings else None)
    if url is None:
        return None
    names = sorted({file.dataset for file in run_file.datasets})
    with contextlib.suppress(RedisError, OSError):
        client = connect(url)
        try:
            return look(client, run_file.run_id, names, settings.endpoints if settings else [])
        finally:
            client.close()
    return None


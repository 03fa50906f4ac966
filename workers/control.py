"""Remote control beyond Celery's own: what `headrace workers stop` and `scale`, and Flower's Shut Down, do to a worker.

Celery's `shutdown` waits for what runs, however long it takes, and lets what only waits wait on. Ours drains as SIGTERM
does. Celery's `pool_grow` and `pool_shrink` change the pool by a number; `slots` sets it, since what others know of its
size may be seconds old. Importing this module registers ours, `shutdown` in place of Celery's.
"""

import os
import signal

from celery.worker.control import control_command, ok, pool_grow, pool_shrink


@control_command()
def shutdown(state, **_: object) -> dict:
    """Drain: hand back what waits, give what generates its time, then end."""
    os.kill(os.getpid(), signal.SIGTERM)
    return ok("draining")


@control_command(args=[("n", int)])
def slots(state, n: int, **_: object) -> dict:
    """Hold n tasks at once from now on; tells how many it were before."""
    before = state.consumer.pool.limit
    if n > before:
        pool_grow(state, n - before)
    elif n < before:
        pool_shrink(state, before - n)
    return {"before": before}

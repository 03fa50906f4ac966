"""Remote control beyond Celery's own: what `headrace workers stop`, and Flower's button of that name, do to a worker.

Celery's `shutdown` waits for what runs, however long it takes, and lets what only waits wait on. Ours drains as SIGTERM
does. Importing this module registers it in place of Celery's.
"""

import os
import signal

from celery.worker.control import control_command, ok


@control_command()
def shutdown(state, **_: object) -> dict:
    """Drain: hand back what waits, give what generates its time, then end."""
    os.kill(os.getpid(), signal.SIGTERM)
    return ok("draining")

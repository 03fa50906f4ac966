"""How workers are called, so that whoever starts one knows its name."""

import platform
from collections.abc import Collection

from app.lanes import Lane

#: Environment variable with the pid of the supervisor that started a process: without it, it ends.
SUPERVISOR = "HEADRACE_SUPERVISOR_PID"


def worker_name(short: str, lanes: Collection[str] = tuple(Lane)) -> str:
    """Celery's node name of a worker on this host, with the lanes it serves: `a1.short-long@gpu7`."""
    served = "-".join(lane.value for lane in Lane if lane.value in lanes)
    return f"{short}.{served}@{platform.node() or 'localhost'}"

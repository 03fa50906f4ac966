"""How workers are called, so that whoever starts one knows its name."""

import platform

#: Environment variable with the pid of the supervisor that started a process: without it, it ends.
SUPERVISOR = "HEADRACE_SUPERVISOR_PID"


def worker_name(short: str) -> str:
    """Celery's node name of a worker on this host."""
    return f"{short}@{platform.node() or 'localhost'}"

"""How workers are called, so that whoever starts one knows its name."""

import platform


def worker_name(short: str) -> str:
    """Celery's node name of a worker on this host."""
    return f"{short}@{platform.node() or 'localhost'}"

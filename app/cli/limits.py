"""How many files this process may open: a request in flight is one of them, and many systems begin with 256."""

import resource

_OWN_FILES = 100  # Redis, logs, the ledger, libraries


def slots_within_limits(slots: int) -> int:
    """Raise the soft limit of open files as far as the system lets us; how many of these tasks a worker can then hold.

    Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = slots + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return slots if soft == resource.RLIM_INFINITY else max(1, min(slots, soft - _OWN_FILES))


def limits_sentence(slots: int, held: int) -> str:
    """What to tell somebody who asked for more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"a process may open only {limit} files here, so a worker holds {held} tasks instead of {slots}; "
        f"raise the limit (`ulimit -n {slots + _OWN_FILES}`) for more"
    )

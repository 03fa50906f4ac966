"""How a command is told to stop, and how long it waits for a Redis that is away."""

import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from app.errors import INCOMPLETE


def stop_event(ends_within: float | None = None) -> threading.Event:
    """Set by SIGTERM, SIGINT, SIGQUIT or SIGHUP. ends_within: seconds after which the process ends in any case then.

    By a thread: a handler interrupts whoever waits for the event, or the handler of a signal that came just before
    (a parent's death sends two), and would wait for a lock that its own thread holds.
    """
    event, told = threading.Event(), SimpleQueue()

    def heed() -> None:
        told.get()
        event.set()
        if ends_within is not None:
            time.sleep(ends_within)
            os._exit(INCOMPLETE)

    threading.Thread(target=heed, name="stop", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.put(number))
    return event


def patient(action: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Try again while Redis is away, for a while. Raises StorageError."""
    from app.errors import StorageError
    from app.store.connection import AWAY

    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except AWAY as exc:
            if time.monotonic() > deadline:
                raise StorageError(f"Redis does not answer ({exc}).") from exc
            time.sleep(0.5)


def stop_like_ctrl_c() -> None:
    """From the first moment on: whoever is stopped before there is anything to drain ends with code 3, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)

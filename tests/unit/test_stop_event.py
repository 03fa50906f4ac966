"""Processes that are told to stop, however signals come."""

import subprocess
import sys

import pytest

from tests.belt import ROOT

_WAITING = """
import signal
from app.cli.stopping import stop_event
stop = stop_event()
with stop._cond:  # as inside its `wait` and its `set`
    signal.raise_signal(signal.{name})
assert stop.wait(30)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT", "SIGHUP", "SIGINT"])
def test_a_signal_that_interrupts_whoever_holds_the_events_lock_stops_the_process(name):
    """A parent's death sends two signals at once: the second one must not wait for the handler of the first."""
    code = _WAITING.format(name=name)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_who_still_waits_for_something_ends_all_the_same():
    """A producer whose supervisor is dead must not stay, whatever it hangs in."""
    code = """
import signal, threading
from app.cli.stopping import stop_event
stop_event(0.1)
signal.raise_signal(signal.SIGTERM)
threading.Event().wait()
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 3

"""Processes that stand by to be a child of `headrace run`: each test in a process of its own, which is small."""

import subprocess
import sys

import pytest

from app.cli.spare import AVAILABLE
from tests.belt import ROOT

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="fork alone is safe on Linux only")


HEAD = """
import os, signal, sys, time
from pathlib import Path
from app.cli.spare import Spare
log = Path(sys.argv[1])
"""


def play(tmp_path, code: str) -> None:
    """Run it with Spare and a log imported."""
    subprocess.run([sys.executable, "-c", HEAD + code, str(tmp_path / "log")], cwd=ROOT, check=True, timeout=60)


def test_it_is_the_command_that_it_is_told(tmp_path):
    """Its words in its log, its exit status, its name in `ps`; its variables, and no others' changed."""
    play(
        tmp_path,
        """
from app.store.names import SUPERVISOR
spare, other = Spare("json"), Spare()
assert spare.tell(["status", "/nowhere"], log, {SUPERVISOR: "1"})
assert spare.wait(30) == 2 and spare.poll() == 2
assert "No such directory: /nowhere" in log.read_text()
assert SUPERVISOR not in os.environ
assert other.tell(["simulate", "--port", "0"], log, {})
while Path(f"/proc/{other.pid}/cmdline").read_text().split("\\0")[1:4] != ["-m", "app.cli.main", "simulate"]:
    assert other.poll() is None
    time.sleep(0.01)
other.send_signal(signal.SIGKILL)
assert other.wait(30) == -signal.SIGKILL
assert not other.tell(["status"], log, {})
""",
    )


def test_it_keeps_no_file_of_its_parent(tmp_path):
    """Or the lock of a run that was killed would stay taken while its children end."""
    play(
        tmp_path,
        """
from app.lock import hold
with hold(log.parent / "lock", "standing"):
    spare = Spare()
    def shown():
        return [os.readlink(f"/proc/{spare.pid}/fd/{name}") for name in os.listdir(f"/proc/{spare.pid}/fd")]
    deadline = time.monotonic() + 30
    while any(name.endswith("lock") for name in shown()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    spare.dismiss()
    assert spare.returncode == -signal.SIGKILL
""",
    )


def test_it_ends_with_its_parent(tmp_path):
    """Told or not, even if that is killed."""
    play(
        tmp_path,
        """
reading, writing = os.pipe()
if os.fork() == 0:
    told, untold = Spare(), Spare()
    told.tell(["simulate", "--port", "0"], log, {})
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    os.write(writing, b"%d %d" % (told.pid, untold.pid))
    os.kill(os.getpid(), signal.SIGKILL)
os.close(writing)
deadline = time.monotonic() + 30
for pid in os.read(reading, 100).decode().split():
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
""",
    )


def test_signals_do_to_it_what_they_do_to_any_process(tmp_path):
    """Its parent's handlers stay its parent's."""
    play(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
spare = Spare()
spare.send_signal(signal.SIGTERM)
assert spare.wait(30) == -signal.SIGTERM
""",
    )

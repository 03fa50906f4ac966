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
        return [os.path.realpath(f"/proc/{spare.pid}/fd/{name}") for name in os.listdir(f"/proc/{spare.pid}/fd")]
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


def test_interrupted_it_says_nothing(tmp_path):
    """Ctrl-C may reach all: only the supervisor has words for it."""
    play(
        tmp_path,
        """
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
spare = Spare()
deadline = time.monotonic() + 30
while os.getpgid(spare.pid) != spare.pid:
    assert time.monotonic() < deadline
    time.sleep(0.01)
spare.send_signal(signal.SIGINT)
assert spare.wait(30) == 3
assert log.read_text() == ""
""",
    )


def test_a_handler_may_ask_while_it_is_asked(tmp_path):
    """Its end was told to whom the handler interrupts, and is not told twice."""
    play(
        tmp_path,
        """
spare = Spare()
os.kill(spare.pid, signal.SIGKILL)
os.waitpid(spare.pid, 0)
assert spare.poll() is not None
spare.send_signal(signal.SIGTERM)
""",
    )


def test_whoever_starts_after_the_stop_is_told_to(tmp_path):
    """A signal may come while they are being started, one after the other."""
    play(
        tmp_path,
        """
from types import SimpleNamespace
from app.cli.crew import Crew
from app.rundir import RunDir
rundir = RunDir(log.parent)
rundir.logs.mkdir(parents=True)
settings = SimpleNamespace(workers=1, slots=1, drain_seconds=0.0, metrics_port=None, flower=False)
prepared = SimpleNamespace(rundir=rundir, settings=settings, run_file=SimpleNamespace(run_id="r"))
spares = {"worker-1": Spare("json")}
crew = Crew(prepared, None, f"unix://{log.parent}/redis.sock", spares, print)
crew.drain()
crew.start()
deadline = time.monotonic() + 30
while crew.works:
    assert time.monotonic() < deadline
    time.sleep(0.01)
crew.end(time.monotonic(), 0.0, needless=True)
""",
    )


def test_closed_streams_are_nobody_elses_file(tmp_path):
    """Or a lock would be standard output, which children share and write to."""
    code = HEAD + """
from app.cli.talk import keep_standard_files, say, show
keep_standard_files()
kept = open(log, "w")
assert kept.fileno() > 2, kept.fileno()
say("nobody hears"), show("it")
spare = Spare()
assert spare.tell(["status", "/nowhere"], log, {})
sys.exit(spare.wait(30))
"""
    words = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code, str(tmp_path / "log")]
    assert subprocess.run(words, cwd=ROOT, timeout=60).returncode == 2
    assert "No such directory: /nowhere" in (tmp_path / "log").read_text()


def test_a_machine_that_has_no_process_left_is_waited_for(tmp_path):
    """What is to be started again is, later; the run goes on with the others."""
    play(
        tmp_path,
        """
import resource
from app.cli.children import Child
child = Child("worker-1", ["status", "/nowhere"], Path("/dev/null"))
os.getuid() or os.setresuid(65534, 65534, 65534)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
child.start_again()
assert not child.running and child.start_at > time.monotonic()
""",
    )


def test_a_stop_that_others_keep_to_themselves_is_heeded(tmp_path):
    """A handler's exception goes to whatever runs at the moment, an event loop's callback for one."""
    play(
        tmp_path,
        """
from types import SimpleNamespace
from app.cli import supervise
from app.errors import Incomplete
from app.rundir import RunDir
rundir = RunDir(log.parent)
rundir.logs.mkdir(parents=True)
def swallow(prepared, *_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Incomplete:
        return prepared, None
supervise.meet_endpoints = swallow
prepared = SimpleNamespace(rundir=rundir, settings=SimpleNamespace(redis=None))
try:
    supervise.Supervisor(prepared, SimpleNamespace(say=print), None).run()
except Incomplete as exc:
    assert "before anything was sent" in str(exc)
""",
    )

"""app.lock: one holder, known by name."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from app.errors import UsageError
from app.lock import STALE_SECONDS, Holder, hold, holder, respected
from tests.belt import until

_CHILD = "import sys; from pathlib import Path; from app.lock import hold\nwith hold(Path(sys.argv[1]), 'testing'):\n print('held', flush=True)\n sys.stdin.read()"  # noqa: E501
ELSEWHERE = Holder("elsewhere", 4242, "headrace run", "everything", "2026-01-01T00:00:00+00:00", "long ago")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / ".headrace" / "lock"


@pytest.fixture
def other_process(path):
    """A process of its own that holds the lock."""
    command = [sys.executable, "-c", _CHILD, str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert child.stdout.readline() == b"held\n"
    yield child
    child.kill()
    child.communicate()


def leave_behind(path: Path, who: Holder, age_seconds: float) -> None:
    """A lock file that nobody holds by flock, last written so long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(who))
    then = path.stat().st_mtime - age_seconds
    os.utime(path, (then, then))


def test_a_lock_is_held_and_let_go(path):
    """`holder` says who has it, and nobody once the block is left."""
    assert holder(path) is None
    with hold(path, "collecting results") as held:
        assert holder(path) == held.holder
        assert (held.holder.pid, held.holder.purpose) == (os.getpid(), "collecting results")
    assert holder(path) is None


def test_a_second_holder_is_refused_by_name(path, other_process):
    """The message names directory, host, pid, command and since when; exit code 2."""
    with pytest.raises(UsageError) as refused, hold(path, "x"):
        pass
    sentence = str(refused.value)
    found = holder(path)
    assert f"{path.parent.parent} is in use by pid {other_process.pid} on {found.host}" in sentence
    assert found.since in sentence
    assert found.command in sentence


def test_the_same_process_cannot_hold_twice(path):
    """Two parts of one process are two holders."""
    with hold(path, "x"), pytest.raises(UsageError), hold(path, "y"):
        pass


def test_a_killed_holder_is_replaced_at_once(path, other_process):
    """flock dies with its process, so nobody waits for a dead one on this host."""
    other_process.kill()
    other_process.wait()
    assert holder(path) is None
    with hold(path, "x"):
        assert holder(path).pid == os.getpid()


def test_a_young_heartbeat_from_another_host_is_respected(path):
    """flock may not reach there: the holder may live, and the message says how long to wait."""
    leave_behind(path, ELSEWHERE, 20)
    assert holder(path) == ELSEWHERE
    sentence = r"pid 4242 on elsewhere .*heard of 2\d s ago.*try again in [34]\d s"
    with pytest.raises(UsageError, match=sentence), hold(path, "x"):
        pass


def test_an_old_heartbeat_from_another_host_is_taken_over_with_a_warning(path, caplog):
    """Silent for longer than the limit: dead. Its own clock does not matter, the file's time does."""
    leave_behind(path, ELSEWHERE, STALE_SECONDS + 5)
    assert holder(path) is None
    with hold(path, "x"):
        assert holder(path).pid == os.getpid()
    assert "pid 4242 on elsewhere" in caplog.text


def test_touching_renews_the_heartbeat(path):
    """The file's time moves on, and the holder stays readable."""
    with hold(path, "x") as held:
        os.utime(path, (0, 0))
        held.touch()
        assert path.stat().st_mtime > 1
        assert holder(path) == held.holder


def test_only_other_hosts_are_judged_by_their_heartbeat(path):
    """On this host a granted flock is proof enough."""
    with hold(path, "x") as held:
        ours = held.holder
    assert not respected(ours, 0)
    assert respected(ELSEWHERE, STALE_SECONDS - 1)
    assert not respected(ELSEWHERE, STALE_SECONDS)


def test_a_lock_file_of_somebody_else_is_taken(path):
    """Garbage in the file names nobody."""
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\0garbage")
    assert holder(path) is None
    with hold(path, "x"):
        pass


def test_the_lock_file_holds_no_arguments(path):
    """A command line may hold API keys; only the program and its command are noted."""
    argv, sys.argv = sys.argv, ["/bin/headrace", "run", "--api-key", "secret"]
    try:
        with hold(path, "x") as held:
            assert held.holder.command == "headrace run"
            assert b"secret" not in path.read_bytes()
    finally:
        sys.argv = argv


_ON_ANOTHER_HOST = """
import fcntl, socket, sys
from pathlib import Path
from app.errors import UsageError
from app.lock import hold
socket.gethostname = lambda: "elsewhere"
fcntl.flock = lambda *_: None  # as on a filesystem that keeps no locks between hosts
with hold(Path(sys.argv[1]), "collecting", heartbeat_seconds=0.05) as held:
    print("held", flush=True)
    for _ in sys.stdin:
        try:
            held.refuse_if_lost()
            print("ours", flush=True)
        except UsageError as exc:
            print(exc, flush=True)
"""


@pytest.fixture
def elsewhere(path):
    """A process that holds the lock and seems to be on another host."""
    command = [sys.executable, "-c", _ON_ANOTHER_HOST, str(path)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2], text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def ask(child: subprocess.Popen) -> str:
    """Whether it still believes in its lock."""
    child.stdin.write("?\n")
    child.stdin.flush()
    return child.stdout.readline()


def test_a_live_holder_on_another_host_is_never_replaced(path, elsewhere):
    """It shows by itself that it lives, however long ago it began."""
    age(path, STALE_SECONDS * 2)
    until(lambda: time.time() - path.stat().st_mtime < STALE_SECONDS / 2, what="a heartbeat")
    with pytest.raises(UsageError, match=f"in use by pid {elsewhere.pid} on elsewhere"), hold(path, "x"):
        pass
    assert ask(elsewhere) == "ours\n"


def test_a_holder_that_was_stopped_and_replaced_notices_and_leaves_the_lock_alone(path, elsewhere):
    """SIGSTOP for longer than the limit: another host takes over; going on, it is refused before it writes."""
    elsewhere.send_signal(signal.SIGSTOP)
    age(path, STALE_SECONDS + 1)
    with hold(path, "x") as held:
        elsewhere.send_signal(signal.SIGCONT)
        assert f"was taken over by pid {os.getpid()} on {held.holder.host}" in ask(elsewhere)
        elsewhere.stdin.close()
        assert elsewhere.wait(10) == 0
        assert holder(path) == held.holder
        held.refuse_if_lost()


def age(path: Path, seconds: float) -> None:
    """The last heartbeat was so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))

"""What a file system can do to the collector while it writes: it says so, keeps what it has, and goes on."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from app.cli.prepare import make_directory
from app.errors import StorageError
from app.jsonl import Appender
from app.rundir import RAW, TOKENIZED, RunDir
from app.samples import SampleFilters
from tests.belt import until
from tests.integration.test_collector import publish, response
from workers.collector import Collector


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own; the test is skipped where we may not mount one."""
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "t", folder]).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def collecting(rundir: RunDir, client) -> Iterator[Collector]:
    """A collector at work in a thread of its own."""
    made: list[Collector] = []

    def run() -> None:
        made.append(Collector(rundir, client, "run1", SampleFilters()))
        made[0].run()

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: made, what="a collector")
    try:
        yield made[0]
    finally:
        made[0].stopping.set()
        thread.join(20)
        assert not thread.is_alive()


def _fill(file) -> None:
    while True:
        file.write(b"x" * 4096)


def rows(out: Path, name: str = RAW) -> list[int]:
    """Row numbers (of samples: how many) in a file, in its order."""
    path = out / "d" / name
    whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")  # the last is being written
    return [orjson.loads(line).get("row_number", 0) for line in whole.splitlines()]


def test_a_full_disk_is_waited_for_and_nothing_is_lost(redis_client, tmp_path):
    """Refused in mid-batch: undone, said with its remedy, written once when there is room again."""
    with tmpfs(tmp_path / "small", "4m") as small:
        rundir = RunDir(small / "out")
        with collecting(rundir, redis_client) as collector:
            publish(redis_client, response(1))
            until(lambda: rows(rundir.out, TOKENIZED) == [0], what="the first row")
            filler = small / "filler"
            with filler.open("wb", buffering=0) as file:
                with pytest.raises(OSError, match="No space"):
                    _fill(file)
            publish(redis_client, *[response(n, output=tuple(range(3000))) for n in range(2, 30)])
            until(lambda: collector.trouble, what="trouble")
            assert "free some space" in collector.trouble
            filler.unlink()
            until(lambda: len(rows(rundir.out, TOKENIZED)) == 29, what="all rows")
            assert collector.trouble is None
        assert sorted(rows(rundir.out)) == list(range(1, 30))


def test_a_directory_that_cannot_be_written_is_told_before_anything_starts(tmp_path):
    """Exit 4 with the directory's name."""
    with tmpfs(tmp_path / "locked", "1m") as locked:
        subprocess.run(["mount", "-o", "remount,ro", locked], check=True)
        with pytest.raises(StorageError, match=r"Cannot write in --out .*locked/out: Read-only file system"):
            make_directory(locked / "out")


def test_a_directory_that_is_moved_away_gets_no_second_set_of_files(redis_client, tmp_path):
    """Nothing is begun anew at the old place; put back, the run goes on where it was."""
    rundir = RunDir(tmp_path / "out")
    with collecting(rundir, redis_client) as collector:
        publish(redis_client, response(1))
        until(lambda: rows(rundir.out, TOKENIZED) == [0], what="the first row")
        rundir.out.rename(tmp_path / "elsewhere")
        publish(redis_client, response(2))
        until(lambda: collector.trouble and "put it back" in collector.trouble, what="trouble")
        assert not rundir.out.exists()
        (tmp_path / "elsewhere").rename(rundir.out)
        until(lambda: len(rows(rundir.out, TOKENIZED)) == 2, what="the second row")
    assert rows(rundir.out) == [1, 2]


def test_a_file_replaced_while_it_is_written_is_noticed(redis_client, tmp_path):
    """An older copy put in its place (a snapshot, another mount): written to from its own end, rows it lacks too."""
    rundir = RunDir(tmp_path / "out")
    path = rundir.file("d", RAW)
    with collecting(rundir, redis_client):
        publish(redis_client, response(1))
        until(lambda: rows(rundir.out, TOKENIZED) == [0], what="the first row")
        shutil.copy(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
        publish(redis_client, response(2))
        until(lambda: rows(rundir.out) == [1, 2], what="the second row, in the file that is there")


def test_bytes_of_another_writer_are_noticed_before_anything_is_appended(tmp_path):
    """Whoever lost the lock and does not know it yet leaves nothing in the middle of our lines."""
    with Appender(tmp_path / "a.jsonl") as ours, Appender(tmp_path / "a.jsonl") as theirs:
        ours.append([b'{"a":1}\n'])
        with pytest.raises(StorageError, match="changed by somebody else"):
            theirs.append([b'{"a":2}\n'])
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"a":1}\n'


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_quota_are_the_same_to_us(number, tmp_path, monkeypatch):
    """The kernel's two words for no room: undone, and the same remedy."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with Appender(tmp_path / "a.jsonl") as file:
        file.append([b'{"a":1}\n'])
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", refuse)
            with pytest.raises(StorageError, match="free some space and start again"):
                file.append([b'{"a":2}\n'])
        file.append([b'{"a":3}\n'])
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"a":1}\n{"a":3}\n'

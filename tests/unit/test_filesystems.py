"""app.filesystems: which paths lie on a network, and where their ledger lies instead."""

from pathlib import Path

import pytest

from app import filesystems
from app.filesystems import kind_of, local_cache
from app.ledger import Ledger
from app.rundir import RunDir

MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:30 / /data rw,relatime shared:1 - nfs4 box:/export rw
41 40 0:31 / /data/scratch rw - xfs /dev/nvme0 rw
42 27 0:32 / /mnt/my\040share rw - cifs //box/share rw
43 27 0:33 / /over rw - nfs box:/a rw
44 43 0:34 / /over rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/a/runs", "ext4"),
        ("/data/runs/new", "nfs4"),
        ("/data/scratch/runs", "xfs"),
        ("/database", "ext4"),
        ("/mnt/my share/runs", "cifs"),
        ("/over/runs", "tmpfs"),
    ],
)
def test_a_path_lies_on_the_innermost_mount_that_holds_it(path, kind):
    assert kind_of(Path(path), MOUNTS) == kind


def test_a_run_on_a_network_filesystem_keeps_its_ledger_on_local_disk(tmp_path, monkeypatch):
    """SQLite over a network loses locks; what it holds is rebuilt from the files wherever it lies."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 1 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path / 'net'} rw - nfs4 box:/x rw\n")
    monkeypatch.setattr(filesystems, "_MOUNTS", mounts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    filesystems.is_on_network.cache_clear()
    rundir = RunDir(tmp_path / "net" / "run")
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
    filesystems.is_on_network.cache_clear()
    assert not list(rundir.out.rglob("ledger.sqlite"))
    assert [path.parent.name for path in (tmp_path / "cache").rglob("ledger.sqlite")] == [local_cache(rundir.out).name]


def test_two_runs_of_one_name_do_not_share_a_ledger():
    assert local_cache(Path("/a/run")) != local_cache(Path("/b/run"))

"""On what kind of filesystem a path lies: SQLite's locks and shared memory cannot be trusted on a network's.

Linux alone tells (/proc/self/mountinfo); elsewhere a path counts as local.
"""

import os
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.lustre",
    "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2",
    "smb3", "smbfs", "virtiofs", "wekafs",
})  # fmt: skip


@lru_cache(maxsize=64)
def is_on_network(path: Path) -> bool:
    """Whether a path (there or not yet) lies on a network filesystem."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return False
    return kind_of(Path(os.path.realpath(path)), mounts) in _NETWORK


def kind_of(path: Path, mounts: str) -> str:
    """Type of the filesystem that an absolute path lies on, by the text of a mountinfo; "" if none holds it."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = Path(_unescaped(fields[4]))
        if len(point.parts) >= best and path.is_relative_to(point):  # a later mount over the same point wins
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def local_cache(path: Path) -> Path:
    """A folder on this machine for what is kept of a path on the network; the same for the same path."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = blake2b(os.fsencode(os.path.realpath(path)), digest_size=8).hexdigest()
    return base / "headrace" / f"{path.name}-{name}"


def _unescaped(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash in octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text

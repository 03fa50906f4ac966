"""Lines that `headrace retry` put aside, known by their bytes: OUT/.headrace/put-aside, one fingerprint a line.

After a crash between disk and Redis an answer is delivered once more, perhaps when it has been put aside meanwhile. The
collector drops what stands here. No clock could tell an old answer from a new one: hosts' clocks differ.
"""

from hashlib import blake2b

from app.jsonl import iterate
from app.rundir import RunDir


def fingerprint(line: bytes) -> bytes:
    """Of a line of our files, with or without its newline: 16 hex digits."""
    return blake2b(line.rstrip(b"\n"), digest_size=8).hexdigest().encode()


def put_aside(rundir: RunDir) -> set[bytes]:
    """Fingerprints of all lines that were ever put aside in this run."""
    return {line.raw for line in iterate(rundir.put_aside)}

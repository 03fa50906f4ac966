"""Small files that inflate to a huge row: a verdict on that row, in the memory of a few chunks."""

import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = b"x" * (1 << 20)
_BLOCKS = 128
_READ = """
import resource, sys
from pathlib import Path
from producers.readers import read_records
path = Path(sys.argv[1])
import pyarrow
pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), sys.argv[2]).read(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = list(read_records(path, max_row_bytes=1 << 20))
print(len(rows), [row.error.reason.value for row in rows if row.error], len(max((row.raw for row in rows), key=len)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("codec", "start", "end"),
    [
        ("gzip", b'{"prompt":"a"}\n{"prompt":"', b'"}\n'), ("zstd", b'[{"prompt":"a"},{"prompt":"', b'"}]'),
        ("zstd", b'prompt,b\na,b\n"', b'",c\n'), ("zstd", b"a\n", b"\n"),
    ],
    ids=["line", "array", "csv", "text"],
)  # fmt: skip
def test_a_row_that_inflates_without_end_is_rejected_in_bounded_memory(codec, start, end, tmp_path):
    """128 MB in one row: too_large, what is kept of it is small, and so is what was held."""
    path = tmp_path / "bomb"
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), codec) as file:
        file.write(start)
        for _ in range(_BLOCKS):
            file.write(_BLOCK)
        file.write(end)
    assert path.stat().st_size < 1 << 20
    command = [sys.executable, "-c", _READ, path, codec]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said, grown_kib = done.stdout.splitlines()
    rows, _, rest = said.partition(" ")
    assert int(rows) == 2
    assert rest.startswith("['too_large']")
    assert int(rest.split()[-1]) < 1 << 20
    assert int(grown_kib) < 48 * 1024

"""What durability costs: `python benchmarks/fsync.py [FOLDER]`. Rows per second appended and synced as the collector
does it (a batch, then one fdatasync), line by line, and not synced at all, side by side on the disk of FOLDER.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.jsonl import Appender

_SECONDS = 3.0
_BATCHES = (1, 16, 128, 512)


def rows_per_second(folder: Path, line: bytes, batch: int, *, sync: bool) -> float:
    """Append for some seconds."""
    with Appender(folder / f"{len(line)}-{batch}-{sync}.jsonl") as file:
        started, rows = time.perf_counter(), 0
        while time.perf_counter() - started < _SECONDS:
            file.append([line] * batch)
            if sync:
                file.sync()
            rows += batch
        return rows / (time.perf_counter() - started)


def main(where: str | None) -> None:
    """Print a row per size of line."""
    print(f"{'':<12}" + "".join(f"{f'{batch} a sync':>14}" for batch in _BATCHES) + f"{'512, no sync':>16}   rows/s")
    for size in (4_000, 40_000):
        line = b'{"x":"' + b"x" * (size - 9) + b'"}\n'
        with tempfile.TemporaryDirectory(dir=where) as folder:
            synced = [rows_per_second(Path(folder), line, batch, sync=True) for batch in _BATCHES]
            loose = rows_per_second(Path(folder), line, 512, sync=False)
        print(f"{size / 1000:>5.0f} KB a row" + "".join(f"{n:>14,.0f}" for n in synced) + f"{loose:>16,.0f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

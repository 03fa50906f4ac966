"""How fast the ledger is: `python benchmarks/ledger_speed.py [ROWS]`, in a temporary directory.

Prints rows per second for a new input, the same input again, commits, reading the files from the beginning, and what
a row costs on disk.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.identity import task_key
from app.jsonl import Appender
from app.ledger import Committed, Ledger, State
from app.records import ResponseRecord, completion_id, line_of
from app.rundir import RAW, RunDir
from app.samples import SampleFilters, sample_of

_DATASET, _BATCH = "bench", 500


@contextmanager
def timed(what: str, n: int) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    print(f"{what:<44}{seconds:>9.3f} s" + (f"{n / seconds:>14,.0f} per second" if n else ""))


def read_input(ledger: Ledger, digests: list[str]) -> None:
    """One pass over the input."""
    ledger.begin_pass()
    for at in range(0, len(digests), _BATCH):
        ledger.see_rows(_DATASET, [(digest, 0, at + i) for i, digest in enumerate(digests[at : at + _BATCH])])
    ledger.end_pass(_DATASET)


def response(row_id: str, tokens: int) -> ResponseRecord:
    """A raw line of so many prompt and output tokens."""
    ids = list(range(100_000, 100_000 + tokens))
    return ResponseRecord(
        key=task_key("r", _DATASET, row_id, 0, 0), id=completion_id(_DATASET, row_id, 0, 0), dataset=_DATASET,
        primary_id=f"{_DATASET}:{row_id}", row_id=row_id, source_id="", row_number=1, turn=0, turns=1,
        completion_index=0, prompt_token_ids=ids, output_ids=ids, text="word " * tokens, finish_reason="stop",
        matched="2", num_prompt_tokens=tokens, num_output_tokens=tokens, max_new_tokens=tokens, recipe="r", model="m",
        endpoint="http://e", server="s", attempt=1, stages=1, started_at="2026-01-01T00:00:00+00:00",
        latency_seconds=1.0, meta_info="{}",
    )  # fmt: skip


def write_files(rundir: RunDir, digests: list[str], tokens: int) -> int:
    """Raw lines and samples of every row; returns their bytes."""
    raw, samples = [], []
    for digest in digests:
        record = response(digest, tokens)
        raw.append(line_of(record))
        samples.append(line_of(sample_of(record, SampleFilters(), at="")))
    for name, lines in ((RAW, raw), ("tokenized_data.jsonl", samples)):
        with Appender(rundir.file(_DATASET, name)) as file:
            file.append(lines)
    return sum(map(len, raw)) + sum(map(len, samples))


def main(rows: int) -> None:
    """Measure."""
    digests = [os.urandom(12).hex() for _ in range(rows)]
    with tempfile.TemporaryDirectory() as folder:
        rundir = RunDir(Path(folder))
        with Ledger.open(rundir) as ledger:
            with timed("see_rows, new input", rows):
                read_input(ledger, digests)
            with timed("commit, batches of 500", rows):
                for at in range(0, rows, _BATCH):
                    ledger.commit([
                        Committed(_DATASET, digest, 0, State.TOKENIZED, "", at) for digest in digests[at : at + _BATCH]
                    ])  # fmt: skip
            with timed("see_rows, the same input again", rows):
                read_input(ledger, digests)
        size = rundir.ledger.stat().st_size
        print(f"{'ledger on disk':<44}{size / rows:>9.1f} bytes per row")
        with timed("open and counts", 0), Ledger.open(rundir) as ledger:
            ledger.counts()
        for tokens, few in ((300, min(rows, 20_000)), (20_000, 500)):
            read = RunDir(Path(folder) / f"files{tokens}")
            volume = write_files(read, digests[:few], tokens)
            with Ledger.open(read) as ledger, timed(f"catch_up, {few:,} rows of 2 × {tokens:,} tokens", few):
                ledger.catch_up()
            print(f"{'':<44}{volume / 1e6:>9.1f} MB in the files")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)

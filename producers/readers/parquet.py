"""Parquet: a row is a record, read a few megabytes at a time.

Invariant: what is null in a row is not in its value. Arrow gives every struct of a column the same keys, so a field
that only another row has would otherwise appear here as null and change the prompt.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from app.errors import UsageError
from app.reasons import Reason
from producers.readers.rows import Damaged, Held, RawRow, rejected_row, too_large_row

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

MAGIC = b"PAR1"
_BATCH_BYTES = 8 * 1024 * 1024
_MAX_BATCH_ROWS = 4096


def parquet_rows(path: Path, max_bytes: int) -> Iterator[RawRow]:
    """Rows of a Parquet file; number is the record from 1. Raises UsageError if it has no readable footer."""
    import pyarrow  # 0.2 s that other files need not pay
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as exc:
        raise UsageError(f"{path} is cut off or damaged: Parquet's footer cannot be read.") from exc
    return _rows(file, path.name, max_bytes)


def row_count(path: Path) -> int:
    """Rows by the file's footer."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return file.metadata.num_rows


def _rows(file: "ParquetFile", name: str, max_bytes: int) -> Iterator[RawRow]:
    import pyarrow

    number = 0
    try:
        for batch in file.iter_batches(batch_size=_batch_rows(file)):
            for values in _values(batch):
                number += 1
                yield _row(number, values, name, max_bytes)
    except (pyarrow.ArrowException, OSError) as exc:
        raise Damaged(number + 1, b"", "a page of the Parquet file is damaged; what follows is missing") from exc


def _batch_rows(file: "ParquetFile") -> int:
    groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=1)
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))


def _values(batch: "pyarrow.RecordBatch") -> Iterator[Any]:
    """The rows as Python values; a row whose text is not UTF-8 comes as the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield from batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError as exc:
                yield exc


def _row(number: int, value: Any, name: str, max_bytes: int) -> RawRow:
    place = f"record {number}"
    if isinstance(value, UnicodeDecodeError):
        return rejected_row(Reason.UNREADABLE, number, value.object, name, place, "a text in it is not UTF-8")
    value = {column: _without_nulls(cell) for column, cell in value.items()}
    held = Held(max_bytes)
    held.add(orjson.dumps(value, default=str))
    raw, too_large = held.take()
    return too_large_row(number, raw, name, place, max_bytes) if too_large else RawRow(number, value, raw)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value

"""Samples as Parquet: one schema for every run, shards of a bounded number of samples."""

from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.offline.export import SIDES

SCHEMA = pa.schema([
    ("id", pa.string()), ("primary_id", pa.string()), ("dataset", pa.string()), ("turn", pa.int32()),
    ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8())), ("finish_reason", pa.string()),
    ("num_prompt_tokens", pa.int32()), ("num_output_tokens", pa.int32()), ("metadata", pa.string()),
])  # fmt: skip
_GROUP_SAMPLES = 500  # what is held in memory
_CODES = {"input_ids": "i", "loss_mask": "b"}


def _column(field: pa.Field, rows: list[dict[str, Any]]) -> pa.Array:
    values = [row[field.name] for row in rows]
    if field.name not in _CODES:
        return pa.array(values, field.type)
    flat, ends = array(_CODES[field.name]), array("i", [0])
    for ids in values:  # token lists make up nearly all of a sample, so they are not turned over one id at a time
        flat.extend(ids)
        ends.append(len(flat))
    inner = pa.Array.from_buffers(field.type.value_type, len(flat), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)]), inner)


class Shards:
    """train/part-00000.parquet and so on, and the same for eval. Use as a context manager."""

    def __init__(self, folder: Path, samples_per_shard: int):
        self._folder, self._most = folder, samples_per_shard
        self._waiting: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        self._open: dict[str, tuple[pq.ParquetWriter, int]] = {}
        self._made = dict.fromkeys(SIDES, 0)
        self.counts = dict.fromkeys(SIDES, 0)

    def __enter__(self) -> "Shards":
        return self

    def write(self, side: str, sample: dict[str, Any]) -> None:
        """Append one sample."""
        waiting = self._waiting[side]
        waiting.append(sample)
        self.counts[side] += 1
        if len(waiting) >= min(_GROUP_SAMPLES, self._most):
            self._flush(side)

    def _flush(self, side: str) -> None:
        rows, self._waiting[side] = self._waiting[side], []
        writer, have = self._open.pop(side, None) or self._next(side)
        writer.write_table(pa.Table.from_arrays([_column(one, rows) for one in SCHEMA], schema=SCHEMA))
        if have + len(rows) >= self._most:
            writer.close()
        else:
            self._open[side] = writer, have + len(rows)

    def _next(self, side: str) -> tuple[pq.ParquetWriter, int]:
        path = self._folder / side / f"part-{self._made[side]:05}.parquet"
        path.parent.mkdir(exist_ok=True)
        self._made[side] += 1
        return pq.ParquetWriter(path, SCHEMA, compression="zstd"), 0

    def __exit__(self, kind: object, *_: object) -> None:
        for side, waiting in self._waiting.items():
            if waiting and kind is None:
                self._flush(side)
        for writer, _ in self._open.values():
            writer.close()

"""How a task travels through Redis: a small JSON header, the chat so far, the ids as 4-byte integers, all compressed.

A list of 1,000 Python ints is about 6 KB of JSON; packed and compressed it is about 2 KB.
"""

import dataclasses
import struct
import threading
from array import array

import orjson
import zstandard

from app.records import Task

_LEVEL = 1  # higher levels cost more CPU than they save memory on token ids
_SIZES = 8
_local = threading.local()


def pack_task(task: Task) -> bytes:
    """Bytes of a task for the payload hash."""
    header = orjson.dumps({name: getattr(task, name) for name in _HEADER})
    sizes = struct.pack("<II", len(header), len(task.chat))
    return compress(sizes + header + task.chat + array("I", task.prompt_token_ids).tobytes())


def unpack_task(blob: bytes) -> Task:
    """The task in those bytes. Raises ValueError if they are not ours."""
    data = decompress(blob)
    header, chat = struct.unpack_from("<II", data)
    ids, at = array("I"), _SIZES + header
    ids.frombytes(data[at + chat :])
    return Task(prompt_token_ids=ids.tolist(), chat=data[at : at + chat], **orjson.loads(data[_SIZES:at]))


def compress(data: bytes) -> bytes:
    """zstd, fast, with the size in the frame."""
    try:
        compressor = _local.compressor
    except AttributeError:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return compressor.compress(data)


def decompress(blob: bytes) -> bytes:
    """Back from `compress`. Raises ValueError for anything else."""
    try:
        decompressor = _local.decompressor
    except AttributeError:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        return decompressor.decompress(blob)
    except zstandard.ZstdError as exc:
        raise ValueError(f"not a packed record: {exc}") from exc


_HEADER = [f.name for f in dataclasses.fields(Task) if f.name not in ("prompt_token_ids", "chat")]

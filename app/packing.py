"""How a task travels through Redis: a small JSON header, the chat so far, the ids as 4-byte integers, all compressed.

Of an answer in stages, what was made of it stands in the header, and its ids behind those of the prompt.

A list of 1,000 Python ints is about 6 KB of JSON; packed and compressed it is about 2 KB.
"""

import dataclasses
import struct
import threading
from array import array

import orjson
import zstandard

from app.records import Made, Task

_LEVEL = 1  # higher levels cost more CPU than they save memory on token ids
_SIZES = 8
_local = threading.local()


def pack_task(task: Task) -> bytes:
    """Bytes of a task for the payload hash."""
    words, ids = {name: getattr(task, name) for name in _HEADER}, task.prompt_token_ids
    if task.made is not None:
        words["made"] = {name: getattr(task.made, name) for name in _MADE} | {"ids": len(task.made.output_ids)}
        ids = ids + task.made.output_ids
    header = orjson.dumps(words)
    sizes = struct.pack("<II", len(header), len(task.chat))
    return compress(sizes + header + task.chat + array("I", ids).tobytes())


def unpack_task(blob: bytes) -> Task:
    """The task in those bytes. Raises ValueError if they are not ours."""
    data = decompress(blob)
    header, chat = struct.unpack_from("<II", data)
    ids, at = array("I"), _SIZES + header
    ids.frombytes(data[at + chat :])
    words, chat_bytes = orjson.loads(data[_SIZES:at]), data[at : at + chat]
    made = words.pop("made", None)
    if made is not None:
        of_prompt = len(ids) - made.pop("ids")
        made = Made(output_ids=ids[of_prompt:].tolist(), **made)
        del ids[of_prompt:]
    return Task(prompt_token_ids=ids.tolist(), chat=chat_bytes, made=made, **words)


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


_HEADER = [f.name for f in dataclasses.fields(Task) if f.name not in ("prompt_token_ids", "chat", "made")]
_MADE = [f.name for f in dataclasses.fields(Made) if f.name != "output_ids"]

"""The bytes of a file, decompressed, read forward once in chunks.

Invariant: memory is bounded by the chunk whatever the compression ratio, and an end that is cut off or damaged is
noticed: whoever comes to the end of the chunks asks `refuse_damage`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import UsageError
from producers.readers.rows import BOM, Damaged

HEAD_BYTES = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_INFLATED_CHUNK_BYTES = 64 * 1024  # what a read that meets the damage may lose
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Source:
    """An opened data file. head: its first bytes (up to 1 MiB), without a byte order mark.

    start: the byte to begin at, of a file that is not compressed.
    """

    def __init__(self, path: Path, start: int = 0):
        self.path = path
        self.name = path.name
        self._damage = ""
        self._codec = _codec_of(path)
        self._chunk_bytes = _INFLATED_CHUNK_BYTES if self._codec else _CHUNK_BYTES
        self._stream = _open(path, self._codec)
        if start:
            self._stream.seek(start)
        self.head, self.is_whole = self._read_head()
        if not self.head and self._damage:
            raise UsageError(f"{path} is no readable {self._codec} file: {self._damage}.")

    @property
    def is_compressed(self) -> bool:
        """Whether the bytes handed out are not those of the file."""
        return self._codec is not None

    def __iter__(self) -> Iterator[bytes]:
        chunk = self.head
        while chunk:
            yield chunk
            chunk = self._read()
        self._stream.close()

    def refuse_damage(self, number: int, rest: bytes, unit: str) -> None:
        """Raises Damaged if the file did not end by itself; `rest` is what was read of its last record."""
        if self._damage:
            what = f"the {self._codec} data is cut off or damaged here ({self._damage}); what follows is missing"
            raise Damaged(number, rest, what, unit)

    def _read_head(self) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        size = 0
        while size < HEAD_BYTES and (chunk := self._read()):
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts).removeprefix(BOM), size < HEAD_BYTES

    def _read(self) -> bytes:
        try:
            return self._stream.read(self._chunk_bytes)
        except OSError as exc:  # pyarrow's word for broken compressed data
            if self._codec is None:
                raise
            self._damage = str(exc)
            return b""


def inflated_bytes(path: Path) -> int:
    """Size of a file as it is read: exact for a plain one, by the ratio of its beginning for a compressed one."""
    size, codec = path.stat().st_size, _codec_of(path)
    if codec is None:
        return size
    import pyarrow

    with pyarrow.OSFile(str(path)) as file, pyarrow.CompressedInputStream(file, codec) as stream:
        inflated = 0
        with contextlib.suppress(OSError):  # pyarrow's word for broken compressed data: its readers say what is missing
            while chunk := stream.read(HEAD_BYTES):
                inflated += len(chunk)
                if inflated >= 64 * HEAD_BYTES:  # what was read ahead is little beside it by now
                    return round(size * inflated / file.tell())
        return inflated


def _codec_of(path: Path) -> str | None:
    with path.open("rb") as file:
        magic = file.read(4)
    return next((codec for start, codec in _CODECS.items() if magic.startswith(start)), None)


def _open(path: Path, codec: str | None) -> Any:
    if codec is None:
        return path.open("rb", buffering=0)
    import pyarrow  # 0.2 s that plain files need not pay

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec)

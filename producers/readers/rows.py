"""What a reader hands out, and how the bytes of one JSON record become a value or a reason.

Invariant: what leaves here as a value is strict JSON (no NaN, no lone surrogate, no key twice), whole and valid UTF-8.
"""

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from app.jsonl import why_no_json
from app.reasons import Reason, Rejected

BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class RawRow:
    """One record. raw: its bytes without the line end; for one that was too large, its start, hash and size."""

    number: int
    value: Any
    raw: bytes = field(repr=False)
    error: Rejected | None = None


class Damaged(Exception):
    """From this record on the file cannot be followed: its end, handled inside this package."""

    def __init__(self, number: int, raw: bytes, what: str, unit: str = "record"):
        super().__init__(what)
        self.number, self.raw, self.what, self.unit = number, raw, what, unit


class Held:
    """A record that arrives in pieces; past the limit only its start, its size and a hash are kept."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._clear()

    def add(self, piece: bytes) -> None:
        """The next bytes of the record."""
        self._size += len(piece)
        if self._hash is None:
            self._pieces.append(piece)
            if self._size > self._max_bytes:
                self._hash = blake2b(b"".join(self._pieces), digest_size=16)
                self._pieces = [b"".join(self._pieces)[:_HEAD_BYTES]]
        else:
            self._hash.update(piece)

    def take(self) -> tuple[bytes, bool]:
        """The record, and whether it was too large (then the bytes only stand for it); starts the next one."""
        raw, too_large = b"".join(self._pieces), self._hash is not None
        if self._hash is not None:
            raw += b" ... %d bytes, blake2b %s" % (self._size, self._hash.hexdigest().encode())
        self._clear()
        return raw, too_large

    def _clear(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._hash = None


def rejected_row(reason: Reason, number: int, raw: bytes, file: str, place: str, what: str) -> RawRow:
    """A row that cannot be read; `place` is "line 7" or "record 7"."""
    return RawRow(number, None, raw, Rejected(reason, f"{file}: {place}: {what}"))


def too_large_row(number: int, raw: bytes, file: str, place: str, max_bytes: int) -> RawRow:
    """A row beyond the limit."""
    what = f"larger than {max_bytes} bytes; raise --max-row-bytes if it is meant to be"
    return rejected_row(Reason.TOO_LARGE, number, raw, file, place, what)


def json_row(number: int, raw: bytes, file: str, unit: str) -> RawRow:
    """The row of one JSON record."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        if raw.startswith(BOM):  # files with a BOM, put behind one another
            return json_row(number, raw[len(BOM) :], file, unit)
        reason, what = _why_unreadable(raw, exc)
        return rejected_row(reason, number, raw, file, f"{unit} {number}", what)
    if _may_repeat_a_key(raw, value) and (key := _repeated_key(raw)) is not None:
        what = f"the key {key!r} stands twice in one object"
        return rejected_row(Reason.UNREADABLE, number, raw, file, f"{unit} {number}", what)
    return RawRow(number, value, raw)


def _may_repeat_a_key(raw: bytes, value: Any) -> bool:
    """A key that the parser dropped took its two quotes along. Only a quote written as \\u0022 can hide that."""
    try:
        return raw.count(b'"') != orjson.dumps(value).count(b'"') or b"\\u0022" in raw
    except orjson.JSONEncodeError:  # deeper than orjson writes
        return True


class _RepeatedKey(Exception):
    """Leaves the parser early."""


def _repeated_key(raw: bytes) -> str | None:
    def refuse(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKey(key)
            seen.add(key)

    try:
        json.loads(raw, object_pairs_hook=refuse)
    except _RepeatedKey as exc:
        return exc.args[0]
    except (ValueError, RecursionError):  # orjson took it: whatever this is about, it is no key
        return None
    return None


def _why_unreadable(raw: bytes, error: orjson.JSONDecodeError) -> tuple[Reason, str]:
    if not raw.strip(b"\0"):
        return Reason.UNREADABLE, f"{len(raw)} NUL bytes and nothing else (a torn write)"
    try:
        text = raw.decode()
    except UnicodeDecodeError as exc:
        return Reason.UNREADABLE, f"byte {exc.start + 1} is not UTF-8"
    if _holds_lone_surrogate(text):
        return Reason.INVALID_UNICODE, "holds half a surrogate pair, which is no text"
    return Reason.UNREADABLE, why_no_json(error)


def _holds_lone_surrogate(text: str) -> bool:
    """Whether this is JSON but for a lone surrogate, which Python's own parser lets pass."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False

"""Who a row is, and what work on it is called. Pure; nothing here knows a position or a rendered prompt.

row_id: 24 hex digits of blake2b over (own id, canonical conversation and tools), or over the raw bytes of an
unreadable record; from the second equal row on, `-2`, `-3`, … follows. Which of two equal rows is called `-2`
does not matter: they are equal.
task key: 32 hex digits of blake2b over (recipe, dataset, row_id, turn, completion_index).
"""

from hashlib import blake2b

import orjson

from app.records import Conversation


def canonical_json(value: object) -> bytes:
    """The one byte string of a JSON value: keys sorted, no spaces. Raises TypeError for what JSON can't hold."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def row_digest(conversation: Conversation) -> str:
    """Identity of a readable row before occurrences are counted. `1` and `"1"` are different own ids."""
    return _hex(b"row", canonical_json([conversation.source_id, conversation.messages, conversation.tools]), 12)


def bytes_digest(raw: bytes) -> str:
    """Identity of a record that could not be read as a conversation: its bytes."""
    return _hex(b"raw", raw, 12)


def row_id(digest: str, occurrence: int) -> str:
    """Row id of the n-th (from 1) row with this digest."""
    return digest if occurrence == 1 else f"{digest}-{occurrence}"


def task_key(recipe: str, dataset: str, row_id: str, turn: int, completion_index: int) -> str:
    """The idempotency key of one completion (completion_index -1: the verdict on a whole row)."""
    return _hex(b"key", f"{recipe}\0{dataset}\0{row_id}\0{turn}\0{completion_index}".encode(), 16)


def fingerprint(value: object) -> str:
    """16 hex digits that change when a JSON value changes: recipes, servers."""
    return _hex(b"fingerprint", canonical_json(value), 8)


def _hex(person: bytes, data: bytes, size: int) -> str:
    return blake2b(data, digest_size=size, person=person).hexdigest()

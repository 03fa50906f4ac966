"""What a line promises by itself: its fields, its identity, its counts and its mask. Pure.

Each check returns None, or the kind of violation and a detail without any text of the row.
"""

from array import array
from collections.abc import Callable
from dataclasses import fields
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import orjson

from app.identity import task_key
from app.jsonl import parse
from app.reasons import STAGE_OF, Reason, Stage
from app.records import RejectedRecord, ResponseRecord, Sample, completion_id
from app.rundir import RAW, REJECTED, TOKENIZED

Problem = tuple[str, str]  #: kind, detail
Schema = dict[str, Callable[[Any], bool]]  #: field → whether a value is of its type


def _type_check(hint: Any) -> Callable[[Any], bool]:
    if get_origin(hint) is Literal:
        legal = get_args(hint)
        return lambda value: type(value) is str and value in legal
    if hint == list[int]:
        return _is_ids
    return lambda value: type(value) is hint


def _is_ids(value: Any) -> bool:
    if type(value) is not list or not set(map(type, value)) <= {int}:  # a bool is no id
        return False
    try:
        array("I", value)
    except OverflowError:  # below 0, or beyond 32 bits
        return False
    return True


def _schema(record: type) -> Schema:
    hints = get_type_hints(record)
    return {one.name: _type_check(hints[one.name]) for one in fields(record)}


SCHEMAS = MappingProxyType(
    {RAW: _schema(ResponseRecord), TOKENIZED: _schema(Sample), REJECTED: _schema(RejectedRecord)}
)
_JSON_FIELDS = ("meta_info", "metadata")


def field_problem(record: dict[str, Any], schema: Schema) -> Problem | None:
    """Exactly these keys, each of its type."""
    if record.keys() != schema.keys():
        lacks, extra = sorted(schema.keys() - record.keys()), sorted(record.keys() - schema.keys())
        return "wrong_keys", f"lacks {lacks}, has beyond the format {extra}"
    for name, is_right in schema.items():
        if not is_right(record[name]):
            if name == "finish_reason":
                return "bad_finish_reason", f"finish_reason is {record[name]!r}"
            return "wrong_type", f"{name} is a {type(record[name]).__name__}, or holds what it should not"
    for name in _JSON_FIELDS:
        if name in record and not _is_json(record[name]):
            return "wrong_type", f"{name} is no JSON text"
    return None


def whole(name: str, raw: bytes) -> dict[str, Any]:
    """The record of a line of the file `name`, with all its fields, each of its type. Raises ValueError."""
    record = parse(raw)
    if (problem := field_problem(record, SCHEMAS[name])) is not None:
        raise ValueError(problem[1])
    return record


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def response_identity_problem(record: dict[str, Any]) -> Problem | None:
    """Ids and key follow from dataset, row, turn and completion."""
    place = (record["dataset"], record["row_id"], record["turn"], record["completion_index"])
    if record["id"] != completion_id(*place) or record["primary_id"] != f"{record['dataset']}:{record['row_id']}":
        return "wrong_id", "id or primary_id is not that of its dataset, row, turn and completion"
    if record["key"] != task_key(record["recipe"], *place):
        return "wrong_key", "key is not that of its recipe, dataset, row, turn and completion"
    return None


def response_problem(record: dict[str, Any]) -> Problem | None:
    """Counts, finish reason and turn are right."""
    prompt, output = len(record["prompt_token_ids"]), len(record["output_ids"])
    if (record["num_prompt_tokens"], record["num_output_tokens"]) != (prompt, output):
        said = f"{record['num_prompt_tokens']} + {record['num_output_tokens']}"
        return "wrong_count", f"num_ fields say {said} tokens, the lists hold {prompt} + {output}"
    if record["finish_reason"] == "length" and record["matched"]:
        return "bad_finish_reason", "finish_reason is length, and matched names a stop"
    if not 0 <= record["turn"] < record["turns"]:
        return "wrong_count", f"turn {record['turn']} of {record['turns']}"
    return None


def sample_problem(record: dict[str, Any]) -> Problem | None:
    """Its id is one of its dataset; the mask is 0 on the prompt and 1 on the output, and the counts say so."""
    if not record["id"].startswith(f"{record['primary_id']}:{record['turn']}:"):
        return "wrong_id", "id is not that of its row and turn"
    if not record["primary_id"].startswith(f"{record['dataset']}:"):
        return "wrong_id", "primary_id is not that of its dataset"
    ids, prompt, output = len(record["input_ids"]), record["num_prompt_tokens"], record["num_output_tokens"]
    if prompt < 0 or output < 0 or prompt + output != ids:
        return "wrong_count", f"num_ fields say {prompt} + {output} tokens, input_ids holds {ids}"
    if record["loss_mask"] != [0] * prompt + [1] * output:
        return "wrong_mask", f"loss_mask is not {prompt} times 0 and {output} times 1"
    if not output:
        return "wrong_mask", "no token to train on"
    return None


def rejection_problem(record: dict[str, Any], recipe: str) -> Problem | None:
    """Stage and reason are of the closed list; ids and key follow from dataset, row and completion."""
    if record["reason"] not in list(Reason) or record["stage"] != STAGE_OF[Reason(record["reason"])]:
        return "bad_reason", f"reason {record['reason']!r} at stage {record['stage']!r}"
    row = f"{record['dataset']}:{record['row_id']}"
    head, _, tail = record["id"].rpartition(":")
    turn = head[len(row) + 1 :]
    if record["primary_id"] != row or head != f"{row}:{turn}" or not turn.isdecimal() or not _is_index(tail):
        return "wrong_id", "id or primary_id is not that of its dataset and row"
    if tail == "-1" and (turn != "0" or record["stage"] == Stage.SAMPLE):
        return "wrong_id", "a verdict on a whole row has turn 0 and comes before any sample"
    if recipe and record["key"] != task_key(recipe, record["dataset"], record["row_id"], int(turn), int(tail)):
        return "wrong_key", "key is not that of the run's recipe, its dataset, row, turn and completion"
    return None


def _is_index(text: str) -> bool:
    return text == "-1" or text.isdecimal()


def hash_of_text(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return blake2b(text.encode(), digest_size=16).digest()


def hash_of_sample(prompt_ids: list[int], output_ids: list[int], finish_reason: str) -> bytes:
    """16 bytes that stand for what a sample must hold: both parts, where they meet, and how it ended."""
    digest = blake2b(f"{len(prompt_ids)} {finish_reason}\0".encode(), digest_size=16)
    for ids in (prompt_ids, output_ids):
        digest.update(array("I", ids))
    return digest.digest()

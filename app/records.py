"""The records that travel through Headrace, field by field as they stand in the files.

Invariant: every line of a file has the same keys, each of one type, never null; open-ended values are JSON strings.
A frozen dataclass is the file format: `orjson.dumps(record)` is the line, in field order.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

FinishReason = Literal["stop", "length"]


def completion_id(dataset: str, row_id: str, turn: int, completion_index: int) -> str:
    """`<dataset>:<row_id>:<turn>:<completion_index>`, the `id` of every line we write."""
    return f"{dataset}:{row_id}:{turn}:{completion_index}"


def slot_of(identity: str) -> tuple[str, str, int]:
    """(dataset, row_id, completion_index) of a `completion_id`."""
    dataset, row_id, _, index = identity.rsplit(":", 3)
    return dataset, row_id, int(index)


def line_of(record: object) -> bytes:
    """One whole JSONL line of a record, newline included. Strict JSON, UTF-8, U+2028 and friends left as they are."""
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row as a chat: what every known shape of row becomes before it is rendered.

    messages: dicts with `role` and `content` (text), and where given `reasoning_content`, `tool_calls`
    (OpenAI form, `arguments` as a dict), `tool_call_id`, `name`. tools: OpenAI wrappers or bare functions, as given.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    source_id: Any = None  #: the row's own id as it was read (text, number); None if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What there is of an answer that is made in stages, between two of them."""

    output_ids: list[int] = field(repr=False)
    text: str = field(repr=False)
    stages: int  #: requests that it took, failed ones apart
    started_at: str  #: of the first, ISO 8601, UTC
    latency_seconds: float  #: of all of them together


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One completion to get: the payload that waits in Redis under its key.

    A row of several turns is one task, its key that of turn 0; it is made turn by turn, and `turn` says which is next.
    """

    key: str
    dataset: str
    row_id: str
    source_id: str
    row_number: int
    turn: int
    turns: int  #: as many as the row may get
    completion_index: int
    max_new_tokens: int
    prompt_token_ids: list[int] = field(repr=False)
    chat: bytes = field(default=b"", repr=False)  #: of a row of several turns, all that came before (`app.chats`)
    made: Made | None = field(default=None, repr=False)  #: of an answer in stages, those made

    @property
    def id(self) -> str:
        """The readable id, as in the files."""
        return completion_id(self.dataset, self.row_id, self.turn, self.completion_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A line of raw_responses.jsonl: the truth about one generated turn."""

    key: str
    id: str
    primary_id: str
    dataset: str
    row_id: str
    source_id: str
    row_number: int
    turn: int
    turns: int
    completion_index: int
    prompt_token_ids: list[int] = field(repr=False)
    output_ids: list[int] = field(repr=False)
    text: str = field(repr=False)
    finish_reason: FinishReason
    matched: str  #: the stop id or string as text, "" for length
    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int  #: as asked; a shorter `length` was clipped by the server
    recipe: str
    model: str
    endpoint: str
    server: str
    attempt: int  #: requests sent for it
    stages: int  #: 1 unless generated in stages
    started_at: str  #: ISO 8601, UTC
    latency_seconds: float
    meta_info: str  #: JSON string, as the server gave it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A line of tokenized_data.jsonl: what the trainer loads. loss_mask is 1 on every returned id."""

    id: str
    primary_id: str
    dataset: str
    turn: int
    input_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    metadata: str  #: JSON string


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRecord:
    """A line of rejected.jsonl. A row refused before generation has turn 0 and completion_index -1 in its id."""

    key: str
    id: str
    primary_id: str
    dataset: str
    row_id: str
    source_id: str
    row_number: int
    stage: str
    reason: str
    detail: str
    attempts: int
    at: str  #: ISO 8601, UTC

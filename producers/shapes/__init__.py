"""From a row's value to a conversation: every shape of row that people publish becomes the same few fields.

Invariant: a conversation holds only what we know (role, content, reasoning_content, tool_calls, tool_call_id, name),
as text or JSON; equal rows give equal conversations whatever the order of their keys; and nothing is ever rendered from
Python's own idea of a value (no `None`, no repr of a dict).

Which field is the prompt, the first of these that holds something (`--prompt-field`, `--messages-field` before all):

    messages, conversations, conversation    a chat; role/content or from/value; also as a JSON string
    prompt                                   a text, or a chat
    instruction                              with `input` below it; `instances` (first one's input); `history` before it
    question, turns                          a text, or the user's turns: texts, messages, or lists of messages
    text, input                              a text

A bare string is a prompt, a bare list of messages a chat. Tools come from `tools`, `functions` or `function`, as a
list or a JSON string, bare or in OpenAI's wrapper. The row's own id is the first of `OWN_IDS` that is a non-empty text
or a number (`1` and `"1"` are two different ids; null and "" are none). A `system` or `system_prompt` text, or else
`--system`, opens a chat that has no system message of its own.

Turns. With `--turns last` the history stands as given and the last message is answered once: consecutive user turns
without answers between them (MT-bench, BFCL multi-turn) stay consecutive. With `--turns all` every user message is a
turn of its own, to be answered in order, and so are tool results (see `app.chats`). Given answers are dropped, but for
the calls that tool results answer: they say which call each result belongs to.

Roles. human, gpt, function_call, observation and function become user, assistant, assistant, tool and tool. Any other
role is kept: `developer` is for the chat template to take or refuse; one that is neither OpenAI's nor named in the
template rejects the row when it is rendered. Answers at the end are dropped, to be made again; with prefill, a last
answer that is text is kept, to be continued.
"""

from dataclasses import dataclass
from typing import Any, Literal

from app.chats import steps_of
from app.identity import canonical_json
from app.reasons import Reason, Rejected
from app.records import Conversation
from producers.shapes.fields import OWN_IDS, PROMPT_FIELDS, own_id, raw_messages, system_text
from producers.shapes.messages import normalized, role_of
from producers.shapes.tools import tools_of

__all__ = ["OWN_IDS", "PROMPT_FIELDS", "ShapeOptions", "conversation_of", "turns_in"]


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """How rows are read. Fields are dotted paths (`a.b.0.c`); None means that they are found by their usual names."""

    prompt_field: str | None = None
    messages_field: str | None = None
    tools_field: str | None = None
    id_field: str | None = None
    turns: Literal["last", "all"] = "last"
    prefill: bool = False
    system: str | None = None


def conversation_of(value: Any, options: ShapeOptions = ShapeOptions()) -> Conversation:
    """The conversation in a row. Raises Rejected (UNKNOWN_SHAPE, EMPTY_PROMPT, UNSUPPORTED_CONTENT, BAD_TOOL_CALL,
    INVALID_UNICODE) with a sentence that names the message by its place in the row, from 0."""
    given = [(index, role_of(raw, index), raw) for index, raw in enumerate(raw_messages(value, options))]
    kept = _to_be_answered(given, options)
    messages = normalized(kept)
    if options.turns == "all":
        messages = [_calls_alone(one) for one in messages if one["role"] != "assistant" or one.get("tool_calls")]
    _refuse_empty(messages, options)
    system = system_text(value) or options.system
    if system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    conversation = Conversation(messages, tools_of(value, options.tools_field), own_id(value, options.id_field))
    _refuse_what_is_no_text(conversation)
    return conversation


def turns_in(conversation: Conversation, options: ShapeOptions) -> int:
    """How many completions a row gets, one after the other."""
    if options.turns == "last":
        return 1
    return len(steps_of(conversation.messages))


def _to_be_answered(given: list[tuple[int, str, Any]], options: ShapeOptions) -> list[tuple[int, str, Any]]:
    if options.turns == "all":
        after = [*(role for _, role, _ in given[1:]), ""]
        kept = [one for one, follows in zip(given, after, strict=True) if one[1] != "assistant" or follows == "tool"]
        while kept and kept[-1][1] not in ("user", "tool"):
            kept.pop()
        return kept
    end = len(given)
    while end and given[end - 1][1] == "assistant":
        end -= 1
    if options.prefill and end < len(given) and _is_text(given[end][2]):
        end += 1
    return given[:end]


def _is_text(raw: dict[str, Any]) -> bool:
    content = raw.get("content", raw.get("value"))
    return isinstance(content, str) and bool(content) and not raw.get("tool_calls") and not raw.get("function_call")


def _calls_alone(message: dict[str, Any]) -> dict[str, Any]:
    """Of a given answer, the calls."""
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}


def _refuse_empty(messages: list[dict[str, Any]], options: ShapeOptions) -> None:
    in_turns = options.turns == "all"
    without_question = ("system", "developer", *(("tool", "assistant") if in_turns else ()))
    if all(message["role"] in without_question for message in messages):
        raise Rejected(Reason.EMPTY_PROMPT, "it has no message to answer")
    asking = [message for message in messages if message["role"] == "user"] if in_turns else messages[-1:]
    if any(message["role"] != "tool" and not message["content"].strip() for message in asking):
        raise Rejected(Reason.EMPTY_PROMPT, "the message to answer has no text")


def _refuse_what_is_no_text(conversation: Conversation) -> None:
    try:
        canonical_json([conversation.source_id, conversation.messages, conversation.tools])
    except TypeError as exc:
        if _holds_lone_surrogate([conversation.source_id, conversation.messages, conversation.tools]):
            raise Rejected(Reason.INVALID_UNICODE, "holds half a surrogate pair, which is no text") from exc
        raise Rejected(Reason.UNKNOWN_SHAPE, f"holds a value that JSON has no word for ({exc})") from exc


def _holds_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(_holds_lone_surrogate(inner) for pair in value.items() for inner in pair)
    return isinstance(value, list | tuple) and any(map(_holds_lone_surrogate, value))

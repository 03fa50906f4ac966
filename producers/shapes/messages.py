"""One message as people write it, and as the chat template gets it.

Invariant: content is text. An image, a number or an object in its place rejects the row.
"""

from collections import deque
from typing import Any

from app.reasons import Reason, Rejected
from producers.shapes.fields import kind_of
from producers.shapes.tools import tool_calls_of

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def role_of(raw: Any, index: int) -> str:
    """The role of a message, by whichever name it goes."""
    if not isinstance(raw, dict):
        raise Rejected(Reason.UNKNOWN_SHAPE, f"messages[{index}] is no object")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or not role:
        raise Rejected(Reason.UNKNOWN_SHAPE, f"messages[{index}] has no role")
    return _ROLES.get(role, role)


def normalized(entries: list[tuple[int, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Messages in our form, from (place in the row, role, message as given)."""
    messages = [_message(index, role, raw) for index, role, raw in entries]
    _link_calls(messages)
    return messages


def _message(index: int, role: str, raw: dict[str, Any]) -> dict[str, Any]:
    place = f"messages[{index}]"
    content = raw.get("content", raw.get("value"))
    if raw.get("role", raw.get("from")) == "function_call":
        return {"role": role, "content": "", "tool_calls": tool_calls_of(content, place)}
    text, reasoning, calls = _content(content, place)
    message: dict[str, Any] = {"role": role, "content": text}
    if reasoning := _given_reasoning(raw, place) or reasoning:
        message["reasoning_content"] = reasoning
    for field in ("tool_calls", "function_call"):
        if raw.get(field):
            calls += tool_calls_of(raw[field], f"{place}.{field}")
    if calls:
        message["tool_calls"] = calls
    for field in ("tool_call_id", "name"):
        if isinstance(raw.get(field), str) and raw[field]:
            message[field] = raw[field]
    return message


def _given_reasoning(raw: dict[str, Any], place: str) -> str:
    found = next((raw[field] for field in _REASONING_FIELDS if raw.get(field)), "")
    if not isinstance(found, str):
        raise Rejected(Reason.UNSUPPORTED_CONTENT, f"{place} has reasoning that is no text")
    return found


def _content(content: Any, place: str) -> tuple[str, str, list[dict[str, Any]]]:
    """(text, reasoning, tool calls) of a content. null is no text; parts are pieces of one text."""
    if content is None:
        return "", "", []
    if isinstance(content, str):
        return content, "", []
    if not isinstance(content, list):
        raise Rejected(Reason.UNSUPPORTED_CONTENT, f"{place} has content that is no text")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind, value = _part(part, place)
        if kind == "tool_call":
            calls += tool_calls_of(value, place)
        else:
            (texts if kind == "text" else reasoning).append(value)
    return "".join(texts), "".join(reasoning), calls


def _part(part: Any, place: str) -> tuple[str, Any]:
    """("text" | "reasoning" | "tool_call", value) of one part."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_call" and part.get("value"):
        return "tool_call", part["value"]
    if kind in _TEXT_PARTS or kind in _REASONING_PARTS:
        value = next((part[field] for field in ("text", "value", kind) if field in part), None)
        if isinstance(value, str):
            return ("text" if kind in _TEXT_PARTS else "reasoning"), value
        detail = f"{place} has a part of type {kind!r} whose text is {kind_of(value)}; only text can be sent"
        raise Rejected(Reason.UNSUPPORTED_CONTENT, detail)
    what = f"a part of type {kind!r}" if isinstance(kind, str) else "a part without a type"
    raise Rejected(Reason.UNSUPPORTED_CONTENT, f"{place} has {what}; only text can be sent")


def _link_calls(messages: list[dict[str, Any]]) -> None:
    """Calls without an id get `functions.<name>:<n>`, n counted over the chat (the form Kimi asks for); results without
    one get the ids of the calls before them, in order."""
    count = 0
    unanswered: deque[str] = deque()
    for message in messages:
        if calls := message.get("tool_calls"):
            unanswered.clear()
            for call in calls:
                call.setdefault("id", f"functions.{call['function']['name']}:{count}")
                unanswered.append(call["id"])
                count += 1
        elif message["role"] == "tool":
            if message.get("tool_call_id") in unanswered:
                unanswered.remove(message["tool_call_id"])
            elif "tool_call_id" not in message and unanswered:
                message["tool_call_id"] = unanswered.popleft()

"""Which fields of a row hold its prompt, its own id and its system text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from app.jsonl import why_no_json
from app.reasons import Reason, Rejected

if TYPE_CHECKING:
    from producers.shapes import ShapeOptions

CHAT_FIELDS = ("messages", "conversations", "conversation")
OWN_IDS = ("id", "uid", "uuid", "question_id", "task_id", "prompt_id", "conversation_id", "key", "primary_id")
_SYSTEM_FIELDS = ("system", "system_prompt")
_SHOWN_FIELDS = 12


def raw_messages(value: Any, options: "ShapeOptions") -> list[Any]:
    """The messages of a row as they stand in it; texts have become user messages."""
    if not isinstance(value, dict):
        return _chat(value, "the row")
    if options.messages_field:
        return _chat(_parsed(_named(value, options.messages_field, "--messages-field")), options.messages_field)
    if options.prompt_field:
        return _chat(_named(value, options.prompt_field, "--prompt-field"), options.prompt_field)
    for name, read in _FIELDS.items():
        if not _is_nothing(value.get(name)):
            return read(value, name)
    if any(name in value for name in _FIELDS):
        raise Rejected(Reason.EMPTY_PROMPT, "its prompt is empty")
    raise Rejected(Reason.UNKNOWN_SHAPE, f"no prompt found; {_fields_of(value)}; name one with --prompt-field")


def own_id(value: Any, path: str | None) -> str | int | float | None:
    """The row's own id as it was read, or None."""
    if not isinstance(value, dict):
        return None
    candidates = [at_path(value, path)] if path else [value.get(name) for name in OWN_IDS]
    for found in candidates:
        if (isinstance(found, str) and found) or (isinstance(found, int | float) and not isinstance(found, bool)):
            return found
    return None


def system_text(value: Any) -> str:
    """The system text that stands beside the prompt, "" if there is none."""
    if not isinstance(value, dict):
        return ""
    texts = (value.get(name) for name in _SYSTEM_FIELDS)
    return next((text for text in texts if isinstance(text, str) and text), "")


def at_path(value: Any, path: str) -> Any:
    """What a dotted path leads to, None if nowhere. A key that has the dots in its name goes first."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _named(value: dict[str, Any], path: str, option: str) -> Any:
    found = at_path(value, path)
    if found is None:
        raise Rejected(Reason.UNKNOWN_SHAPE, f"no field {path!r} ({option}); {_fields_of(value)}")
    return found


def _fields_of(value: dict[str, Any]) -> str:
    names = list(value)
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    return f"its fields are {', '.join(names[:_SHOWN_FIELDS]) or 'none'}{more}"


def _is_nothing(value: Any) -> bool:
    return value is None or value == "" or value == []


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _chat(value: Any, name: str) -> list[Any]:
    """A text is one user message; a list is messages, texts of the user, or lists of them."""
    if isinstance(value, str):
        return [_user(value)]
    if isinstance(value, list):
        return [
            message
            for index, entry in enumerate(value)
            for message in ([entry] if isinstance(entry, dict) else _chat(entry, f"{name}[{index}]"))
        ]
    raise Rejected(Reason.UNKNOWN_SHAPE, f"{name} is {kind_of(value)}, not a text or a list of messages")


def kind_of(value: Any) -> str:
    """What a value is, for the middle of a sentence."""
    kinds = {dict: "an object", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _parsed(value: Any) -> Any:
    """Tables hold chats as JSON strings."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            raise Rejected(Reason.UNREADABLE, f"its chat is a string, and that is {why_no_json(exc)}") from exc
    return value


def _of_chat(row: dict[str, Any], name: str) -> list[Any]:
    return _chat(_parsed(row[name]), name)


def _of_text(row: dict[str, Any], name: str) -> list[Any]:
    return _chat(row[name], name)


def _of_instruction(row: dict[str, Any], name: str) -> list[Any]:
    instances = row.get("instances")
    has_instances = isinstance(instances, list) and instances and isinstance(instances[0], dict)
    below = instances[0].get("input") if has_instances else row.get("input")
    texts = [row[name]] if _is_nothing(below) else [row[name], below]
    for text in texts:
        if not isinstance(text, str):
            raise Rejected(Reason.UNKNOWN_SHAPE, f"{name} and its input are texts; one here is {kind_of(text)}")
    return [*_history(row.get("history")), _user("\n\n".join(texts))]


def _history(value: Any) -> list[Any]:
    """Earlier turns as pairs of texts."""
    if _is_nothing(value):
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Rejected(Reason.UNKNOWN_SHAPE, "history is no list of pairs of texts")
    return [
        {"role": role, "content": text}
        for pair in value
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


_FIELDS: dict[str, Callable[[dict[str, Any], str], list[Any]]] = {
    **dict.fromkeys(CHAT_FIELDS, _of_chat),
    "prompt": _of_text,
    "instruction": _of_instruction,
    **dict.fromkeys(("question", "turns", "text", "input"), _of_text),
}
PROMPT_FIELDS = tuple(_FIELDS)

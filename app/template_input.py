"""What a chat template is given: variables of its own, roles that it names, arguments in the form it takes. Pure."""

import json
from typing import Any

from app.errors import UsageError

#: What the rendering itself gives to a template: a value of the user's would replace the chat or the template.
_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages",
    "return_dict", "self", "tokenize", "tools",
})  # fmt: skip
#: What templates of reasoning models ask `if` of.
_FLAGS = ("thinking", "enable_thinking")
_FALSE = ("false", "no", "off", "0", "none", "")
#: Roles of OpenAI's chats, which servers take; any other one has to be the template's own.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def refuse_kwargs(kwargs: dict[str, Any]) -> None:
    """Raises UsageError for a --template-kwargs that would change something else than it says."""
    for name, value in kwargs.items():
        if name in _RESERVED:
            raise UsageError(f"--template-kwargs: {name!r} is not the user's to set; leave it out.")
        if name in _FLAGS and not isinstance(value, bool):
            meant = json.dumps({name: str(value).lower() not in _FALSE})
            raise UsageError(
                f"--template-kwargs: {name} is true or false, not {value!r} (templates take any text for true): "
                f"write '{meant}'."
            )


def strange_role(messages: list[dict[str, Any]], template: str | dict[str, str]) -> str | None:
    """The first role that nobody knows, in a sentence, or None. Many templates write one that they never heard of as a
    system turn, or as a word that no model has seen."""
    sources = template.values() if isinstance(template, dict) else [template]
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in _ROLES and not any(f"'{role}'" in text or f'"{role}"' in text for text in sources):
            return f"the chat template names no role {role!r} (message {number} of the prompt)"
    return None


def with_string_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

"""An answer's text taken apart into reasoning, content and tool calls, as chat formats have them. Pure.

The text is decoded with its control tokens and without the stop token. The rules, in this order:

1. Reasoning. What stands before the first `</think>` is reasoning, a `<think>` at its beginning left out. Without a
   `</think>` all of it is reasoning if it begins with `<think>` or the prompt ended inside it, and none of it otherwise.
2. Tool calls, in the two forms that models with tools write:
   `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{…}<|tool_call_end|>…<|tool_calls_section_end|>`
   (Kimi) and `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>` (Hermes, Qwen). They are taken out of the content
   if every one of them is whole, has a name and has an object for arguments; if one is not, all of it stays content.
3. White space around reasoning and content is dropped.
"""  # noqa: E501

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

_OPEN, _CLOSE = "<think>", "</think>"
_KIMI_SECTION = re.compile(r"<\|tool_calls_section_begin\|>(.*?)<\|tool_calls_section_end\|>", re.DOTALL)
_KIMI_CALL = re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MARKS = ("<|tool_call", "<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said. tool_calls: OpenAI's form, arguments as objects. malformed: it called, and not well."""

    content: str
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    malformed: bool = False


def ends_in_reasoning(prompt_end: str) -> bool:
    """Whether a prompt's last words open the reasoning."""
    return prompt_end.rfind(_OPEN) > prompt_end.rfind(_CLOSE)


def answer_of(text: str, *, opened: bool = False) -> Answer:
    """The parts of an answer. opened: the prompt ended inside the reasoning."""
    reasoning, content = _split_reasoning(text, opened)
    calls = _calls(content)
    if calls is None:
        return Answer(content.strip(), reasoning, malformed=True)
    if calls:
        content = _HERMES_CALL.sub("", _KIMI_SECTION.sub("", content))
    return Answer(content.strip(), reasoning, calls)


def _split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    before, close, after = text.partition(_CLOSE)
    begins = before.lstrip().startswith(_OPEN)
    if not close and not begins and not opened:
        return "", text
    if begins:
        before = before.lstrip()[len(_OPEN) :]
    return before.strip(), after


def _calls(content: str) -> list[dict[str, Any]] | None:
    """All calls in a content; None if one of them is broken."""
    calls: list[dict[str, Any] | None] = []
    for section in _KIMI_SECTION.findall(content):
        found = _KIMI_CALL.findall(section)
        calls += [_kimi(name.strip(), arguments) for name, arguments in found] or [None]
        if _has_mark(_KIMI_CALL.sub("", section)):
            return None
    calls += [_hermes(body, number) for number, body in enumerate(_HERMES_CALL.findall(content))]
    rest = _HERMES_CALL.sub("", _KIMI_SECTION.sub("", content))
    whole = [call for call in calls if call is not None]
    return None if len(whole) < len(calls) or _has_mark(rest) else whole


def _has_mark(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def _kimi(call_id: str, arguments: str) -> dict[str, Any] | None:
    name = call_id.removeprefix("functions.").rpartition(":")[0]
    return _call(call_id, name, _json(arguments))


def _hermes(body: str, number: int) -> dict[str, Any] | None:
    said = _json(body)
    if not isinstance(said, dict):
        return None
    return _call(f"functions.{said.get('name')}:{number}", said.get("name"), said.get("arguments", {}))


def _call(call_id: str, name: Any, arguments: Any) -> dict[str, Any] | None:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None

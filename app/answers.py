"""An answer's text taken apart into reasoning, content and tool calls, as chat formats have them. Pure.

The text is decoded with its control tokens and without the stop token. The rules, in this order:

1. Reasoning. What stands before the first `</think>` is reasoning, a `<think>` at its beginning left out. Without a
   `</think>` all of it is reasoning if it begins with `<think>` or the prompt ended inside it, and none of it otherwise.
   A `</think>` in a code block (between two lines that begin with ```) is somebody's text, unless it is the only one
   and the reasoning was begun. Reasoning that runs into Kimi's tool calls without a `</think>` ends there.
2. Tool calls, in the three forms that models with tools write, outside code blocks:
   `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{…}<|tool_call_end|>…<|tool_calls_section_end|>`
   (Kimi), `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>` (Hermes, Qwen) and
   `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>` (DeepSeek V3.1; V3
   and R1 write `function<｜tool▁sep｜>NAME` and the arguments as a ```json block below it). They are taken out of the
   content if every one of them is whole, has a name and has an object for arguments; if one is not, all stays content.
3. A call keeps the id that the model gave it; else it is `functions.NAME:N`, N counted from `first_call`.
4. White space around reasoning and content is dropped, as servers do that hand answers to their clients.

Invariant: whatever is not white space at an edge, or a mark named above, is in one of the three.
"""  # noqa: E501 - DeepSeek's marks are what they are

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

_OPEN, _CLOSE = "<think>", "</think>"
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_FENCE = r"^[ \t]*```"
_CODE = re.compile(rf"{_FENCE}.*?{_FENCE}[ \t]*$", re.DOTALL | re.MULTILINE)
_PARTS = re.compile(
    rf"(?P<code>{_FENCE}.*?{_FENCE}[ \t]*$)"
    r"|<\|tool_calls_section_begin\|>(?P<kimi>.*?)<\|tool_calls_section_end\|>"
    r"|<tool_call>(?P<hermes>.*?)</tool_call>"
    r"|<｜tool▁calls▁begin｜>(?P<deepseek>.*?)<｜tool▁calls▁end｜>",
    re.DOTALL | re.MULTILINE,
)
_KIMI_CALL = re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_JSON_BLOCK = re.compile(r"(.*?)\s*```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_MARKS = ("<|tool_call", "<tool_call>", "</tool_call>", "<｜tool▁")

_Call = tuple[str, Any, Any]  # id ("" if the model gave none), name, arguments


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


def answer_of(text: str, *, opened: bool = False, first_call: int = 0) -> Answer:
    """The parts of an answer. opened: the prompt ended inside the reasoning. first_call: calls the chat had before."""
    reasoning, said = _split_reasoning(text, opened)
    content, calls = _split_calls(said)
    whole = [made for number, call in enumerate(calls, first_call) if (made := _made(call, number)) is not None]
    if len(whole) < len(calls):
        return Answer(said.strip(), reasoning, malformed=True)
    return Answer(content.strip(), reasoning, whole)


def _split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    begins = text.lstrip().startswith(_OPEN)
    close = _close(text, begun=begins or opened)
    if close >= 0:
        before, after = text[:close], text[close + len(_CLOSE) :]
    elif begins or opened:
        before, section, rest = text.partition(_KIMI_SECTION)
        after = section + rest
    else:
        return "", text
    if begins:
        before = before.lstrip()[len(_OPEN) :]
    return before.strip(), after


def _close(text: str, *, begun: bool) -> int:
    """Where the reasoning ends; -1 if nowhere."""
    code = [match.span() for match in _CODE.finditer(text)]
    places = [match.start() for match in re.finditer(_CLOSE, text)]
    outside = [at for at in places if not any(start <= at < end for start, end in code)]
    return next(iter(outside or (places if begun else [])), -1)


def _split_calls(said: str) -> tuple[str, list[_Call | None]]:
    """(what is left, all calls; None for a broken one)."""
    kept, prose, calls, at = [], [], [], 0
    for match in _PARTS.finditer(said):
        before, at = said[at : match.start()], match.end()
        kept.append(before)
        prose.append(before)
        if match["code"] is not None:
            kept.append(match["code"])
        else:
            calls += _calls_in(match)
    kept.append(said[at:])
    prose.append(said[at:])
    broken = [None] if any(mark in "\n".join(prose) for mark in _MARKS) else []
    return "".join(kept), calls + broken


def _calls_in(match: re.Match[str]) -> Iterator[_Call | None]:
    if match["hermes"] is not None:
        said = _json(match["hermes"])
        yield ("", said.get("name"), said.get("arguments", {})) if isinstance(said, dict) else None
        return
    pattern, read, section = (
        (_KIMI_CALL, _kimi, match["kimi"]) if match["kimi"] is not None else
        (_DEEPSEEK_CALL, _deepseek, match["deepseek"])
    )  # fmt: skip
    found = pattern.findall(section)
    yield from (read(head.strip(), tail) for head, tail in found)
    if not found or pattern.sub("", section).strip():
        yield None


def _kimi(call_id: str, arguments: str) -> _Call:
    return call_id, call_id.removeprefix("functions.").rpartition(":")[0], _json(arguments)


def _deepseek(head: str, tail: str) -> _Call:
    block = _JSON_BLOCK.fullmatch(tail.strip())
    if head == "function" and block is not None:
        return "", block[1].strip(), _json(block[2])
    return "", head, _json(tail)


def _made(call: _Call | None, number: int) -> dict[str, Any] | None:
    """A call in OpenAI's form, None for what is none."""
    if call is None:
        return None
    call_id, name, arguments = call
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    made = {"name": name, "arguments": arguments}
    return {"id": call_id or f"functions.{name}:{number}", "type": "function", "function": made}


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None

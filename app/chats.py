"""A chat of several generated turns, between the data that asks and the model that answers. Pure.

The messages of the data fall into steps; after each one an answer is due. A step ends with a message of the user, or
with the last of some tool results. What a step says depends on the answer before it:

- Tool results are handed over if that answer made the calls that they belong to: as many as in the data, by the same
  names, in the same order (arguments may differ). They get the ids that the model gave its calls.
- If it made no call, the tool results are passed over: nobody asked for them.
- If it made calls that the data has no results for, the chat ends with that answer: nothing true could follow it.

Invariant: a prompt holds what the model said (see `app.answers`) and what the data says, and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import orjson

from app.answers import Answer, answer_of, ends_in_reasoning
from app.records import Conversation, ResponseRecord

#: A template opens the reasoning, if at all, with the last few ids of the prompt (`<think>` and a newline).
_PROMPT_END_IDS = 8

Message = dict[str, Any]


class Said(NamedTuple):
    """An answer as a message. malformed: it has calls that could not be read, and that stay in its content."""

    message: Message
    malformed: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A chat so far. ended: why no answer is due: "" (one is), "complete" or "unanswered_calls"."""

    messages: list[Message]
    ended: str = ""
    passed_over: int = 0  #: steps of tool results that no call of the model asked for


# --- what the data asks ---


def steps_of(given: Sequence[Message]) -> list[list[Message]]:
    """The messages of the data by the answers that are due after them; what no answer would follow is left out."""
    steps: list[list[Message]] = []
    step: list[Message] = []
    for message, after in zip(given, [*given[1:], None], strict=True):
        step.append(message)
        results_end = message["role"] == "tool" and (after is None or after["role"] != "tool")
        if message["role"] == "user" or results_end:
            steps.append(step)
            step = []
    return steps


def replay(given: Sequence[Message], answers: Sequence[Message]) -> Replay:
    """The chat after these answers."""
    messages: list[Message] = []
    waiting, passed_over = iter(answers), 0
    for step in steps_of(given):
        if messages and (calls := messages[-1].get("tool_calls")):
            results = _results_of(step, calls)
            if results is None:
                return Replay(messages, "unanswered_calls", passed_over)
            messages += results
        elif step[-1]["role"] == "tool":
            passed_over += 1
            continue
        else:
            messages += step
        answer = next(waiting, None)
        if answer is None:
            return Replay(messages, "", passed_over)
        messages.append(answer)
    return Replay(messages, "complete", passed_over)


def _results_of(step: list[Message], calls: list[dict[str, Any]]) -> list[Message] | None:
    """The tool results of a step, as results of these calls; None if they are of others, or of none."""
    made = [message for message in step if message["role"] == "assistant"]
    asked = list(chain.from_iterable(message["tool_calls"] for message in made))
    results = [message for message in step if message["role"] == "tool"]
    others = [message for message in step if message["role"] not in ("assistant", "tool")]
    if len(results) != len(calls) or (asked and _names(asked) != _names(calls)):
        return None
    place = {call.get("id"): number for number, call in enumerate(asked)}
    order = [place.get(result.get("tool_call_id"), number) for number, result in enumerate(results)]
    if sorted(order) != list(range(len(calls))):
        order = list(range(len(calls)))
    linked = [result | {"tool_call_id": calls[n]["id"]} for result, n in zip(results, order, strict=True)]
    return others + linked


def _names(calls: list[dict[str, Any]]) -> list[str]:
    return [call["function"]["name"] for call in calls]


def opening(given: Conversation) -> Conversation:
    """What the first answer is due to."""
    return Conversation(replay(given.messages, []).messages, given.tools)


# --- what the model said ---


def spoken_ids(record: ResponseRecord) -> list[int]:
    """The ids of an answer without its stop token."""
    ids = record.output_ids
    stopped = ids and record.finish_reason == "stop" and record.matched == str(ids[-1])
    return ids[:-1] if stopped else ids


def opened_by(prompt: list[int], decode: Callable[[list[int]], str]) -> bool:
    """Whether a prompt ends inside the reasoning."""
    return ends_in_reasoning(decode(prompt[-_PROMPT_END_IDS:]))


def said(record: ResponseRecord, decode: Callable[[list[int]], str], first_call: int = 0) -> Said:
    """The message that an answer is, by the rules of `app.answers`. decode: ids to text, control tokens included."""
    opened = opened_by(record.prompt_token_ids, decode)
    answer = answer_of(decode(spoken_ids(record)), opened=opened, first_call=first_call)
    return Said(_message(answer), answer.malformed)


def all_said(records: Sequence[ResponseRecord], decode: Callable[[list[int]], str]) -> list[Said]:
    """The answers of a chat, calls numbered through it."""
    found: list[Said] = []
    for record in records:
        found.append(said(record, decode, sum(len(one.message.get("tool_calls", ())) for one in found)))
    return found


def _message(answer: Answer) -> Message:
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    return message


def history_of(before: ResponseRecord, prompt: Sequence[int], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """How a prompt repeats the turn before it: the same ids, the same text in other ids, or another text.

    {"history": "same" | "retokenized" | "rewritten"}, and `differs_at`, the place of the first id that differs. A
    template that drops earlier reasoning, or writes JSON its own way, rewrites; that is how the teacher is served.
    """
    was = before.prompt_token_ids + before.output_ids
    pairs = enumerate(zip(was, prompt, strict=False))
    at = next((place for place, (old, new) in pairs if old != new), min(len(was), len(prompt)))
    if at == len(was):
        return {"history": "same"}
    same_text = decode(list(prompt)).startswith(decode(was))
    return {"history": "retokenized" if same_text else "rewritten", "differs_at": at}


# --- on its way through Redis ---


class Parts(NamedTuple):
    """What the data gives, the allowance that each turn is to have, and the turns made so far."""

    given: Conversation
    max_new_tokens: int
    made: list[ResponseRecord]


def start_of(given: Conversation, max_new_tokens: int) -> bytes:
    """A chat that has no answer yet, as it travels: one line, to which a raw line is added for each turn made."""
    said = {"messages": given.messages, "tools": given.tools, "max_new_tokens": max_new_tokens}
    return orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)


def parts_of(chat: bytes) -> Parts:
    """Back from `start_of`, with what was added."""
    start, *turns = chat.splitlines()
    said = orjson.loads(start)
    given = Conversation(said["messages"], said["tools"])
    return Parts(given, said["max_new_tokens"], [ResponseRecord(**orjson.loads(turn)) for turn in turns])

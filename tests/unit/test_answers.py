"""app.answers: an answer's text taken apart by the documented rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.answers import Answer, answer_of, ends_in_reasoning

KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:0<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
SUM = {"id": "functions.sum:0", "type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("Hello.", False, Answer("Hello.")),
        ("<think>\nHm.\n</think>\n\nFour.", False, Answer("Four.", "Hm.")),
        ("Hm.</think>Four.", True, Answer("Four.", "Hm.")),
        ("Hm.</think>Four.", False, Answer("Four.", "Hm.")),
        ("<think></think>Four.", False, Answer("Four.")),
        ("Hm, hm", True, Answer("", "Hm, hm")),
        ("<think>Hm, hm", False, Answer("", "Hm, hm")),
        ("a </think> b </think> c", False, Answer("b </think> c", "a")),
    ],
    ids=str,
)
def test_reasoning_is_what_stands_before_its_end(text, opened, expected):
    """Opened by the prompt or by the answer, closed or not, said once."""
    assert answer_of(text, opened=opened) == expected


def test_calls_in_kimis_form_are_taken_out_of_the_content():
    """Name without its prefix and number, the id as it is, arguments as an object."""
    assert answer_of("Let me see." + KIMI.format(arguments='{"a": 1}')) == Answer("Let me see.", "", [SUM])


def test_calls_in_hermes_form_get_an_id():
    """Numbered in the order in which they stand."""
    said = answer_of('<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>')
    assert said == Answer("", "", [SUM])


@pytest.mark.parametrize(
    "text",
    [
        KIMI.format(arguments='{"a": '),
        KIMI.format(arguments="[1]"),
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        KIMI.format(arguments="{}").removesuffix("<|tool_calls_section_end|>"),
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}',
        KIMI.format(arguments="{}") + "<tool_call>half",
    ],
)
def test_a_broken_call_leaves_the_whole_content_as_it_was(text):
    """Nothing is half parsed, and it is said."""
    assert answer_of(text) == Answer(text, malformed=True)


def test_a_prompt_that_ends_in_an_open_reasoning_is_told_by_its_last_words():
    """Opened and closed at once is not open."""
    assert ends_in_reasoning("<|im_middle|><think>")
    assert not ends_in_reasoning("<think></think>")
    assert not ends_in_reasoning("user")


@given(st.text(alphabet="ab<>/think|_lo{}\":\n", max_size=200), st.booleans())
def test_any_text_is_taken_apart_without_an_error(text, opened):
    """Models write anything."""
    said = answer_of(text, opened=opened)
    assert set(said.content) <= set(text)


# --- code blocks, DeepSeek, reasoning that runs into calls

DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CODE = "```xml\n{}\n```\n"


def deepseek(head: str, tail: str) -> str:
    return DEEPSEEK.format(DEEPSEEK_CALL.format(head, tail))


@pytest.mark.parametrize(
    "call", [deepseek("sum", '{"a": 1}'), deepseek("function", 'sum\n```json\n{"a": 1}\n```')], ids=["v3.1", "v3"]
)
def test_calls_in_deepseeks_forms_are_taken_out_of_the_content(call):
    """The name before the arguments, or above them in a block; numbered from what the chat had before."""
    assert answer_of("Well." + call) == Answer("Well.", "", [SUM])
    assert answer_of(call, first_call=4).tool_calls[0]["id"] == "functions.sum:4"


@pytest.mark.parametrize("broken", [deepseek("sum", "{"), deepseek("", "{}"), DEEPSEEK.format(""), DEEPSEEK[:-8]])
def test_a_broken_call_of_deepseeks_stays_content(broken):
    """As with the others."""
    assert answer_of(broken) == Answer(broken.strip(), malformed=True)


def test_what_stands_in_a_code_block_is_text():
    """A model that explains tags or calls makes none."""
    shown = CODE.format("<think>x</think>")
    assert answer_of(f"{shown}Four.") == Answer(f"{shown}Four.")
    assert answer_of(f"Hm.\n{shown}Hm.</think>Four.", opened=True) == Answer("Four.", f"Hm.\n{shown}Hm.")
    for call in ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>', KIMI.format(arguments="{}"), "<tool_call>"):
        assert answer_of(CODE.format(call) + "So.") == Answer(CODE.format(call) + "So.")


def test_the_only_end_of_a_reasoning_counts_even_in_a_code_block():
    """Begun is begun: better an odd split than an answer that is all reasoning."""
    assert answer_of("Hm.\n```\n</think>Four.\n```", opened=True) == Answer("Four.\n```", "Hm.\n```")


def test_a_code_block_inside_a_calls_arguments_belongs_to_the_call():
    """What begins first holds what is in it."""
    text = '<tool_call>{"name": "sum",\n"arguments":\n{"a": 1}}\n</tool_call>\n```\ncode\n```'
    assert answer_of(text) == Answer("```\ncode\n```", "", [SUM])


def test_reasoning_that_runs_into_kimis_calls_ends_there():
    """The model may call without having closed its reasoning."""
    assert answer_of("Hm." + KIMI.format(arguments='{"a": 1}'), opened=True) == Answer("", "Hm.", [SUM])


_PIECES = st.sampled_from([
    "<think>", "</think>", "a", "b ", "\n", "```\n", "\n```", KIMI.format(arguments='{"a": 1}'), KIMI[:30],
    '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>', "<tool_call>", deepseek("sum", '{"a": 1}'),
    "<｜tool▁call▁begin｜>", "{", "é",
])  # fmt: skip


@given(st.lists(_PIECES, max_size=12).map("".join), st.booleans())
def test_nothing_that_was_said_is_dropped(text, opened):
    """What is not in the tool calls is in reasoning or content, but for white space and the marks of reasoning."""
    said = answer_of(text, opened=opened)
    (before, calls), (after, left) = bare(text), bare(f"{said.reasoning}\n{said.content}")
    assert after == before
    assert calls == left + len(said.tool_calls)
    assert not (said.malformed and said.tool_calls)


def bare(text: str) -> tuple[str, int]:
    """(characters without white space, marks and whole calls, in any order; number of whole calls)."""
    count = 0
    for call in (KIMI.format(arguments='{"a": 1}'), '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>',
                 deepseek("sum", '{"a": 1}')):  # fmt: skip
        count, text = count + text.count(call), text.replace(call, "")
    return "".join(sorted("".join(text.replace("<think>", "").replace("</think>", "").split()))), count

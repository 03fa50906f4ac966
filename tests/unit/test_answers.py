"""app.offline.answers: an answer's text taken apart by the documented rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.offline.answers import Answer, answer_of, ends_in_reasoning

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

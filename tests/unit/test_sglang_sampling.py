"""app.sglang.sampling: what may be sent, and nothing that a server dies of."""

import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.sglang.sampling import ids_problem, sampling_body


def test_every_parameter_is_sent_aloud():
    """No default of a server or of a model's generation_config decides anything."""
    body = sampling_body({"max_new_tokens": 16})
    assert body == {
        "max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop": None, "stop_token_ids": None,
        "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
        "n": 1,
    }  # fmt: skip


def test_the_same_meaning_gives_the_same_value():
    """1 and 1.0, a text and a list of it, null and absent: one recipe."""
    spelled = sampling_body({"max_new_tokens": 4, "temperature": 1, "stop": "x", "top_p": None})
    other = sampling_body({"stop": ["x"], "temperature": 1.0, "max_new_tokens": 4})
    assert orjson.dumps(spelled) == orjson.dumps(other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"max_new_tokens": 2**65},
        {"max_new_tokens": "8"},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -0.1},
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -1.0},
        {"top_k": 5.0},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},  # with top_p beside it, this and the second bias kill a 0.5.23
        {"temperature": 1e308},
        {"logit_bias": {"1": -1e39}},
        {"logit_bias": {"1": 1e308}},
        {"min_new_tokens": 9},
        {"n": 2},
        {"n": True},
        {"ignore_eos": 1},
        {"stop": []},
        {"stop": [""]},
        {"stop": ["\ud800"]},
        {"stop": ["x"] * 33},
        {"stop_token_ids": []},
        {"stop_token_ids": [100]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": ["a"]},
        {"logit_bias": {"100": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": math.nan}},
        {"logit_bias": [1]},
        {"sampling_seed": -1},
        {"sampling_seed": 1.0},
        {"json_schema": "{}", "regex": "a"},
        {"regex": ""},
        {"max_tokens": 5},
        {"frobnicate": 1},
    ],
)
def test_what_a_server_would_refuse_or_die_of_is_refused_here(options):
    """Wrong types, ranges, names and foreign token ids never leave this machine."""
    with pytest.raises(UsageError):
        sampling_body(options if not options or "max_new_tokens" in options else {"max_new_tokens": 8} | options, vocab_size=100)  # noqa: E501


def test_a_wrong_name_gets_the_right_one():
    """`max_tokens` is the name people know from the OpenAI API."""
    with pytest.raises(UsageError, match="did you mean max_new_tokens"):
        sampling_body({"max_tokens": 5})


_TEXTS = st.sampled_from(["", "x", "7", "-1", "²", "\ud800"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=4,
)
_NAMES = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n", "ignore_eos",
          "logit_bias", "min_new_tokens", "sampling_seed", "regex", "frequency_penalty", "x"]  # fmt: skip


@given(st.dictionaries(st.sampled_from(_NAMES), _JSON))
def test_any_json_becomes_a_body_that_serialises_or_a_usage_error(options):
    """Whatever `--sampling` holds: nothing but a UsageError comes of it, and a good body is stable and strict JSON."""
    try:
        body = sampling_body(options, vocab_size=1000)
    except UsageError:
        return
    assert sampling_body(body, vocab_size=1000) == body
    assert b"NaN" not in orjson.dumps(body)
    assert type(body["max_new_tokens"]) is int


@given(st.lists(st.integers(0, 999), max_size=20), st.sampled_from([-1, 1000, 2**65, 1.0, True, None, "1"]), st.integers(0, 20))  # noqa: E501
def test_one_bad_id_anywhere_is_found(good, bad, position):
    """A single id outside the vocabulary kills a server with everything in flight there."""
    assert not ids_problem(good, 1000)
    assert ids_problem([*good[:position], bad, *good[position:]], 1000)

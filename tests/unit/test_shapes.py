"""Rows of every published shape become conversations of one form."""

from pathlib import Path

import pytest

from app.reasons import Reason, Rejected
from app.records import Conversation
from producers.catalog import read_row
from producers.readers import read_records
from producers.shapes import ShapeOptions, conversation_of, turns_in

DATASETS = Path(__file__).parents[1] / "data" / "datasets"
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}


def first_row(name: str):
    return next(read_records(DATASETS / name)).value


def messages_of(value, **options) -> list[dict]:
    return conversation_of(value, ShapeOptions(**options)).messages


def verdict_on(value, **options) -> Rejected:
    with pytest.raises(Rejected) as caught:
        conversation_of(value, ShapeOptions(**options))
    return caught.value


def call(name: str, arguments, **more) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


# --- which field is the prompt


@pytest.mark.parametrize(
    ("name", "roles", "source_id", "begins"),
    [
        ("gsm8k.jsonl", "u", None, "Janet\u2019s ducks"),
        ("mt_bench.jsonl", "uu", 81, "Compose an engaging"),
        ("ifeval.jsonl", "u", 1000, "Write a 300+ word"),
        ("arena_hard.jsonl", "u", "ec71c09662a64365", "please write a python"),
        ("self_instruct.jsonl", "u", "seed_task_0", "Is there anything"),
        ("humaneval.jsonl.gz", "u", "HumanEval/0", "from typing import List\n"),
        ("freshqa.csv", "u", "0", "What is the name of the first animal"),
        ("arith.parquet", "u", None, "7,7:9,4"),
        ("blns.txt", "u", None, "#\tReserved Strings"),
        ("fastchat_dummy.json", "uau", "identity_0", "Who are you?"),
        ("bfcl_live_simple.json", "u", "live_simple_0-0-0", "Can you retrieve"),
        ("bfcl_multi_turn.json", "uuuu", "multi_turn_base_0", "Move 'final_report.pdf'"),
        ("reason_tool_use.jsonl", "su", None, "You are a methodical"),
        ("glaive_toolcall.json", "uauatau", None, "Hi, I have some ingredients"),
    ],
)  # fmt: skip
def test_published_shapes_are_recognised(name, roles, source_id, begins):
    """The first row of each file: roles in order, own id as it was read, and where its text begins."""
    conversation = conversation_of(first_row(name))
    found = "".join(message["role"][0] for message in conversation.messages)
    assert found == roles
    assert (conversation.source_id, type(conversation.source_id)) == (source_id, type(source_id))
    assert conversation.messages[0]["content"].startswith(begins)
    assert all(isinstance(message["content"], str) for message in conversation.messages)


@pytest.mark.parametrize(
    "value",
    [
        "x", {"prompt": "x"}, {"prompt": [USER]}, {"messages": [USER]}, {"messages": '[{"role":"user","content":"x"}]'},
        {"conversations": [{"from": "human", "value": "x"}]}, {"conversation": [USER]}, [USER], {"instruction": "x"},
        {"instruction": "x", "input": ""}, {"instruction": "x", "instances": [{"input": "", "output": "z"}]},
        {"question": "x"}, {"question": [[USER]]}, {"turns": ["x"]}, {"text": "x"}, {"input": "x", "output": "z"},
        {"messages": None, "prompt": "", "question": "x"}, {"messages": [USER, ANSWER, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "value": "x"}], "tool_calls": None, "name": None}]},
        {"messages": [{"content": "x", "role": "user", "weight": 1, "id": 5}]},
    ],
)  # fmt: skip
def test_one_prompt_is_one_conversation_in_every_shape(value):
    """However a row says it, the same single message comes out, and nothing that we don't know."""
    assert conversation_of(value) == Conversation([USER])


def test_instruction_and_input_are_one_text():
    """Alpaca's input, or the input of the first instance, below the instruction; its history before it."""
    assert messages_of({"instruction": "do", "input": "it", "output": "z"}) == [{"role": "user", "content": "do\n\nit"}]
    assert messages_of({"instruction": "do", "instances": [{"input": "it"}]})[0]["content"] == "do\n\nit"
    row = {"instruction": "x", "history": [["q", "a"]], "system": "be brief"}
    assert [m["content"] for m in messages_of(row)] == ["be brief", "q", "a", "x"]


@pytest.mark.parametrize("name", ["kv_retrieval.jsonl.gz", "tau2_airline.json"])
def test_an_unknown_shape_names_its_fields_and_the_way_out(name):
    """The sentence is enough to find the right --prompt-field."""
    row = first_row(name)
    verdict = verdict_on(row)
    assert verdict.reason == Reason.UNKNOWN_SHAPE
    assert all(field in verdict.detail for field in [*row, "--prompt-field"])


def test_a_named_field_goes_before_all_others():
    """Dotted paths reach into objects and lists; a path that leads nowhere rejects the row."""
    path = "user_scenario.instructions.reason_for_call"
    assert messages_of(first_row("tau2_airline.json"), prompt_field=path)[0]["content"].startswith("You want to cancel")
    row = {"prompt": "no", "a": {"b": [{"c": "x"}]}, "a.d": "x", "chat": [USER]}
    for options in ({"prompt_field": "a.b.0.c"}, {"prompt_field": "a.d"}, {"messages_field": "chat"}):
        assert messages_of(row, **options) == [USER]
    for path in ("a.b.1.c", "a.b.x", "prompt.x", "a.b"):
        assert verdict_on(row, prompt_field=path).reason == Reason.UNKNOWN_SHAPE
    assert verdict_on(row, prompt_field="a").detail == "a is an object, not a text or a list of messages"


@pytest.mark.parametrize(
    "value",
    [5, None, True, {}, {"prompt": 5}, {"prompt": {"a": 1}}, {"messages": [5]}, {"messages": [{"content": "x"}]}],
)
def test_what_is_no_text_and_no_chat_is_an_unknown_shape(value):
    """Nothing is turned into text by Python's own idea of it."""
    assert verdict_on(value).reason == Reason.UNKNOWN_SHAPE


@pytest.mark.parametrize(
    "value",
    [
        "", " \n", [], {"prompt": ""}, {"prompt": None}, {"messages": []}, {"turns": []}, {"messages": [ANSWER]},
        {"messages": [{"role": "system", "content": "x"}]}, {"messages": [{"role": "user", "content": None}]},
        {"messages": [USER, ANSWER, {"role": "user", "content": " "}]},
        {"conversations": [{"from": "gpt", "value": "x"}]},
    ],
)  # fmt: skip
def test_nothing_to_answer_is_an_empty_prompt(value):
    """No message, none but the system's, none before the answer, or no text in the last one."""
    assert verdict_on(value).reason == Reason.EMPTY_PROMPT


# --- ids


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": 7}, 7), ({"id": "7"}, "7"), ({"id": 1.0}, 1.0), ({"id": 0}, 0), ({"id": None, "uid": "u"}, "u"),
        ({"id": "", "question_id": 3}, 3), ({"id": True}, None), ({"id": [1]}, None), ({}, None), ({"key": 1000}, 1000),
    ],
)  # fmt: skip
def test_the_own_id_is_the_first_text_or_number(row, expected):
    """null, "" and what is no id are none; the type is kept."""
    found = conversation_of({"prompt": "x", **row}).source_id
    assert (found, type(found)) == (expected, type(expected))


def test_a_named_id_goes_before_all_others():
    """--id-field is a path too; where it leads to nothing the row has no own id."""
    row = {"prompt": "x", "id": 1, "meta": {"id": "m"}}
    assert conversation_of(row, ShapeOptions(id_field="meta.id")).source_id == "m"
    assert conversation_of(row, ShapeOptions(id_field="meta.no")).source_id is None


# --- roles, system, turns


def test_answers_at_the_end_are_made_again():
    """They are no part of the prompt, whatever is in them; earlier ones are history."""
    broken = {"role": "assistant", "content": None, "tool_calls": [call("f", "{torn")]}
    assert messages_of({"messages": [USER, ANSWER, USER, ANSWER, broken]}) == [USER, ANSWER, USER]


def test_prefill_keeps_a_last_answer_that_is_text():
    """It is to be continued; a last tool call is made again."""
    assert messages_of({"messages": [USER, ANSWER]}, prefill=True) == [USER, ANSWER]
    assert messages_of({"messages": [USER, {**ANSWER, "tool_calls": [call("f", {})]}]}, prefill=True) == [USER]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}]},
         "messages[0] has a part of type 'text' whose text is a list; only text can be sent"),
        ({"turns": ["x", None]}, "turns[1] is null, not a text or a list of messages"),
        ({"turns": ["x", ["y", 5]]}, "turns[1][1] is a number, not a text or a list of messages"),
        ({"messages": "[" * 1500 + "]" * 1500},
         "its chat is a string, and that is nested too deeply (more than 1,024 levels)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rejection_names_what_is_wrong_and_where(row, says):
    """The value at fault by its place, not the whole field."""
    assert verdict_on(row).detail == says


def test_roles_we_do_not_know_are_kept():
    """Whether the template has them is seen when it is rendered."""
    chat = [{"role": "developer", "content": "d"}, {"role": "critic", "content": "c"}, USER]
    assert messages_of({"messages": chat}) == chat


def test_system_text_opens_a_chat_without_one():
    """The row's own system message wins over its system field, and that one over --system."""
    own = {"role": "system", "content": "own"}
    assert messages_of({"messages": [own, USER], "system": "field"}, system="option") == [own, USER]
    assert messages_of({"messages": [USER], "system": "field"}, system="option")[0]["content"] == "field"
    assert messages_of("x", system="option") == [{"role": "system", "content": "option"}, USER]


def test_turns_last_keeps_the_history_as_given():
    """One generation, at the end; turns without answers between them stay as they are."""
    options = ShapeOptions()
    conversation = conversation_of(first_row("mt_bench.jsonl"), options)
    assert [message["role"] for message in conversation.messages] == ["user", "user"]
    assert turns_in(conversation, options) == 1


def test_turns_all_answers_every_user_message():
    """Given answers are dropped, but for the calls that tool results belong to; these are to be answered, too."""
    options = ShapeOptions(turns="all")
    chat = [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]
    conversation = conversation_of({"messages": chat}, options)
    assert conversation.messages == [chat[0], USER, USER]
    assert turns_in(conversation, options) == 2
    with_tools = [USER, {**ANSWER, "tool_calls": [call("f", {})]}, {"role": "tool", "content": "1"}, ANSWER, USER]
    conversation = conversation_of({"messages": with_tools}, options)
    assert [(one["role"], one["content"]) for one in conversation.messages[1:3]] == [("assistant", ""), ("tool", "1")]
    assert turns_in(conversation, options) == 3
    assert turns_in(conversation_of(first_row("glaive_toolcall.json"), options), options) == 4


def test_turns_all_refuses_a_chat_in_which_nobody_asks():
    """Tool results alone, or a question without a word."""
    for chat in ([{"role": "tool", "content": "1"}], [USER, ANSWER, {"role": "user", "content": " "}, ANSWER, USER]):
        assert verdict_on({"messages": chat}, turns="all").reason == Reason.EMPTY_PROMPT


# --- content


def test_no_text_is_empty_text_and_never_none():
    """null and missing content are both ""."""
    calls = [call("f", {"a": 1}, id="1")]
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        chat = [USER, {"role": "assistant", **content, "tool_calls": calls}, {"role": "tool", **content}]
        assert [message["content"] for message in messages_of({"messages": chat})] == ["x", "", ""]


def test_parts_are_pieces_of_one_text():
    """text parts are joined; reasoning and tool_call parts go where they belong."""
    parts = [
        {"type": "reasoning", "value": "hm"}, {"type": "text", "value": "a"}, {"type": "text", "text": "b"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"k": 1}}'},
    ]  # fmt: skip
    message = messages_of({"messages": [USER, {"role": "assistant", "content": parts}, USER]})[1]
    assert message == {
        "role": "assistant", "content": "ab", "reasoning_content": "hm",
        "tool_calls": [call("f", {"k": 1}, id="functions.f:0")],
    }  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [5, {"a": 1}, True, [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], [{"text": "x"}], [5]],
)
def test_what_is_no_text_rejects_the_row_and_names_the_message(content):
    """Images, numbers and objects are never turned into text."""
    verdict = verdict_on({"messages": [USER, ANSWER, {"role": "user", "content": content}]})
    assert verdict.reason == Reason.UNSUPPORTED_CONTENT
    assert "messages[2]" in verdict.detail


@pytest.mark.parametrize("value", ["\ud800", {"prompt": "x\udfff"}, {"prompt": "x", "id": "\ud800"}])
def test_half_a_surrogate_pair_is_no_unicode(value):
    """No UTF-8 can hold it, so no file and no server could."""
    assert verdict_on(value).reason == Reason.INVALID_UNICODE


# --- tools


def test_arguments_are_the_same_as_text_and_as_object():
    """A JSON string and a dict give the same conversation; broken JSON names the message."""
    chats = [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", given, id="1")]}, USER]}
        for given in ({"a": [1]}, '{"a": [1]}', "[1", "5")
    ]
    assert conversation_of(chats[0]) == conversation_of(chats[1])
    for chat in chats[2:]:
        verdict = verdict_on(chat)
        assert verdict.reason == Reason.BAD_TOOL_CALL
        assert "messages[1].tool_calls" in verdict.detail
    verdict = verdict_on(first_row("specforge_tool_use.jsonl"))
    assert (verdict.reason, "messages[4]" in verdict.detail) == (Reason.BAD_TOOL_CALL, True)


def test_function_call_and_observation_become_linked_messages():
    """The call gets an id counted over the chat, the result the id of its call."""
    row = first_row("glaive_toolcall.json")
    made = messages_of(row)[3:5]
    assert made[0]["tool_calls"][0]["id"] == made[1]["tool_call_id"] == "functions.search_recipes:0"
    assert made[0]["tool_calls"][0]["function"]["arguments"] == {"ingredients": ["chicken", "bell peppers", "rice"]}
    two = {"from": "function_call", "value": '[{"name": "f", "arguments": "{}"}, {"name": "g"}]'}
    result = {"from": "observation", "value": "r"}
    chat = messages_of({"conversations": [{"from": "human", "value": "x"}, two, result, result, two, result]})
    assert [message.get("tool_call_id") for message in chat[2:]] == [
        "functions.f:0", "functions.g:1", None, "functions.f:2",
    ]  # fmt: skip


def test_results_with_ids_keep_them():
    """Answers out of order stay with their calls."""
    chat = [
        USER, {"role": "assistant", "tool_calls": [call("f", {}, id="a"), call("g", {}, id="b")]},
        {"role": "tool", "content": "", "tool_call_id": "b"}, {"role": "tool", "content": ""},
    ]  # fmt: skip
    assert [message.get("tool_call_id") for message in messages_of({"messages": chat})[2:]] == ["b", "a"]


@pytest.mark.parametrize("field", ["tools", "functions", "function"])
def test_tools_are_wrapped_and_kept_as_given(field):
    """Bare functions get OpenAI's wrapper; parameters are not touched."""
    bare = {"name": "f", "parameters": {"type": "dict"}}
    wrapped = {"type": "function", "function": bare}
    assert conversation_of({"prompt": "x", field: [bare]}).tools == [wrapped]
    assert conversation_of({"prompt": "x", field: [wrapped]}).tools == [wrapped]
    assert conversation_of(first_row("bfcl_live_simple.json")).tools[0]["function"]["parameters"]["type"] == "dict"


def test_tools_may_be_a_json_string():
    """As tables hold them; "" and "[]" are none, and broken JSON rejects the row."""
    assert conversation_of({"prompt": "x", "tools": '[{"name": "f"}]'}).tools[0]["function"] == {"name": "f"}
    assert conversation_of({"prompt": "x", "t": {"u": [{"name": "f"}]}}, ShapeOptions(tools_field="t.u")).tools
    for none in ("", "[]", [], None):
        assert conversation_of({"prompt": "x", "tools": none}).tools is None
    for bad in ("[{", '"f"', ["f"], [{"description": "no name"}], [5]):
        assert verdict_on({"prompt": "x", "tools": bad}).reason == Reason.BAD_TOOL_CALL
    assert conversation_of({"prompt": "x", "function": "def f(): pass"}).tools is None


def test_a_row_nested_too_deeply_is_rejected_and_the_others_go_on(tmp_path):
    """A schema of 450 levels is a row's fault, and ends nothing else."""
    deep = '{"a":' * 450 + "{}" + "}" * 450
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}'
    path = tmp_path / "d.jsonl"
    chat = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    path.write_text('{"prompt":"one"}\n' + chat + "\n")
    first, second = (read_row(raw, ShapeOptions())[1] for raw in read_records(path))
    assert not isinstance(first, Rejected)
    assert isinstance(second, Rejected)
    assert "nested too deeply" in second.detail

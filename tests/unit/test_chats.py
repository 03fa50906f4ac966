"""app.chats: what the data asks, what the model said, and what follows."""

import orjson
import pytest

from app.chats import all_said, history_of, parts_of, replay, spoken_ids, start_of, steps_of
from app.packing import pack_task, unpack_task
from app.records import Conversation, Task, line_of
from tests.run_on_disk import a_row, response


def user(text: str = "q") -> dict:
    return {"role": "user", "content": text}


def called(*names: str, ids: str = "m") -> dict:
    """An answer that calls."""
    calls = [{"id": f"{ids}{n}", "type": "function", "function": {"name": name, "arguments": {}}}
             for n, name in enumerate(names)]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str, call: str) -> dict:
    return {"role": "tool", "content": text, "tool_call_id": call}


SYSTEM = {"role": "system", "content": "s"}
SAID = {"role": "assistant", "content": "a"}


def test_an_answer_is_due_after_each_user_message_and_after_the_last_of_some_results():
    """What stands at the end and asks nothing is left out."""
    given = [SYSTEM, user(), user(), called("f", "g"), result("1", "m0"), result("2", "m1"), user(), SYSTEM]
    assert [len(step) for step in steps_of(given)] == [2, 1, 3, 1]


def test_a_chat_goes_on_with_what_the_model_said():
    """Its own answers stand between the messages of the data; then it is complete."""
    given = [SYSTEM, user("1"), user("2")]
    assert replay(given, []).messages == [SYSTEM, user("1")]
    so_far = replay(given, [SAID])
    assert (so_far.messages, so_far.ended) == ([SYSTEM, user("1"), SAID, user("2")], "")
    assert replay(given, [SAID, SAID]).ended == "complete"


def test_results_go_to_the_calls_that_the_model_made_under_its_own_ids():
    """By place, whatever the order in which the data lists the results."""
    given = [user(), called("f", "g", ids="d"), result("of g", "d1"), result("of f", "d0")]
    so_far = replay(given, [called("f", "g")])
    assert so_far.messages[2:] == [result("of g", "m1"), result("of f", "m0")]
    assert so_far.ended == ""


def test_results_without_the_datas_own_calls_go_by_their_order():
    """Nobody says whose they are."""
    given = [user(), result("1", "x"), {"role": "tool", "content": "2"}]
    assert replay(given, [called("f", "g")]).messages[2:] == [result("1", "m0"), result("2", "m1")]


def test_results_that_no_call_asked_for_are_passed_over():
    """The model answered by itself: the next message of the user follows."""
    given = [user("1"), called("f", ids="d"), result("r", "d0"), user("2")]
    so_far = replay(given, [SAID])
    assert (so_far.messages, so_far.passed_over) == ([user("1"), SAID, user("2")], 1)
    assert replay(given[:3], [SAID]).ended == "complete"


@pytest.mark.parametrize("answer", [called("other"), called("f", "f")], ids=["another function", "more calls"])
def test_calls_that_the_data_has_no_results_for_end_the_chat(answer):
    """Nothing true could follow; the same before a message of the user."""
    given = [user(), called("f", ids="d"), result("r", "d0"), user()]
    assert replay(given, [answer]).ended == "unanswered_calls"
    assert replay([user(), user()], [answer]).ended == "unanswered_calls"
    assert replay([user()], [answer]).ended == "complete"


def test_the_stop_token_is_no_part_of_what_was_said():
    """Nor is a last id that only looks like one."""
    assert spoken_ids(response(output_ids=[8, 2], matched="2")) == [8]
    assert spoken_ids(response(output_ids=[8, 2], matched="", finish_reason="length")) == [8, 2]
    assert spoken_ids(response(output_ids=[8, 2], matched="done")) == [8, 2]


def test_calls_are_numbered_through_the_chat():
    """Those without an id of their own."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = all_said([response(), response(turn=1)], lambda ids: call if 8 in ids else "")
    assert [one.message["tool_calls"][0]["id"] for one in found] == ["functions.f:0", "functions.f:1"]


def test_how_a_prompt_repeats_the_turn_before_it_is_told():
    """The same ids; the same text in others; another text."""
    letters = {1: "a", 2: "b", 12: "ab", 3: "c"}
    before = response(prompt_token_ids=[3], output_ids=[1, 2], matched="")

    def decode(ids):
        return "".join(letters[one] for one in ids)

    assert history_of(before, [3, 1, 2, 3], decode) == {"history": "same"}
    assert history_of(before, [3, 12, 3], decode) == {"history": "retokenized", "differs_at": 1}
    assert history_of(before, [3, 1, 3], decode) == {"history": "rewritten", "differs_at": 2}
    assert history_of(before, [3, 1], decode) == {"history": "rewritten", "differs_at": 2}


def test_a_chat_travels_with_its_task_and_grows_by_a_line_a_turn():
    """Whatever is in a text: line ends of any kind, and what looks like one."""
    given = Conversation([user("a\r\n\u2028\u0085\x0b")], [{"name": "f"}])
    chat = start_of(given, 77) + line_of(response(text="x\r\n\x1cy")) + line_of(response(turn=1))
    task = Task(
        key="k", dataset="d", row_id=a_row(1), source_id="", row_number=1, turn=2, turns=3, completion_index=0,
        max_new_tokens=5, prompt_token_ids=[], chat=chat,
    )  # fmt: skip
    assert unpack_task(pack_task(task)) == task
    made = [response(text="x\r\n\x1cy"), response(turn=1)]
    assert parts_of(task.chat) == (given, 77, made)
    assert orjson.loads(chat.splitlines()[0])["max_new_tokens"] == 77

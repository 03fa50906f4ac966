"""Input data: what a row is, what it says, and who it is."""

import gzip
import json

import pytest

from app.errors import UsageError
from app.identity import row_digest
from app.reasons import Reason, Rejected
from app.tokenization import Renderer
from producers.inputs import parse_inputs
from producers.readers import read_records
from producers.shapes import ShapeOptions, conversation_of
from tests.belt import ROOT
from tests.tokenizers import renderer_of

USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
STRICT = ROOT / "tests" / "data" / "tokenizers" / "strict"


@pytest.fixture(scope="module")
def demo(demo_tokenizer) -> Renderer:
    return renderer_of(demo_tokenizer)


@pytest.fixture(scope="module")
def strict() -> Renderer:
    """A template that wants user and assistant in turn, and joins arguments as text."""
    return renderer_of(STRICT)


def outcome(value, renderer: Renderer, **options) -> str:
    """ "run", or the reason of the rejection."""
    try:
        renderer.render(conversation_of(value, ShapeOptions(**options)))
    except Rejected as verdict:
        return str(verdict.reason)
    return "run"


def with_call(arguments, **message) -> dict:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call], **message}, USER]}


def test_c01_line_separators_inside_a_record_do_not_split_it(tmp_path, demo):
    """U+2028, U+2029 and U+0085 are text: one row, unchanged to the ids and back."""
    text = "a\u2028b\u0085c\u2029d"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", "utf-8")
    rows = list(read_records(tmp_path / "rows.jsonl"))
    assert len(rows) == 1
    assert text in demo.decode(demo.render(conversation_of(rows[0].value)))


def test_c03_bom_crlf_and_blank_lines_cost_nothing_and_bad_lines_are_told_with_their_number(tmp_path):
    """Six physical lines: three rows run, two are rejected with file and line, the blank one only counts."""
    (tmp_path / "rows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "one"}\n{"prompt": "two"}\r\n\n[]\n{"id":\n{"prompt": "six"}'
    )
    rows = list(read_records(tmp_path / "rows.jsonl"))
    assert [row.number for row in rows] == [1, 2, 4, 5, 6]
    said = {}
    for row in rows:
        try:
            if row.error is not None:
                raise row.error
            said[row.number] = conversation_of(row.value).messages[0]["content"]
        except Rejected as verdict:
            said[row.number] = verdict
    assert [said[number] for number in (1, 2, 6)] == ["one", "two", "six"]
    assert said[4].reason == Reason.EMPTY_PROMPT
    assert said[5].reason == Reason.UNREADABLE
    assert "rows.jsonl" in said[5].detail
    assert "line 5" in said[5].detail


def test_c03_an_empty_file_is_one_sentence_and_a_gzip_file_needs_no_name(tmp_path):
    """No bytes: an error before anything starts. gzip under .jsonl: read."""
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(UsageError, match=r"empty\.jsonl is empty\."):
        parse_inputs([str(tmp_path / "empty.jsonl")])
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
    assert [row.value for row in read_records(tmp_path / "packed.jsonl")] == [{"prompt": "x"}]


def test_c04_ids_tell_rows_apart_only_together_with_what_the_rows_say():
    """One id with two texts: two rows. `1`, `"1"` and `1.0`: three. null, "" and none: the same row again."""
    digests = [row_digest(conversation_of(row)) for row in (
        {"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}, {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "a"},
        {"id": 1.0, "prompt": "a"}, {"prompt": "a"},
    )]  # fmt: skip
    assert len(set(digests)) == len(digests)
    without = {row_digest(conversation_of({"prompt": "a", **own})) for own in ({}, {"id": None}, {"id": ""})}
    assert without == {digests[-1]}


def test_c04_a_record_with_one_key_twice_is_rejected_not_guessed(tmp_path):
    """`{"id": 1, "id": 2}` means whatever a parser likes."""
    (tmp_path / "rows.jsonl").write_bytes(b'{"id": 1, "prompt": "x"}\n{"id": 1, "id": 2, "prompt": "x"}\n')
    good, bad = read_records(tmp_path / "rows.jsonl")
    assert good.error is None
    assert bad.error.reason == Reason.UNREADABLE


@pytest.mark.parametrize(
    ("messages", "lenient", "strict_one"),
    [
        ([], "empty_prompt", "empty_prompt"),
        ([{"role": "system", "content": "s"}], "empty_prompt", "empty_prompt"),
        ([ANSWER, USER], "run", "template_error"),
        ([USER, USER], "run", "template_error"),
        ([USER, ANSWER], "run", "run"),
        ([{"role": "developer", "content": "d"}, USER], "run", "template_error"),
    ],
)
def test_c07_every_order_of_roles_has_one_documented_result(messages, lenient, strict_one, demo, strict):
    """Run, or rejected with a reason: the template decides what it takes, and the next row is rendered."""
    assert outcome({"messages": messages}, demo) == lenient
    assert outcome({"messages": messages}, strict) == strict_one
    assert outcome({"messages": [USER]}, strict) == "run"


def test_c07_an_answer_at_the_end_is_made_again_or_continued(demo):
    """Without --prefill the prompt ends before it; with it, in its very text: no end of turn behind the prefix."""
    row = {"messages": [USER, {"role": "assistant", "content": "The answer is"}]}
    again = demo.text(conversation_of(row))
    assert "The answer" not in again
    prefilled = demo.text(conversation_of(row, ShapeOptions(prefill=True)))
    assert prefilled.endswith("<think></think>The answer is")


def test_c08_arguments_give_the_same_ids_as_text_and_as_object(demo, strict):
    """For a template that dumps objects and for one that joins texts."""
    for renderer in (demo, strict):
        as_object, as_text = (conversation_of(with_call(given)) for given in ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'))
        assert as_object == as_text
        assert '"a": [1, "ü"]' in renderer.text(as_object)


def test_c08_broken_arguments_reject_the_row_and_name_the_message():
    """Not the file, and not the run."""
    with pytest.raises(Rejected) as caught:
        conversation_of(with_call('{"a": '))
    assert caught.value.reason == Reason.BAD_TOOL_CALL
    assert "messages[1]" in caught.value.detail


def test_c08_no_content_is_never_the_word_none(demo, strict):
    """null, missing and "" render alike."""
    texts = set()
    for content in ({"content": None}, {}, {"content": ""}):
        texts.add(demo.text(conversation_of(with_call({}, **content))))
        assert "None" not in strict.text(conversation_of(with_call({}, **content)))
    assert len(texts) == 1
    assert "None" not in texts.pop()


def test_c58_c59_a_row_is_done_by_what_it_says_never_by_where_it_stands():
    """The identity knows no position: equal rows, equal ids, in any order; an edited text is another row."""
    one, edited = ({"id": "a", "prompt": text} for text in ("x", "x!"))
    assert row_digest(conversation_of(one)) != row_digest(conversation_of(edited))
    assert row_digest(conversation_of({"prompt": "x", "id": "a"})) == row_digest(conversation_of(one))



"""Who a row is, from its value on."""

from app.identity import canonical_json, fingerprint, row_digest, row_id, task_key
from producers.shapes import conversation_of


def digest(value) -> str:
    return row_digest(conversation_of(value))


def test_the_digest_is_the_same_in_every_release():
    """Rows of a run that is resumed after an upgrade must be found again."""
    assert digest({"id": 7, "prompt": "x"}) == "f31b414e61bc16c30467d4af"
    assert task_key("r", "d", "i", 0, 0) == "626fb03f86bc19ebf70d87f29bf4ab5b"


def test_own_ids_of_different_types_are_different_rows():
    """`1`, `"1"` and `1.0` must not take each other's place; null and "" are no id."""
    rows = [digest({"id": own, "prompt": "x"}) for own in (1, "1", 1.0, None)]
    assert len(set(rows)) == 4
    assert digest({"id": "", "prompt": "x"}) == digest({"prompt": "x"}) == rows[3]


def test_one_id_with_two_contents_is_two_rows():
    """Neither takes the other's answer."""
    assert digest({"id": 7, "prompt": "x"}) != digest({"id": 7, "prompt": "y"})
    assert digest({"id": 7, "prompt": "x"}) != digest({"id": 7, "prompt": "x", "tools": [{"name": "f"}]})


def test_fields_that_no_model_sees_are_no_part_of_it():
    """Answers, scores and labels may be edited without a row becoming another."""
    assert digest({"question": "x", "answer": "1"}) == digest({"question": "x", "answer": "2", "score": 0.5})


def test_equal_rows_are_told_apart_by_their_occurrence():
    """The first has no suffix."""
    assert [row_id("d", n) for n in (1, 2, 3)] == ["d", "d-2", "d-3"]


def test_canonical_json_and_fingerprints_do_not_depend_on_key_order():
    """Keys are sorted at every level."""
    assert canonical_json({"b": [{"d": 1, "c": 2}], "a": 0}) == b'{"a":0,"b":[{"c":2,"d":1}]}'
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 2, "b": 1})

"""Reading formats where a line is a row: JSON Lines and plain text."""

from pathlib import Path

import pytest

from app.errors import UsageError
from app.reasons import Reason
from producers.readers import RawRow, read_records

DATASETS = Path(__file__).parents[1] / "data" / "datasets"


def rows_of(path: Path, data: bytes, **options) -> list[RawRow]:
    path.write_bytes(data)
    return list(read_records(path, **options))


def verdicts(rows: list[RawRow]) -> dict[int, Reason]:
    return {row.number: row.error.reason for row in rows if row.error}


def test_lines_end_at_the_newline_byte_and_nowhere_else(tmp_path):
    """U+2028, U+2029, U+0085 and a form feed inside a record are text."""
    text = "a\u2028b\u0085c\u2029d\x0be"
    line = b'{"prompt": "a\xe2\x80\xa8b\xc2\x85c\xe2\x80\xa9d\\u000be"}\n'
    rows = rows_of(tmp_path / "a.jsonl", line + b'{"prompt": "z"}\n')
    assert [row.value["prompt"] for row in rows] == [text, "z"]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_cost_nothing(tmp_path):
    """Numbers are physical lines, blank ones counted; bad lines are rejected and the rest runs."""
    data = b'\xef\xbb\xbf{"prompt": "1"}\n{"prompt": "2"}\r\n\n[]\n{"id":\n{"prompt": "6"}'
    rows = rows_of(tmp_path / "a.jsonl", data)
    assert [row.number for row in rows] == [1, 2, 4, 5, 6]
    assert [row.value for row in rows if row.number != 5] == [{"prompt": "1"}, {"prompt": "2"}, [], {"prompt": "6"}]
    assert verdicts(rows) == {5: Reason.UNREADABLE}
    assert rows[3].error.detail.startswith("a.jsonl: line 5: not valid JSON")
    assert rows[3].raw == b'{"id":'


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b'{"prompt": NaN}', Reason.UNREADABLE, "not valid JSON"),
        (b'{"prompt": Infinity}', Reason.UNREADABLE, "not valid JSON"),
        (b'{"prompt": "x"} trailing', Reason.UNREADABLE, "not valid JSON"),
        (b'{"prompt": "caf\xe9"}', Reason.UNREADABLE, "byte 16 is not UTF-8"),
        (b'{"prompt": "\\ud800"}', Reason.INVALID_UNICODE, "surrogate"),
        (b'{"prompt": "x", "\\udfff": 1}', Reason.INVALID_UNICODE, "surrogate"),
        (b"\0" * 4096, Reason.UNREADABLE, "4096 NUL bytes"),
        (b'{"id": 1, "prompt": "x", "id": 2}', Reason.UNREADABLE, "'id' stands twice"),
        (b'{"m": [{"a": {"k": 1, "k": 1}}]}', Reason.UNREADABLE, "'k' stands twice"),
        (b'{"a": 1, "a": "x\\u0022\\u0022"}', Reason.UNREADABLE, "'a' stands twice"),
        (b"[" * 3000 + b"]" * 3000, Reason.UNREADABLE, "nested too deeply"),
    ],
)
def test_a_line_that_is_not_strict_json_is_rejected_with_its_place(tmp_path, line, reason, says):
    """NaN, lone surrogates, keys twice, torn writes: one rejected row each, and the neighbours run."""
    rows = rows_of(tmp_path / "a.jsonl", b'{"prompt": "1"}\n' + line + b'\n{"prompt": "3"}\n')
    assert [row.value for row in rows] == [{"prompt": "1"}, None, {"prompt": "3"}]
    assert verdicts(rows) == {2: reason}
    assert "a.jsonl: line 2: " in rows[1].error.detail
    assert says in rows[1].error.detail
    assert rows[1].raw == line


@pytest.mark.parametrize("line", [b'{"a": "\\u0022", "b": "\\""}', b'{"a": {"k": 1}, "b": {"k": 1}}', b'{"": ""}'])
def test_a_quote_in_a_text_is_no_key_twice(tmp_path, line):
    """The check for repeated keys counts quotes; escaped ones and equal keys of different objects are fine."""
    assert verdicts(rows_of(tmp_path / "a.jsonl", line + b"\n")) == {}


def test_deep_nesting_that_the_parser_takes_is_no_fault(tmp_path):
    """The check for repeated keys must not refuse what it cannot write back."""
    assert verdicts(rows_of(tmp_path / "a.jsonl", b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}\n")) == {}


def test_a_bad_first_line_does_not_change_the_format(tmp_path):
    """The format is what most of the first lines are."""
    rows = rows_of(tmp_path / "a.jsonl", b'mpt": "torn"}\n{"prompt": "2"}\n{"prompt": "3"}\n')
    assert verdicts(rows) == {1: Reason.UNREADABLE}
    rows = rows_of(tmp_path / "a.jsonl", b'{"prompt": "torn\n{"prompt": "2"}\n')
    assert verdicts(rows) == {1: Reason.UNREADABLE}
    assert rows[1].value == {"prompt": "2"}


def test_a_bom_in_the_middle_is_dropped(tmp_path):
    """Files with a BOM, put behind one another with cat, are still JSON Lines."""
    assert verdicts(rows_of(tmp_path / "a.jsonl", b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n')) == {}


@pytest.mark.parametrize("size", [99, 100, 101, 3_000_000])
def test_a_row_beyond_the_limit_is_rejected_and_not_held(tmp_path, size):
    """Its raw stands for it: short, and different for different rows."""
    line = b'{"a": "%s"}' % (b"x" * (size - 9))
    data = b'{"a": 1}\n' + line + b"\n" + line.replace(b"x", b"y") + b'\n{"a": 2}\n'
    rows = rows_of(tmp_path / "a.jsonl", data, max_row_bytes=100)
    assert verdicts(rows) == ({} if size <= 100 else {2: Reason.TOO_LARGE, 3: Reason.TOO_LARGE})
    assert [rows[0].value, rows[3].value] == [{"a": 1}, {"a": 2}]
    assert max(len(row.raw) for row in rows) < 400
    assert rows[1].raw != rows[2].raw


def test_rows_come_out_whole_whatever_the_chunks(tmp_path):
    """Rows longer and shorter than the reader's chunk, and a newline at its very edge."""
    texts = ["x" * (1024 * 1024 - 16), "short", "y" * 2_500_000, "", "end"]
    data = b"".join(b'{"prompt": "%s"}\n' % text.encode() for text in texts)
    rows = rows_of(tmp_path / "a.jsonl", data)
    assert [row.value["prompt"] for row in rows] == texts
    assert [row.number for row in rows] == [1, 2, 3, 4, 5]


def test_text_has_no_comments_and_blank_lines_count(tmp_path):
    """A line is a prompt as it stands; `#` begins no comment; a blank line is no row but has its number."""
    rows = rows_of(tmp_path / "a.txt", b"# a heading\r\n\n  indented, with comma \n\t\nlast")
    assert [(row.number, row.value) for row in rows] == [
        (1, "# a heading"), (3, "  indented, with comma "), (5, "last"),
    ]  # fmt: skip


def test_text_that_is_not_utf8_or_holds_nul_is_rejected_by_line(tmp_path):
    """A torn write in a text file costs its line."""
    rows = rows_of(tmp_path / "a.txt", b"one\n\0\0\0\nthree\n")
    assert verdicts(rows) == {2: Reason.UNREADABLE}
    assert verdicts(rows_of(tmp_path / "a.txt", b"one\ncaf\xe9\nthree\n")) == {2: Reason.UNREADABLE}


def test_the_naughty_strings_as_text():
    """Real file: comment-looking lines are rows, blank ones only counted."""
    rows = list(read_records(DATASETS / "blns.txt"))
    assert rows[0].value == "#\tReserved Strings"
    lines = (DATASETS / "blns.txt").read_bytes().split(b"\n")
    assert [row.number for row in rows] == [n for n, line in enumerate(lines, 1) if line.strip()]


@pytest.mark.parametrize("data", [b"", b"\n\n  \r\n", b"\xef\xbb\xbf", b"[]", b" [ ]\n", b"id,prompt\n"])
def test_a_file_without_a_row_is_an_error(tmp_path, data):
    """Zero rows are never what was meant."""
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(UsageError, match=r"a\.jsonl (is empty|has no rows)"):
        list(read_records(tmp_path / "a.jsonl"))


def test_what_is_no_file_is_an_error_at_once(tmp_path):
    """Before any row is asked for, with the path in the sentence."""
    with pytest.raises(UsageError, match="No such file"):
        read_records(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="is not a file"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"BZh91AY&SY", "bzip2"), (b"\xfd7zXZ\0\0", "xz"), (b"PK\x03\x04\x14\0", "zip"),
        ("{}".encode("utf-16"), "UTF-16"), (b"\x89PNG\r\n\x1a\n\0\0\0\xff", "neither UTF-8 text nor"),
    ],
)  # fmt: skip
def test_a_foreign_format_is_named(tmp_path, data, says):
    """A file that we can't read says what it is."""
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_records(tmp_path / "a.jsonl")

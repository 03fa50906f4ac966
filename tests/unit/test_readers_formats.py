"""Reading arrays, pretty-printed objects, CSV, Parquet and compressed files, told by their bytes."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from app.errors import UsageError
from app.reasons import Reason
from producers import readers
from producers.readers import RawRow, expected_rows, read_records

LINES = "a line of a long cell\n" * 7
DATASETS = Path(__file__).parents[1] / "data" / "datasets"


def rows_of(path: Path, data: bytes, **options) -> list[RawRow]:
    path.write_bytes(data)
    return list(read_records(path, **options))


def verdicts(rows: list[RawRow]) -> dict[int, Reason]:
    return {row.number: row.error.reason for row in rows if row.error}


# --- which format


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mt_bench.jsonl", 3), ("gsm8k.jsonl", 3), ("ifeval.jsonl", 3), ("arena_hard.jsonl", 3), ("blns.json", 515),
        ("self_instruct.jsonl", 3), ("bfcl_live_simple.json", 3), ("bfcl_multi_turn.json", 2), ("arith.parquet", 200),
        ("specforge_tool_use.jsonl", 1), ("reason_tool_use.jsonl", 2), ("fastchat_dummy.json", 3), ("freshqa.csv", 3),
        ("tau2_airline.json", 1), ("glaive_toolcall.json", 3), ("humaneval.jsonl.gz", 3), ("kv_retrieval.jsonl.gz", 2),
    ],
)  # fmt: skip
def test_published_files_are_read_whole_under_any_name(tmp_path, name, count):
    """The bytes tell the format: the same rows come out when the name says nothing."""
    rows = list(read_records(DATASETS / name))
    assert len(rows) == count
    assert verdicts(rows) == {}
    nameless = rows_of(tmp_path / "data", (DATASETS / name).read_bytes())
    assert [row.value for row in nameless] == [row.value for row in rows]


@pytest.mark.parametrize(
    "text",
    [
        "[INST] Hello [/INST]\nnext\n", "[1] is a footnote\n", '["a", "b"] is a list in which language?\nnext\n',
        "Hello, how are you\nFine, thank you\n", "12\n13\n", "a;b is not a header\nc;d\n", '"Quoted," he said\nnext\n',
    ],
)  # fmt: skip
def test_text_that_looks_like_something_else_stays_text(tmp_path, text):
    """Prompts with brackets, quotes and commas are no JSON and no CSV."""
    assert [row.value for row in rows_of(tmp_path / "a.txt", text.encode())] == text.splitlines()


def test_lines_that_are_arrays_are_lines(tmp_path):
    """Two arrays, each on its line, are two rows; one array over lines is its elements."""
    chat = '[{"role": "user", "content": "x"}]'
    assert len(rows_of(tmp_path / "a", f"{chat}\n{chat}\n".encode())) == 2
    assert len(rows_of(tmp_path / "a", b'[{"prompt": "x"}, {"prompt": "y"},\n{"prompt": "z"}]')) == 3


def test_pretty_printed_objects_are_rows(tmp_path):
    """Objects over several lines, one behind the other, as `jq .` prints them."""
    data = json.dumps({"prompt": "1", "m": [{}]}, indent=2) + "\n" + json.dumps({"prompt": "2"}, indent=2)
    rows = rows_of(tmp_path / "a.json", data.encode())
    assert [(row.number, row.value["prompt"]) for row in rows] == [(1, "1"), (2, "2")]
    rows = rows_of(tmp_path / "a.json", data.encode() + b'\n{"prompt": \n NaN}\n{"prompt":\n "torn')
    assert verdicts(rows) == {3: Reason.UNREADABLE, 4: Reason.UNREADABLE}


# --- JSON arrays


def test_a_bad_element_costs_itself_only(tmp_path):
    """As long as brackets and quotes can be followed, the elements behind it are read."""
    data = b'[{"a": 1}, {"a": NaN}, , {"a": "\\ud800"}, {"b": 1, "b": 2}, {"a": [1, "],}{"]}, "text", ]\n'
    rows = rows_of(tmp_path / "a.json", data)
    assert verdicts(rows) == {
        2: Reason.UNREADABLE, 3: Reason.UNREADABLE, 4: Reason.INVALID_UNICODE, 5: Reason.UNREADABLE,
    }  # fmt: skip
    assert [row.value for row in rows if not row.error] == [{"a": 1}, {"a": [1, "],}{"]}, "text"]
    assert "a.json: record 2: not valid JSON" in rows[1].error.detail


@pytest.mark.parametrize("end", [b'{"a": "torn', b'{"a": [3}]', b"", b"]]", b"] tail"])
def test_an_array_that_cannot_be_followed_says_so_at_its_end(tmp_path, end):
    """The rows before count; one rejected row stands for what is lost."""
    rows = rows_of(tmp_path / "a.json", b'[{"a": 1}, {"a": 2}, {"a": 3}, ' + end)
    assert [row.value for row in rows[:3]] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert len(rows) == 4
    assert rows[3].error.reason == Reason.UNREADABLE


@pytest.mark.parametrize("edge", range(12))
def test_an_element_is_whole_wherever_the_chunk_ends(tmp_path, edge):
    """Chunks of 1 MiB end inside strings, behind backslashes and between elements."""
    tricky = {"a": 'q"\\', "b": ["{", "\\\\"]}
    padding = "x" * (1024 * 1024 - 40 + edge * 3)
    rows = rows_of(tmp_path / "a.json", json.dumps([padding, *[tricky] * 5, "y" * 2_200_000, tricky]).encode())
    assert [row.value for row in rows] == [padding, *[tricky] * 5, "y" * 2_200_000, tricky]


def test_an_element_beyond_the_limit_is_rejected_and_not_held(tmp_path):
    """The ones behind it are read."""
    data = json.dumps([{"a": "x" * 3_000_000}, {"a": 1}]).encode()
    rows = rows_of(tmp_path / "a.json", data, max_row_bytes=1000)
    assert verdicts(rows) == {1: Reason.TOO_LARGE}
    assert rows[1].value == {"a": 1}
    assert len(rows[0].raw) < 400


# --- compressed


def test_gzip_and_zstd_of_several_parts_are_one_file(tmp_path):
    """Members and frames behind one another, as parallel compressors and `cat` make them."""
    data = b'{"a": 1}\n{"a": 2}\n'
    for compress in (gzip.compress, zstandard.ZstdCompressor().compress):
        rows = rows_of(tmp_path / "a.jsonl", compress(data) + compress(data))
        assert [row.value["a"] for row in rows] == [1, 2, 1, 2]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("form", ["jsonl", "array", "text", "csv", "csv of long cells"])
def test_cut_compressed_data_gives_the_rows_before_and_one_verdict(tmp_path, compress, form):
    """Never silently fewer rows, and never half a row as a whole one."""
    noise = [f"{n * 7919 % 100_003} {n * 104_729 % 1_000_003}" for n in range(40_000)]
    data = {
        "jsonl": "\n".join(f'{{"a": "{text}"}}' for text in noise),
        "array": json.dumps(noise),
        "text": "\n".join(noise),
        "csv": "prompt,n\n" + "\n".join(f'"{text}",1' for text in noise),
        "csv of long cells": "prompt,n\n" + "\n".join(f'{text},"{LINES}"' for text in noise),
    }[form].encode()
    blob = compress(data)
    rows = rows_of(tmp_path / "a.gz", blob[: len(blob) * 2 // 3])
    good = [row for row in rows if not row.error]
    texts = [row.value if isinstance(row.value, str) else next(iter(row.value.values())) for row in good]
    assert len(good) > 1000
    assert texts == noise[: len(texts)]
    assert [row.error.reason for row in rows[len(good) :]] == [Reason.UNREADABLE]
    assert "cut off or damaged" in rows[-1].error.detail


def test_compressed_data_broken_from_the_start_is_an_error(tmp_path):
    """There is no row to keep."""
    with pytest.raises(UsageError, match="no readable gzip file"):
        rows_of(tmp_path / "a.gz", b"\x1f\x8b\x08\x00garbage")


def test_a_row_that_inflates_beyond_the_limit_is_not_held(tmp_path):
    """A few kilobytes of gzip may hold gigabytes."""
    blob = gzip.compress(b'{"a": "' + b"x" * 50_000_000 + b'"}\n{"a": 1}\n')
    rows = rows_of(tmp_path / "a.jsonl.gz", blob, max_row_bytes=1_000_000)
    assert verdicts(rows) == {1: Reason.TOO_LARGE}
    assert rows[1].value == {"a": 1}


# --- CSV


def test_the_header_may_stand_below_other_lines():
    """FreshQA: a warning and a line of commas first; cells with newlines; numbers are the lines where rows begin."""
    rows = list(read_records(DATASETS / "freshqa.csv"))
    assert [row.value["id"] for row in rows] == ["0", "1", "2"]
    assert [row.number for row in rows] == [4, 6, 8]
    assert rows[0].value["question"] == "What is the name of the first animal to land on the moon?"
    assert "\n" in rows[0].value["source"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_found(tmp_path, delimiter):
    """Comma, semicolon and tab; the others are text then."""
    lines = [["id", "prompt"], ["1", '"a,b;c\td"'], ["2", "plain"]]
    data = "\r\n".join(delimiter.join(cells) for cells in lines).encode()
    rows = rows_of(tmp_path / "a", data)
    assert [row.value for row in rows] == [{"id": "1", "prompt": "a,b;c\td"}, {"id": "2", "prompt": "plain"}]


def test_one_column_and_unusual_headers(tmp_path):
    """A known field name is a header by itself; an unusual one needs the name `.csv`."""
    assert [row.value for row in rows_of(tmp_path / "a", b"prompt\nHi\n")] == [{"prompt": "Hi"}]
    unusual = b"Your question?,A label\nHi,x\n"
    assert rows_of(tmp_path / "a.csv", unusual)[0].value == {"Your question?": "Hi", "A label": "x"}
    assert rows_of(tmp_path / "a", unusual)[0].value == "Your question?,A label"


def test_a_quote_that_is_never_closed_costs_its_row(tmp_path):
    """Without this one stray quote would swallow the file."""
    data = b'id,prompt\n1,one\n2,"open\n3,three\n4,5" pipe\n5,five\n'
    rows = rows_of(tmp_path / "a.csv", data)
    assert verdicts(rows) == {3: Reason.UNREADABLE}
    assert [row.value["prompt"] for row in rows if not row.error] == ["one", "three", '5" pipe', "five"]
    assert rows[1].raw == b'2,"open'


def test_bad_records_are_rejected_by_line(tmp_path):
    """Too many cells, no UTF-8, NULs, a bare carriage return."""
    data = b"id,prompt\n1,a,b\n2,caf\xe9\n3,\0\n4,x\ry\n\n6,six,\n7\n"
    rows = rows_of(tmp_path / "a.csv", data)
    assert verdicts(rows) == dict.fromkeys((2, 3, 4, 5), Reason.UNREADABLE)
    assert [(row.number, row.value) for row in rows if not row.error] == [
        (7, {"id": "6", "prompt": "six"}), (8, {"id": "7"}),
    ]  # fmt: skip


def test_a_cell_beyond_the_limit_is_rejected_and_not_held(tmp_path):
    """Cells over Python's own 128 KiB are fine, over ours are not; the rows behind are read."""
    big, huge = "x" * 300_000, "y\n" * 600_000
    rows = rows_of(tmp_path / "a.csv", f'id,prompt\n1,{big}\n2,"{huge}"\n3,three\n'.encode(), max_row_bytes=500_000)
    assert [row.number for row in rows] == [2, 3, 600_004]
    assert verdicts(rows) == {3: Reason.TOO_LARGE}
    assert rows[0].value["prompt"] == big
    assert rows[2].value == {"id": "3", "prompt": "three"}


# --- Parquet


def test_parquet_gives_no_row_the_keys_of_another(tmp_path):
    """Arrow's structs have the keys of all rows; null ones are dropped, columns stay."""
    rows = [
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "parameters": {"a": 1}}]},
        {"messages": [{"role": "user", "content": "y", "name": "n"}], "tools": [{"name": "g", "parameters": {"b": 2}}]},
        {"messages": [{"role": "user", "content": ""}], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    found = list(read_records(tmp_path / "a.parquet"))
    assert [row.value for row in found] == rows
    assert [row.number for row in found] == [1, 2, 3]


def test_parquet_cut_off_is_an_error(tmp_path):
    """Its footer stands at the end: no row can be read."""
    data = (DATASETS / "arith.parquet").read_bytes()
    with pytest.raises(UsageError, match="footer cannot be read"):
        rows_of(tmp_path / "a.parquet", data[:2000])


def test_parquet_rows_have_limits_and_reasons_too(tmp_path):
    """A text that is not UTF-8, and a row that is too large."""
    texts = pa.array([b"ok", b"caf\xe9", b"x" * 5000, b"end"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    rows = list(read_records(tmp_path / "a.parquet", max_row_bytes=1000))
    assert verdicts(rows) == {2: Reason.UNREADABLE, 3: Reason.TOO_LARGE}
    assert [row.value for row in rows if not row.error] == [{"prompt": "ok"}, {"prompt": "end"}]


def test_about_how_many_rows_a_file_has_is_known_before_it_is_read(tmp_path):
    """Exact for Parquet and for small files; within a tenth for a large one, plain or compressed."""
    lines = [json.dumps({"prompt": f"question {n} " + "word " * (n * 7919 % 90)}) for n in range(30_000)]
    text = "\n".join(lines).encode()
    small, plain, packed = tmp_path / "small.jsonl", tmp_path / "plain.jsonl", tmp_path / "packed.jsonl.gz"
    small.write_bytes(b"\n".join(text.split(b"\n")[:17]))
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    array = tmp_path / "array.json"
    array.write_text("[" + ",".join(lines) + "]")
    assert expected_rows(small) == 17
    for path in (plain, packed, array):
        assert expected_rows(path) == pytest.approx(30_000, rel=0.1)
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"prompt": lines[:5000]}), table)
    assert expected_rows(table) == 5000


def test_of_large_rows_few_are_read_to_say_how_many_there_are(tmp_path, monkeypatch):
    """A thousand of a megabyte would take a minute, and nothing is sent before."""
    monkeypatch.setattr(readers, "_SAMPLE_BYTES", 5000)
    path = tmp_path / "a.jsonl"
    large, small = [b'{"prompt":"%s"}\n' % (b"x" * size) for size in (2000, 0)]
    path.write_bytes(large * 50 + small * 500)
    assert expected_rows(path) == pytest.approx(53, abs=1)  # the small ones were not seen

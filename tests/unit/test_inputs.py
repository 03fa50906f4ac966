"""`[NAME=]PATH`: which files make which dataset, and what is refused before a row is read."""

import gzip
import os

import pytest

from app.errors import UsageError
from producers.inputs import default_name, describe, parse_inputs

ROW = '{"prompt": "hi"}\n'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory to be in, with two different good files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(ROW)
    (tmp_path / "b.jsonl").write_text(ROW * 2)
    return tmp_path


def refusal(*arguments: str) -> str:
    """The sentence."""
    with pytest.raises(UsageError) as raised:
        describe(parse_inputs(arguments), [])
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n  \n\n", "has no rows"),
        ("none.json", b"[]", "has no rows"),
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "has no rows"),
        ("cut.gz", gzip.compress(ROW.encode() * 99, mtime=0)[:15], "no readable gzip"),
        ("binary.jsonl", b"\x00\x9f\x92\x96\xff", "neither UTF-8"),
    ],
)  # fmt: skip
def test_a_file_without_a_readable_row_is_refused_by_name(here, name, content, words):
    """Before anything is enqueued, not in the middle of it."""
    (here / name).write_bytes(content)
    told = refusal("a.jsonl", name)
    assert words in told
    assert name in told


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(here):
    """Missing, a directory, a pipe (reading it would hang, and once is not enough)."""
    os.mkfifo("pipe")
    assert "No such file: nope.jsonl" in refusal("nope.jsonl")
    assert "is a directory" in refusal(".")
    assert "no regular file" in refusal("pipe")


def test_a_name_ending_in_gz_is_not_believed(here):
    """The bytes decide."""
    (here / "plain.jsonl.gz").write_text(ROW)
    assert [dataset.name for dataset in parse_inputs(["plain.jsonl.gz"])] == ["plain"]


def test_two_files_of_one_default_name_show_the_form_that_works(here):
    """And what it shows is accepted."""
    (here / "d").mkdir()
    (here / "d" / "a.jsonl").write_text(ROW * 3)
    told = refusal("a.jsonl", "d/a.jsonl")
    assert "a_a=a.jsonl a_b=d/a.jsonl" in told
    assert len(parse_inputs(["a_a=a.jsonl", "a_b=d/a.jsonl"])) == 2
    assert parse_inputs(["a=a.jsonl", "a=d/a.jsonl"])[0].name == "a"


def test_the_same_bytes_are_taken_once(here):
    """The same file twice, through a link, or a copy under another name: each row would be made twice."""
    (here / "link.jsonl").symlink_to("a.jsonl")
    (here / "copy.jsonl").write_text(ROW)
    assert "given twice" in refusal("x=a.jsonl", "x=a.jsonl")
    assert "given twice" in refusal("a.jsonl", "link.jsonl")
    told = refusal("a.jsonl", "copy.jsonl")
    assert "dataset a" in told
    assert "dataset copy" in told


@pytest.mark.parametrize("name", ["", "..", "../x", ".headrace", "-x", "a b", "a/b", "run.json", "x" * 101, "ä"])
def test_a_name_that_is_no_safe_folder_is_refused(here, name):
    """It would leave OUT, hide there, or stand in the way of a file of ours."""
    assert "no safe folder name" in refusal(f"{name}=a.jsonl")


def test_a_path_with_an_equals_sign_is_a_path_if_it_exists(here):
    """`x=a.jsonl` names a.jsonl x, unless there is such a file."""
    assert parse_inputs(["x=a.jsonl"])[0].name == "x"
    (here / "x=a.jsonl").write_text(ROW * 4)
    assert "NAME=" in refusal("x=a.jsonl")
    assert parse_inputs(["y=x=a.jsonl"])[0].paths[0].name == "x=a.jsonl"


def test_the_known_extensions_and_no_others_are_dropped():
    """`kimi-k2.5_sft.jsonl` is dataset kimi-k2.5_sft."""
    from pathlib import Path

    assert default_name(Path("d/kimi-k2.5_sft.jsonl.gz")) == "kimi-k2.5_sft"
    assert default_name(Path(".jsonl")) == ".jsonl"


def test_two_names_that_differ_in_case_only_are_refused(here):
    """They are one folder on a filesystem that ignores case."""
    for name in ("a.jsonl", "b.jsonl"):
        (here / name).write_text(f'{{"prompt":"{name}"}}\n')
    with pytest.raises(UsageError, match="differ only in case"):
        parse_inputs([f"Chat={here / 'a.jsonl'}", f"chat={here / 'b.jsonl'}"])


def test_files_of_one_size_are_read_whole_only_if_they_begin_alike(here):
    """Or two of a hundred gigabytes would keep a run from starting. Equal bytes under two names are refused."""
    start = b'{"prompt": "same"}\n' * 60_000  # more than is compared first
    for name, end in (("one", b"1"), ("two", b"2")):
        (here / f"{name}.jsonl").write_bytes(start + b'{"prompt": "%s"}\n' % end)
    (here / "other.jsonl").write_bytes(b'{"prompt": "else"}\n' * 60_000 + b'{"prompt": "1"}\n')
    files = describe(parse_inputs(["one.jsonl", "two.jsonl", "other.jsonl"]), [])
    assert [bool(file.sha256) for file in files] == [True, True, False]
    (here / "copy.jsonl").write_bytes((here / "one.jsonl").read_bytes())
    assert "same bytes" in refusal("one.jsonl", "other.jsonl", "copy.jsonl")

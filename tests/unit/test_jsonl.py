"""app.jsonl: whole lines only, whatever happened to the writer."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.errors import StorageError
from app.jsonl import Appender, Line, is_whole, iterate, parse

A, B = b'{"id":1}\n', b'{"id":2}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / "lines.jsonl"


def reopened(path: Path) -> str:
    """What opening for appending says it cut."""
    with Appender(path) as file:
        return str(file.cut or "")


def test_appending_returns_the_offset_of_each_line(path):
    """An offset is where the line starts, and reading from there begins with it."""
    with Appender(path) as file:
        offsets = file.append([A, B]) + file.append([A])
        assert offsets == [0, len(A), len(A + B)]
        assert file.end == len(A + B + A)
        file.sync()
    assert [next(iterate(path, offset)).raw for offset in offsets] == [A[:-1], B[:-1], A[:-1]]


@pytest.mark.parametrize("bad", [b"", b"{}", b"{}\n{}\n", b"{}\n\n", b"\n{}"])
def test_only_whole_single_lines_may_be_appended(path, bad):
    """A line has one newline, at its end; otherwise nothing is written."""
    with Appender(path) as file:
        with pytest.raises(ValueError, match="newline"):
            file.append([A, bad])
    assert path.read_bytes() == b""


def test_lines_are_split_at_newlines_only(path):
    """U+2028, U+2029, U+0085, CR, form feed and an escaped NUL are text, not line ends."""
    text = 'a\u2028b\u0085c\u2029d\x0ce\rf'
    line = b'{"text":"' + text.replace("\x0c", "\\f").replace("\r", "\\r").encode() + b'\\u0000"}\n'
    with Appender(path) as file:
        file.append([line, A])
    assert [parse(one.raw) for one in iterate(path)] == [{"text": text + "\0"}, {"id": 1}]
    assert reopened(path) == ""


def test_iterating_starts_anywhere_and_leaves_out_what_has_no_newline(path):
    """A reader beside the writer sees whole lines only."""
    with Appender(path) as file:
        file.append([A, B])
    with path.open("ab") as torn:
        torn.write(b'{"id":3')
    assert list(iterate(path, len(A))) == [Line(len(A), len(A + B), B[:-1])]


def test_a_missing_file_has_no_lines(path):
    """Nor has what lies behind the end of one."""
    assert list(iterate(path)) == list(iterate(path, 1000)) == []


@pytest.mark.parametrize(
    "tail",
    [
        b'{"id":3', B[:-1], '{"t":"é'.encode()[:-1], b"\0" * 5000, b'{"id":3\n', b'{"id":3\n\n\n', b"\0\0\n", b"\n \n",
        b'{"id":3,"x":NaN}\n', b"[]\n", b'{"id":"\xff"}\n', b'{"id":3\n\0\0\0\n{"id":',
    ],
)  # fmt: skip
def test_a_torn_end_is_cut_when_the_writer_opens_and_said_so(path, tail):
    """No newline, NULs, half a character, or a last line that is not one JSON object, also before blank lines: cut."""
    with Appender(path) as file:
        file.append([A, B])
    with path.open("ab") as torn:
        torn.write(tail)
    assert f"cut {len(tail):,} bytes" in reopened(path)
    assert path.read_bytes() == A + B
    assert reopened(path) == ""


def test_a_bad_line_in_the_middle_stays(path):
    """Only the end can be an unfinished write; lines after a bad one count."""
    path.parent.mkdir(parents=True)
    path.write_bytes(A + b"garbage\n" + b"\0\0\n" + B)
    assert reopened(path) == ""
    assert [is_whole(line.raw) for line in iterate(path)] == [True, False, False, True]


def test_a_file_without_any_whole_line_becomes_empty(path):
    """The first write of all may be the torn one."""
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"id":')
    assert "cut 6 bytes" in reopened(path)
    assert path.read_bytes() == b""


def test_a_line_of_megabytes_survives_and_is_cut_when_torn(path):
    """Lines may be longer than any block that is read at once."""
    big = b'{"text":"' + b"x" * 5_000_000 + b'"}\n'
    with Appender(path) as file:
        file.append([big, A])
    with path.open("ab") as torn:
        torn.write(big[:-100])
    assert f"{len(big) - 100:,}" in reopened(path)
    assert [line.end - line.offset for line in iterate(path)] == [len(big), len(A)]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A real refusal by the kernel: no file grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_write_leaves_the_file_as_it_was(path):
    """The kernel takes a part of the lines and then refuses: all are undone, one sentence says so, work goes on."""
    with Appender(path) as file:
        file.append([A])
        before = os.stat(path).st_mtime_ns
        with file_size_limit(len(A) + 12), pytest.raises(StorageError, match="cannot write: File too large"):
            file.append([B, B])
        assert (path.read_bytes(), os.stat(path).st_mtime_ns) == (A, before)  # no trace: it was not edited
        assert file.append([B]) == [len(A)]
    assert path.read_bytes() == A + B


def test_a_path_that_cannot_be_opened_is_one_sentence(tmp_path):
    """A file where a folder should be: StorageError with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot open for appending"):
        Appender(tmp_path / "file" / "lines.jsonl")


def test_closing_twice_is_harmless_and_leaks_nothing(path):
    """No descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    file = Appender(path)
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_symbolic_link_is_not_followed(path, tmp_path):
    """It could lead a line of ours, or a cut, into any file."""
    path.parent.mkdir(parents=True)
    (tmp_path / "precious").write_bytes(b"not JSON, and not ours")
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="symbolic link"):
        Appender(path)
    assert (tmp_path / "precious").read_bytes() == b"not JSON, and not ours"

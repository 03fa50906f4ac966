"""producers.bookmarks: a pass that begins behind what is known leaves the ledger as one that read everything."""

import gzip
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ledger import Ledger
from app.ledger.schema import unpack_row_id
from app.rundir import RunDir
from app.settings import RunSettings
from producers import bookmarks, catalog
from producers.bookmarks import InputPass, rows_at
from producers.catalog import read_row, rows_of, shape_options
from producers.inputs import Dataset
from producers.readers import read_records

LINES = st.lists(st.sampled_from([b'{"prompt":"a"}\n', b'{"prompt":"b"}\n', b'{"prompt":"c"}\n', b"\n", b"{bad\n"]),
                 min_size=1, max_size=14)  # fmt: skip
WHOLE = LINES.map(b"".join).filter(bytes.strip)
FILE = WHOLE | WHOLE.map(lambda data: data.rstrip(b"\n"))


@pytest.fixture(autouse=True, scope="module")
def small_steps():
    """Bookmarks every few lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "CHUNK_ROWS", 2)
        patch.setattr(bookmarks, "_EVERY_LINES", 3)
        yield


class Input:
    """A dataset of two files, and the ledger of its run."""

    def __init__(self, folder: Path):
        self.paths = (folder / "one", folder / "two")
        names = [f"d={path}" for path in self.paths]
        self.settings = RunSettings(inputs=names, out=folder / "out", endpoints=["http://e"], tokenizer="t")
        self.ledger = Ledger.open(RunDir(self.settings.out))

    def read(self, chunks: int | None = None) -> int:
        """A pass, broken off after so many chunks; returns how many rows were read."""
        rows, shapes = 0, shape_options(self.settings)
        over = InputPass([Dataset("d", self.paths)], self.settings, self.ledger)
        for n, (name, chunk) in enumerate(over.chunks()):
            if n == chunks:
                break
            if chunk is None:
                self.ledger.end_pass(name)
                continue
            digests = [(read_row(raw, shapes)[0], file, raw.number) for file, raw in chunk]
            self.ledger.see_rows(name, digests)
            rows += len(chunk)
        return rows

    def assert_known(self) -> None:
        """Each row of the input, where it stands, and no other."""
        shapes, there = shape_options(self.settings), {}
        for file, path in enumerate(self.paths):
            for raw in read_records(path):
                there[file, raw.number] = read_row(raw, shapes)[0]
        found = self.ledger._db.execute("SELECT file, number, row_id FROM row").fetchall()
        assert {(file, number): unpack_row_id(key).partition("-")[0] for file, number, key in found} == there
        assert len(found) == len(there)
        counted = Counter(there.values())
        ids = {unpack_row_id(key) for _, _, key in found}
        assert ids == {row if n == 1 else f"{row}-{n}" for row, most in counted.items() for n in range(1, most + 1)}
        assert self.ledger.discrepancies() == []


@given(st.lists(st.tuples(FILE, FILE, st.sampled_from(["write", "append", "keep"]), st.none() | st.integers(0, 9)),
                min_size=1, max_size=5))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_whatever_becomes_of_the_files_a_whole_pass_leaves_just_their_rows(steps):
    """Written anew, grown or kept, with passes broken off anywhere between."""
    with tempfile.TemporaryDirectory() as folder:
        one = Input(Path(folder))
        for path in one.paths:
            path.write_bytes(b'{"prompt":"a"}\n')
        try:
            for first, second, how, chunks in steps:
                for path, data in zip(one.paths, (first, second), strict=True):
                    if how == "write":
                        path.write_bytes(data)
                    elif how == "append":
                        path.write_bytes(path.read_bytes() + data)
                one.read(chunks)
                if chunks is None:
                    one.assert_known()
            one.read()
            one.assert_known()
            assert one.read() == 0
        finally:
            one.ledger.close()


@pytest.fixture
def known(tmp_path):
    """Two files of twelve rows each, read once."""
    made = Input(tmp_path)
    for path, letter in zip(made.paths, "ab", strict=True):
        path.write_text("".join(f'{{"prompt":"{letter}{n}"}}\n' for n in range(12)))
    assert made.read() == 24
    yield made
    made.ledger.close()


def test_an_unchanged_input_is_not_read_again_and_a_grown_one_only_where_it_grew(known):
    """By its bytes while it is young, by its times later."""
    assert known.read() == 0
    with known.paths[1].open("a") as file:
        file.write('{"prompt":"new"}\n{"prompt":"b3"}\n')
    assert known.read() == 2
    known.assert_known()


def test_a_row_is_found_from_the_bookmark_before_it(known):
    """The same rows as by reading all, whatever lines are asked for."""
    marks = [mark for mark in known.ledger.bookmarks("d") if mark.file == 1]
    assert len(marks) > 2
    everything = {row.number: row for row in read_records(known.paths[1])}
    for numbers in ({1, 2, 3, 4, 7, 12}, {4}, {12}, set(everything), {99}):
        found = list(rows_at(known.paths[1], numbers, marks, 1 << 20))
        assert found == [everything[number] for number in sorted(numbers & everything.keys())]


def test_an_edit_that_keeps_size_and_time_is_noticed(known):
    """Rows before the edited stretch are not read."""
    before = known.paths[1].stat()
    known.paths[1].write_text(known.paths[1].read_text().replace("b7", "x7"))
    os.utime(known.paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known.paths[1].stat().st_size == before.st_size
    assert 0 < known.read() < 12
    known.assert_known()


def test_a_pass_that_was_broken_off_is_gone_on_with(tmp_path):
    """Behind the last bookmark, not at the beginning."""
    one = Input(tmp_path)
    for path in one.paths:
        path.write_text("".join(f'{{"prompt":"{path.name}{n}"}}\n' for n in range(12)))
    assert one.read(chunks=9) == 18
    assert one.read() < 10
    one.assert_known()
    one.ledger.close()


def test_a_limit_or_another_way_to_read_a_row_reads_it_all(known):
    """What stands in a row depends on how it is read."""
    known.settings = known.settings.model_copy(update={"limit": 5})
    assert known.read() == 5
    known.settings = known.settings.model_copy(update={"limit": None})
    assert known.read() == 24
    known.settings = known.settings.model_copy(update={"system": "Be brief."})
    assert known.read() == 24
    known.assert_known()


def test_a_pass_of_somebody_else_forgets_what_was_known(known):
    """It may have seen rows elsewhere, of a file that was another for a while."""
    was = known.paths[0].read_bytes()
    known.paths[0].write_bytes(b"".join(sorted(was.splitlines(keepends=True), reverse=True)))
    for _ in rows_of([Dataset("d", known.paths)], known.settings, known.ledger):
        pass
    known.paths[0].write_bytes(was)
    assert known.read() == 24
    known.assert_known()


def test_a_compressed_file_is_known_as_a_whole(known):
    """It has no bytes to begin at; when it grew it is read in full."""
    plain = known.paths[1].read_bytes()
    known.paths[1].write_bytes(gzip.compress(plain, mtime=0))
    assert known.read() == 12
    assert known.read() == 0
    known.paths[1].write_bytes(gzip.compress(plain, mtime=0) + gzip.compress(b'{"prompt":"more"}\n'))
    assert known.read() == 13
    known.assert_known()

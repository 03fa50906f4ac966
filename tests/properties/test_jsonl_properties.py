"""app.jsonl: whatever a crash leaves, no whole line is lost and no two records share one."""

import shutil
import tempfile
from pathlib import Path

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.jsonl import Appender, is_whole, iterate, parse

TEXT = st.text(st.sampled_from("aé\u2028\u0085\x00\n\r\"{}\\😀"), max_size=12)


class FileThatIsTorn(RuleBasedStateMachine):
    """Append, kill in the middle of a write, scribble on the end, open again."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "lines.jsonl"
        self.writer: Appender | None = None
        self.written: list[tuple[int, dict]] = []  # what append returned for: (offset, record)
        self.torn = False
        self.unfinished = (0, b"")  # where the bytes without a newline at the end begin, and what they are
        self.number = 0

    def teardown(self):
        if self.writer:
            self.writer.close()
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.writer is None)
    @rule()
    def open(self):
        """Opening cuts exactly what is torn."""
        self.writer = Appender(self.path)
        assert (self.writer.cut is not None) == self.torn
        self.torn, self.unfinished = False, (0, b"")

    @precondition(lambda self: self.writer is not None)
    @rule(texts=st.lists(TEXT, max_size=4))
    def append(self, texts):
        """Records of any text, several at once."""
        records = []
        for text in texts:
            self.number += 1
            records.append({"number": self.number, "text": text})
        offsets = self.writer.append([orjson.dumps(one) + b"\n" for one in records])
        self.written += zip(offsets, records, strict=True)

    @precondition(lambda self: self.writer is not None)
    @rule(texts=st.lists(TEXT, min_size=1, max_size=3), keep=st.floats(0, 1))
    def killed_while_writing(self, texts, keep):
        """Only a part of the bytes reaches the file; the lines that are whole count, though nobody was told."""
        self.close()
        lines = []
        for text in texts:
            self.number += 1
            lines.append(orjson.dumps({"number": self.number, "text": text}) + b"\n")
        data, start = b"".join(lines), self.path.stat().st_size
        part = data[: int(len(data) * keep)]
        with self.path.open("ab") as file:
            file.write(part)
        for line in lines:
            if not part.startswith(line):
                break
            self.written.append((start, orjson.loads(line)))
            part, start = part[len(line) :], start + len(line)
        self.torn, self.unfinished = bool(part), (start, part)

    @precondition(lambda self: self.writer is None)
    @rule(junk=st.sampled_from([b"\0" * 300, b"\n\n", b'{"number":\n', b"\n\0\n", b"{}x\n\n"]))
    def scribble_on_the_end(self, junk):
        """NULs and halves of records after the last line, with or without newlines.

        A record that lacked nothing but its newline is whole if it gets one.
        """
        offset, part = self.unfinished
        if junk.startswith(b"\n") and is_whole(part):
            self.written.append((offset, orjson.loads(part)))
        self.unfinished = (0, b"")
        with self.path.open("ab") as file:
            file.write(junk)
        self.torn = True

    @rule()
    def close(self):
        """Let go."""
        if self.writer:
            self.writer.close()
            self.writer = None

    @invariant()
    def every_whole_line_is_there_once_and_in_order(self):
        """Also while the end is torn: readers that skip what is not whole see exactly the records."""
        found = [(line.offset, parse(line.raw)) for line in iterate(self.path) if is_whole(line.raw)]
        assert found == self.written

    @invariant()
    def each_offset_leads_to_its_record(self):
        """What append returned stays true for ever."""
        for offset, record in self.written:
            assert parse(next(iterate(self.path, offset)).raw) == record

    @invariant()
    def an_open_file_has_nothing_but_whole_lines(self):
        """So the next record can never be glued to anything."""
        if self.writer:
            data = self.path.read_bytes()
            assert len(data) == self.writer.end
            assert data == b"".join(orjson.dumps(record) + b"\n" for _, record in self.written)


FileThatIsTorn.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_no_whole_line_is_ever_lost_and_no_two_share_a_line = FileThatIsTorn.TestCase

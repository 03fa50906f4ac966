"""app.ledger: the tally is a recount, and committing is the same as reading the files."""

import random
import shutil
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.ledger import Committed, Ledger, State
from app.reasons import Reason
from app.records import line_of
from app.rundir import RAW, RunDir
from app.samples import SampleFilters, sample_of
from tests.run_on_disk import AT, digest, rejection, response, write

DATASETS = ("chat", "code")
INPUTS = st.fixed_dictionaries(dict.fromkeys(DATASETS, st.lists(st.integers(0, 5), max_size=8)))
SLOT = st.tuples(st.sampled_from(DATASETS), st.integers(0, 5), st.integers(1, 2), st.integers(0, 2))


def row_of(n: int, occurrence: int) -> str:
    return digest(n) if occurrence == 1 else f"{digest(n)}-{occurrence}"


class LedgerAgainstModel(RuleBasedStateMachine):
    """Inputs that change, completions in any order, commits lost and repeated, the ledger thrown away.

    The model: rows of the input, and per completion what its lines say.
    """

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.rundir = RunDir(self.folder)
        self.ledger = Ledger.open(self.rundir)
        self.input: dict[str, set[str]] = {name: set() for name in DATASETS}
        self.samples = 1
        self.files: dict[tuple[str, str, int], tuple[str, bool]] = {}  # slot → (state or reason, has a raw line)
        self.lines: Counter[tuple[str, str]] = Counter()
        self.commits: list[tuple[list[Committed], dict]] = []
        self.uncommitted = False

    def teardown(self):
        self.ledger.close()
        shutil.rmtree(self.folder)

    def seen_by_model(self, dataset: str, numbers: list[int]) -> list[str]:
        occurrences: dict[int, count] = {}
        return [row_of(n, next(occurrences.setdefault(n, count(1)))) for n in numbers]

    @rule(inputs=INPUTS, samples=st.integers(1, 3), batch=st.integers(1, 4))
    def read_the_input(self, inputs, samples, batch):
        """A whole pass, in batches: ids, what each row has already, and the rows of the input."""
        self.ledger.catch_up()
        self.ledger.begin_pass(samples, DATASETS)
        for dataset, numbers in inputs.items():
            rows = [(digest(n), 0, place) for place, n in enumerate(numbers, start=1)]
            seen = []
            for at in range(0, len(rows), batch):
                seen += self.ledger.see_rows(dataset, rows[at : at + batch])
            self.ledger.end_pass(dataset)
            expected = self.seen_by_model(dataset, numbers)
            assert [one.row_id for one in seen] == expected
            for one in seen:
                has = {index for of, row, index in self.files if (of, row) == (dataset, one.row_id)}
                assert one.final == has - {-1}
                assert one.row_verdict == (-1 in has)
            self.input[dataset] = set(expected)
        self.samples, self.uncommitted = samples, False

    @rule(inputs=INPUTS)
    def break_a_pass_off(self, inputs):
        """A producer that is killed: what it registered counts until the next whole pass; the model reads on."""
        self.ledger.begin_pass()
        for dataset, numbers in inputs.items():
            seen = self.ledger.see_rows(dataset, [(digest(n), 1, place) for place, n in enumerate(numbers)])
            self.input[dataset] |= {one.row_id for one in seen}

    @rule(
        slots=st.lists(SLOT, min_size=1, max_size=5),
        kind=st.sampled_from(["sample", "empty", "raw", "refused", "verdict"]),
        committed=st.booleans(),
    )
    def collect(self, slots, kind, committed):
        """Lines of new completions are appended, and committed, or a kill comes between."""
        if committed and self.uncommitted:
            self.ledger.catch_up()  # as the collector does when it starts
        records, commits = [], []
        for dataset, n, occurrence, index in dict.fromkeys(slots):
            slot = (dataset, row_of(n, occurrence), -1 if kind == "verdict" else index)
            if slot not in self.files:
                new, commit = self.lines_of(slot, kind, self.end_of(dataset, records))
                records += new
                commits.append(commit)
        ends = write(self.rundir, records)
        self.uncommitted |= bool(records) and not committed
        if committed:
            self.ledger.commit(commits, ends)
            self.commits.append((commits, ends))

    def lines_of(self, slot: tuple[str, str, int], kind: str, offset: int) -> tuple[list, Committed]:
        dataset, row, index = slot
        if kind in ("refused", "verdict"):
            reason = Reason.REFUSED if kind == "refused" else Reason.TOO_LONG
            self.files[slot] = (reason, False)
            return [rejection(row, reason, dataset, index)], Committed(*slot, State.REJECTED, reason)
        raw = response(row, dataset, index, output_ids=[2] if kind == "empty" else [8, 2])
        self.lines[dataset, "responses"] += 1
        if kind == "raw":
            self.files[slot] = ("raw", True)
            return [raw], Committed(*slot, State.GENERATED, "", offset)
        self.lines[dataset, "samples"] += kind == "sample"
        self.files[slot] = ("sample" if kind == "sample" else Reason.EMPTY_OUTPUT, True)
        state = State.TOKENIZED if kind == "sample" else State.REJECTED
        reason = "" if kind == "sample" else Reason.EMPTY_OUTPUT
        return [raw, sample_of(raw, SampleFilters(), AT)], Committed(*slot, state, reason, offset)

    def end_of(self, dataset: str, records: list) -> int:
        path = self.rundir.file(dataset, RAW)
        size = path.stat().st_size if path.exists() else 0
        return size + sum(len(line_of(r)) for r in records if hasattr(r, "output_ids") and r.dataset == dataset)

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def commit_again(self, data):
        """A commit that is repeated, in another order, changes nothing."""
        commits, ends = data.draw(st.sampled_from(self.commits))
        self.ledger.commit(random.Random(0).sample(commits, len(commits)), ends)

    @rule()
    def catch_up(self):
        """Read what nobody committed."""
        self.ledger.catch_up()
        self.uncommitted = False

    @rule()
    def lose_the_ledger(self):
        """It is a cache: afterwards the files say what is done, and rows are known again with the next pass."""
        self.ledger.close()
        for file in self.rundir.private.glob("ledger.sqlite*"):
            file.unlink()
        self.ledger = Ledger.open(self.rundir)
        self.ledger.catch_up()
        self.input = {name: set() for name in DATASETS}
        self.samples, self.uncommitted = 1, False

    @invariant()
    def the_tally_is_a_recount(self):
        """Counters never drift from what they count."""
        assert self.ledger.discrepancies() == []

    @precondition(lambda self: not self.uncommitted)
    @invariant()
    def the_counts_are_those_of_the_model(self):
        """Every row accounted for, whatever happened."""
        counts = {one.dataset: one for one in self.ledger.counts()}
        for dataset in counts:
            assert counts[dataset].rows == len(self.input[dataset]) * self.samples
            assert self.count_by_model(dataset) == self.told(counts[dataset])

    def told(self, counts) -> Counter:
        told = Counter({f"rejected {reason}": n for reason, n in counts.rejected_by_reason.items()})
        for name in ("generated", "tokenized", "pending", "orphans", "responses", "samples"):
            told[name] = getattr(counts, name)
        return told

    def count_by_model(self, dataset: str) -> Counter:
        counted = Counter({name: self.lines[dataset, name] for name in ("responses", "samples")})
        for row in self.input[dataset]:
            for index in range(self.samples):
                own = self.files.get((dataset, row, index))
                said, has_raw = own or self.files.get((dataset, row, -1), ("", False))
                counted["generated"] += has_raw
                name = {"sample": "tokenized", "raw": "pending", "": "pending"}.get(said, f"rejected {said}")
                counted[name] += 1
        for of, row, index in self.files:
            counted["orphans"] += of == dataset and (row not in self.input[dataset] or index >= self.samples)
        return counted


LedgerAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
test_the_ledger_says_what_input_and_files_say = LedgerAgainstModel.TestCase

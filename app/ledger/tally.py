"""How completions are merged and counted. Pure.

Two sayings about one completion merge the same in any order and any number of times, so that files may be read again.
The counts of a row are the facts about it; `counts_of` adds them up for the number of completions wanted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from app.ledger.schema import HAS_RAW, SHADOWED, VERDICT, DatasetCounts, Slot, State
from app.rundir import RAW, REJECTED, TOKENIZED

Slots = dict[int, Slot]  #: the completions of a row by their index; VERDICT for the row as a whole
Fact = tuple[int, int, str]  #: completion index, state, reason


def merge(old: Slot | None, new: Slot) -> Slot:
    """What is true when both are: the higher state with its (first) reason, and the raw line if either has it."""
    if old is None:
        return new
    higher = new if new.state > old.state else old
    return higher._replace(raw_offset=old.raw_offset if old.raw_offset >= 0 else new.raw_offset)


def files_entered(old: Slot | None, new: Slot) -> Iterator[str]:
    """The files in which a completion stands now and did not before."""
    if new.raw_offset >= 0 and (old is None or old.raw_offset < 0):
        yield RAW
    if old is None or new.state > old.state:
        if new.state is State.TOKENIZED:
            yield TOKENIZED
        elif new.state is State.REJECTED:
            yield REJECTED


def facts(slots: Slots) -> Iterator[Fact]:
    """What the tally counts of one row."""
    verdict = slots.get(VERDICT)
    for index, slot in slots.items():
        yield index, slot.state, slot.reason
        if slot.raw_offset >= 0:
            yield index, HAS_RAW, ""
        if verdict is not None and index != VERDICT:
            yield index, SHADOWED, verdict.reason


def counts_of(
    dataset: str, input_rows: int, rows_final: bool, wanted: int,
    tally: Iterable[tuple[int, int, int, str, int]], files: dict[str, tuple[int, int]],
) -> DatasetCounts:  # fmt: skip
    """Counts of a dataset. tally: (present, index, state, reason, n); files: name → (lines, unreadable).

    A verdict on a row counts for each completion wanted that has no record of its own.
    """
    states: Counter[int] = Counter()
    rejected: Counter[str] = Counter()
    orphans = 0
    for present, index, state, reason, n in tally:
        if not present or index >= wanted:
            orphans += n if state in tuple(State) else 0
        elif state == State.REJECTED:
            rejected[reason] += n * wanted if index == VERDICT else n
        elif state == SHADOWED:
            rejected[reason] -= n
        else:
            states[state] += n
    return DatasetCounts(
        dataset=dataset,
        rows=input_rows * wanted,
        rows_final=rows_final,
        generated=states[HAS_RAW],
        tokenized=states[State.TOKENIZED],
        rejected_by_reason={reason: n for reason, n in sorted(rejected.items()) if n},
        responses=files.get(RAW, (0, 0))[0],
        samples=files.get(TOKENIZED, (0, 0))[0],
        orphans=orphans,
        unreadable=sum(unreadable for _, unreadable in files.values()),
    )

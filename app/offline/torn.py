"""Completions of several turns of which somebody took lines away, out of the middle of a file.

What is left of them would stand beside the group that is made anew, the same ids twice. Where raw lines are missing,
the others move to `superseded.jsonl` and the samples go; where only samples are, the other samples go and all are
derived again.
"""

from collections.abc import Mapping

from app.jsonl import iterate
from app.ledger import Torn
from app.ledger.files import fact_of
from app.offline.retry import move, slot_of
from app.offline.scratch import HashSet
from app.offline.switch import Switch
from app.rundir import TOKENIZED, RunDir


def remove_torn(rundir: RunDir, torn: Mapping[str, Torn]) -> int:
    """Remove what is left of these; returns of how many. A dataset that lacks both gives up its raw lines first.

    For the writer of the files. Raises StorageError; then nothing has changed.
    """
    with Switch(rundir) as switch:
        for dataset, found in torn.items():
            with HashSet() as chosen:
                for row_id, index in found.responses or found.samples:
                    chosen.add(slot_of(row_id, index))
                if found.responses:
                    move(rundir, dataset, chosen, switch)
                else:
                    _drop_samples(rundir, dataset, chosen, switch)
        switch.commit()
    return sum(len(found.responses or found.samples) for found in torn.values())


def _drop_samples(rundir: RunDir, dataset: str, chosen: HashSet, switch: Switch) -> None:
    with switch.stage(rundir.file(dataset, TOKENIZED), dataset) as kept:
        for line in iterate(rundir.file(dataset, TOKENIZED)):
            fact = fact_of(dataset, TOKENIZED, line.raw, line.offset)
            if fact is None or slot_of(fact.row_id, fact.completion_index) not in chosen:
                kept.write(line.raw + b"\n")

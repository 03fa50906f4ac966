"""Completions of several turns whose lines somebody moved, doubled or took away.

The ledger knows them (`Ledger.torn`). Where all turns are there, the lines are put in order again, behind the others,
and nothing is generated. Where one is missing, or two lines say different things of one, the rest could only stand
beside a group made anew, the same ids twice: its raw lines move to `superseded.jsonl`, its samples and rejection go,
and the run makes it again. Where only samples are out of order, they go and are derived again.
"""

from contextlib import suppress
from dataclasses import dataclass

from app.errors import UsageError
from app.jsonl import iterate
from app.ledger import Ledger
from app.ledger.files import LineFact, fact_of
from app.lock import hold
from app.manifest import RunFile
from app.offline.redo import cut_torn_end
from app.offline.retry import copy, move, slot_of
from app.offline.scratch import HashSet, Scratch, hash_of
from app.offline.switch import Switch
from app.rundir import RAW, SUPERSEDED, TOKENIZED, RunDir

_SCHEMA = """
CREATE TABLE line(slot BLOB, turn INTEGER, turns INTEGER, start INTEGER, hash BLOB, PRIMARY KEY(slot, turn))
    WITHOUT ROWID;
"""
_ADD = "INSERT INTO line VALUES(?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET turns = -1 WHERE hash <> excluded.hash"
_NOT_ALL_THERE = (
    "DELETE FROM line WHERE slot IN (SELECT slot FROM line GROUP BY slot HAVING min(turn) <> 0"
    " OR max(turn) <> count(*) - 1 OR min(turns) <> count(*) OR max(turns) <> count(*))"
)


@dataclass(slots=True)
class Mended:
    """Chats: put in order again; set aside to be generated again; without samples, until these are derived again."""

    put_in_order: int = 0
    set_aside: int = 0
    to_derive: int = 0

    def __str__(self) -> str:
        said = []
        if self.put_in_order:
            said.append(f"{self.put_in_order:,} chats had their turns in another order than they were made: put right")
        if self.set_aside:
            said.append(
                f"{self.set_aside:,} chats lack a turn that was there (or have two of one): what is left of them "
                f"moved to {SUPERSEDED}, and the next run makes them again"
            )
        if self.to_derive:
            said.append(
                f"{self.to_derive:,} chats had not all their samples, or not in order: the next run (or `headrace "
                "tokenize`) derives them again"
            )
        return "; ".join(said)


def are_torn(rundir: RunDir, ledger: Ledger) -> bool:
    """Whether there is anything to mend, as far as the ledger has read."""
    return any(any(ledger.torn(dataset)) for dataset in rundir.datasets_on_disk())


def mend_run(rundir: RunDir, run_file: RunFile) -> Mended:
    """`mend`, where rows may have several turns; what can be told at once of any other run is that nothing is torn."""
    return mend(rundir) if run_file.recipe.rendering.get("turns") == "all" else Mended()


def mend_if_free(rundir: RunDir, run_file: RunFile) -> Mended:
    """`mend_run`, unless somebody writes the files: a collector that goes on elsewhere did it when it began."""
    with suppress(UsageError), hold(rundir.writer_lock, "putting turns in order"):
        return mend_run(rundir, run_file)
    return Mended()


def mend(rundir: RunDir) -> Mended:
    """Bring all of them in order. For the writer of the files. Raises StorageError; each step is done or not."""
    done = Mended()
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        if not are_torn(rundir, ledger):
            return done
        for dataset in rundir.datasets_on_disk():
            for name in (RAW, TOKENIZED):
                cut_torn_end(rundir, dataset, name)
        ledger.catch_up()
        for dataset in rundir.datasets_on_disk():
            while any(torn := ledger.torn(dataset)):
                with Switch(rundir) as switch, HashSet() as chosen:
                    for row_id, index in torn.responses or torn.samples:
                        chosen.add(slot_of(row_id, index))
                    if torn.responses:
                        _mend_responses(rundir, dataset, chosen, switch, done)
                    else:
                        done.to_derive += len(torn.samples)
                        _drop_samples(rundir, dataset, chosen, switch)
                    switch.commit()
    return done


def set_unreadable_aside(rundir: RunDir, dataset: str, offsets: set[int]) -> None:
    """Completions whose raw lines begin at these bytes are made again, as a whole. For the writer of the files."""
    with Switch(rundir) as switch, HashSet() as chosen:
        for line in iterate(rundir.file(dataset, RAW)):
            if line.offset in offsets and (fact := fact_of(dataset, RAW, line.raw, line.offset)):
                chosen.add(slot_of(fact.row_id, fact.completion_index))
        move(rundir, dataset, chosen, switch)
        switch.commit()


def _mend_responses(rundir: RunDir, dataset: str, chosen: HashSet, switch: Switch, done: Mended) -> None:
    """Those that are not all there go; if there are none, the others are put in order."""
    with Scratch(_SCHEMA) as lines:
        for line in iterate(rundir.file(dataset, RAW)):
            fact = fact_of(dataset, RAW, line.raw, line.offset)
            if fact is not None and (slot := slot_of(fact.row_id, fact.completion_index)) in chosen:
                lines.run(_ADD, (hash_of(slot), fact.turn, fact.turns, line.offset, hash_of(line.raw)))
        lines.run(_NOT_ALL_THERE)
        (there,) = lines.one("SELECT count(DISTINCT slot) FROM line")
        if there == len(chosen):
            done.put_in_order += there
            _put_in_order(rundir, dataset, chosen, lines, switch)
            return
        done.set_aside += len(chosen) - there
        chosen.remove(slot for (slot,) in lines.all("SELECT DISTINCT slot FROM line"))
        move(rundir, dataset, chosen, switch)


def _put_in_order(rundir: RunDir, dataset: str, chosen: HashSet, lines: Scratch, switch: Switch) -> None:
    """A line that stands there twice is superseded by the first of the two."""
    path = rundir.file(dataset, RAW)
    with switch.stage(rundir.file(dataset, SUPERSEDED), dataset) as superseded, switch.stage(path, dataset) as kept:
        copy(rundir.file(dataset, SUPERSEDED), superseded)
        for line in iterate(path):
            fact = fact_of(dataset, RAW, line.raw, line.offset)
            if fact is None or slot_of(fact.row_id, fact.completion_index) not in chosen:
                kept.write(line.raw + b"\n")
            elif not _is_kept(lines, fact, line.offset):
                superseded.write(line.raw + b"\n")
        with path.open("rb") as file:
            for (start,) in lines.all("SELECT start FROM line ORDER BY slot, turn"):
                file.seek(start)
                kept.write(file.readline())


def _is_kept(lines: Scratch, fact: LineFact, start: int) -> bool:
    query = "SELECT start FROM line WHERE slot = ? AND turn = ?"
    return lines.one(query, (hash_of(slot_of(fact.row_id, fact.completion_index)), fact.turn)) == (start,)


def _drop_samples(rundir: RunDir, dataset: str, chosen: HashSet, switch: Switch) -> None:
    with switch.stage(rundir.file(dataset, TOKENIZED), dataset) as kept:
        for line in iterate(rundir.file(dataset, TOKENIZED)):
            fact = fact_of(dataset, TOKENIZED, line.raw, line.offset)
            if fact is None or slot_of(fact.row_id, fact.completion_index) not in chosen:
                kept.write(line.raw + b"\n")

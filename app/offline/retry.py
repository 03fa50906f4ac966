"""Completions made pending again: those rejected for one reason, or cut at their allowance.

Their raw lines move to `superseded.jsonl`, so that an id stands once in `raw_responses.jsonl`; samples and rejections
go. What was asked again and with what allowance stands in `retried.jsonl` (see `app.allowances`) and, as one entry, in
run.json. The recipe is not changed by that, and neither is the key: it is the same work, and the ledger, read anew,
says that it is not done. A completion of several turns goes as a whole.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from app.allowances import RETRIED
from app.aside import fingerprint
from app.jsonl import iterate
from app.ledger.files import LineFact, fact_of
from app.ledger.schema import unpack_row_id
from app.manifest import RunFile
from app.offline.redo import cut_torn_end, says, stage_run_file
from app.offline.scratch import HashSet
from app.offline.switch import Staged, Switch
from app.reasons import Reason
from app.records import completion_id
from app.rundir import RAW, REJECTED, SUPERSEDED, TOKENIZED, RunDir

_CUT = b'"length"'  # an unescaped quote ends a JSON string: no text can hold this


@dataclass(frozen=True, slots=True)
class Retry:
    """What is asked again. max_new_tokens None: with the allowance it had."""

    reason: Reason
    max_new_tokens: int | None = None


def retry(rundir: RunDir, run_file: RunFile, wanted: Retry) -> dict[str, int]:
    """Make them pending, inside `alone`; returns how many of each dataset. StorageError: nothing changed."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    counts: dict[str, int] = {}
    with Switch(rundir) as switch:
        with switch.stage(rundir.out / RETRIED) as said, switch.stage(rundir.put_aside) as aside:
            copy(rundir.out / RETRIED, said)
            copy(rundir.put_aside, aside)
            for dataset in rundir.datasets_on_disk():
                counts[dataset] = _retry(rundir, dataset, wanted, at, said, aside, switch)
        total = sum(counts.values())
        if total:
            allowance = wanted.max_new_tokens or 0
            entry = {"reason": wanted.reason, "max_new_tokens": allowance, "completions": total, "at": at}
            stage_run_file(switch, rundir, run_file.model_copy(update={"retries": [*run_file.retries, entry]}))
            switch.commit()
    return counts


def _retry(
    rundir: RunDir, dataset: str, wanted: Retry, at: str, said: Staged, aside: Staged, switch: Switch
) -> int:  # fmt: skip
    for name in (RAW, TOKENIZED, REJECTED):
        cut_torn_end(rundir, dataset, name)
    with HashSet() as chosen:
        count = 0
        for fact in _concerned(rundir, dataset, wanted.reason):
            if chosen.add(slot_of(fact.row_id, fact.completion_index)):
                count += 1
                said.write(_note(dataset, fact, wanted, at))
        if count:
            move(rundir, dataset, chosen, switch, aside)
        return count


def _concerned(rundir: RunDir, dataset: str, reason: Reason) -> Iterator[LineFact]:
    for line in iterate(rundir.file(dataset, REJECTED)):
        fact = fact_of(dataset, REJECTED, line.raw, line.offset)
        if fact is not None and fact.slot.reason == reason:
            yield fact
    if reason is Reason.TRUNCATED:  # kept or rejected: what was cut is cut
        for line in iterate(rundir.file(dataset, RAW)):
            fact = fact_of(dataset, RAW, line.raw, line.offset) if _CUT in line.raw else None
            if fact is not None and says(line.raw, "finish_reason", "length"):
                yield fact


def move(rundir: RunDir, dataset: str, chosen: HashSet, switch: Switch, aside: Staged | None = None) -> None:
    """New files without the chosen completions; their raw lines go behind the superseded ones.

    Redis may deliver any of them once more. Where they are not to come back, `aside` gets their fingerprints.
    """
    with ExitStack() as stack:
        superseded = stack.enter_context(switch.stage(rundir.file(dataset, SUPERSEDED), dataset))
        copy(rundir.file(dataset, SUPERSEDED), superseded)
        for name in (RAW, TOKENIZED, REJECTED):
            kept = stack.enter_context(switch.stage(rundir.file(dataset, name), dataset))
            for line in iterate(rundir.file(dataset, name)):
                fact = fact_of(dataset, name, line.raw, line.offset)
                if fact is None or slot_of(fact.row_id, fact.completion_index) not in chosen:
                    kept.write(line.raw + b"\n")
                    continue
                if aside is not None:
                    aside.write(fingerprint(line.raw) + b"\n")
                if name == RAW:
                    superseded.write(line.raw + b"\n")


def slot_of(row_id: bytes, completion_index: int) -> bytes:
    """What stands for a completion among those chosen."""
    return row_id + b":%d" % completion_index


def _note(dataset: str, fact: LineFact, wanted: Retry, at: str) -> bytes:
    row_id = unpack_row_id(fact.row_id)
    said = {
        "id": completion_id(dataset, row_id, 0, fact.completion_index), "dataset": dataset, "row_id": row_id,
        "completion_index": fact.completion_index, "reason": wanted.reason,
        "max_new_tokens": wanted.max_new_tokens or 0, "at": at,
    }  # fmt: skip
    return orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)


def copy(path: Path, to: Staged) -> None:
    """The whole lines of a file as they are."""
    for line in iterate(path):
        to.write(line.raw + b"\n")

"""The samples of a run derived again from its raw lines, with other filters: no server, no generation.

`raw_responses.jsonl` stays as it is. `tokenized_data.jsonl`, the lines of `rejected.jsonl` that come after generation,
and the filters in run.json change together (see `switch`), so that all samples of a run have passed the same filters.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from app.groups import Order, end_of_groups, grouped, place_of, slot_of_id
from app.jsonl import Appender, Line, iterate, parse
from app.manifest import RunFile
from app.offline.scratch import HashSet
from app.offline.switch import Switch
from app.reasons import Stage
from app.records import ResponseRecord, Sample, line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, samples_of
from app.verify_lines import whole


@dataclass(slots=True)
class Redone:
    """What came of the raw lines of a dataset."""

    dataset: str
    responses: int = 0
    samples: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  #: after generation, by reason
    unreadable: int = 0  #: damaged raw lines, left where they are
    doubled: int = 0  #: raw lines of completions that stand there twice; the first is taken
    gone: int = 0  #: samples of before whose raw lines are not there (any more)
    turns_apart: int = 0  #: raw lines of chats that lack a line beside them (it is damaged), left where they are

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "dataset": self.dataset, "responses": self.responses, "samples": self.samples,
            "rejected_by_reason": dict(sorted(self.rejected.items())), "unreadable": self.unreadable,
            "turns_apart": self.turns_apart, "doubled": self.doubled, "gone": self.gone,
        }  # fmt: skip


def redo(rundir: RunDir, run_file: RunFile, filters: SampleFilters) -> list[Redone]:
    """Derive all samples again; inside `alone`. Raises StorageError; then nothing has changed."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with Switch(rundir) as switch:
        done = [_redo(rundir, dataset, filters, now, switch) for dataset in rundir.datasets_on_disk()]
        stage_run_file(switch, rundir, run_file.model_copy(update={"filters": filters.to_json()}))
        switch.commit()
    return done


def stage_run_file(switch: Switch, rundir: RunDir, run_file: RunFile) -> None:
    """run.json as part of a change."""
    with switch.stage(rundir.run_json) as staged:
        staged.write(orjson.dumps(run_file.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def cut_torn_end(rundir: RunDir, dataset: str, name: str) -> None:
    """What a crash left half written goes first, as at every start of the collector."""
    if rundir.file(dataset, name).exists():
        Appender(rundir.file(dataset, name), end_of_groups if name in (RAW, TOKENIZED) else None).close()


def _redo(rundir: RunDir, dataset: str, filters: SampleFilters, now: str, switch: Switch) -> Redone:
    done = Redone(dataset)
    for name in (RAW, REJECTED):
        cut_torn_end(rundir, dataset, name)
    with ExitStack() as stack, HashSet() as taken:
        samples = stack.enter_context(switch.stage(rundir.file(dataset, TOKENIZED), dataset))
        rejected = stack.enter_context(switch.stage(rundir.file(dataset, REJECTED), dataset))
        for line in iterate(rundir.file(dataset, REJECTED)):
            if not says(line.raw, "stage", Stage.SAMPLE):
                rejected.write(line.raw + b"\n")
        for turns, order in grouped(_records(rundir, dataset, done), place_of):
            if order is not Order.WHOLE:
                done.turns_apart += len(turns)
                continue
            if not taken.add(slot_of_id(turns[0].id)):
                done.doubled += len(turns)
                continue
            for derived in samples_of(turns, filters, now):
                if isinstance(derived, Sample):
                    done.samples += 1
                    samples.write(line_of(derived))
                else:
                    done.rejected[derived.reason] += 1
                    rejected.write(line_of(derived))
        done.gone = sum(slot_of_id(one) not in taken for one in _ids(rundir.file(dataset, TOKENIZED)))
    return done


def _ids(path: Path) -> Iterator[str]:
    for line in iterate(path):
        with suppress(ValueError):
            yield whole(TOKENIZED, line.raw)["id"]


def _records(rundir: RunDir, dataset: str, done: Redone) -> Iterator[ResponseRecord | None]:
    for line in iterate(rundir.file(dataset, RAW)):
        try:
            record = ResponseRecord(**whole(RAW, line.raw))
        except ValueError:  # `verify` names it
            done.unreadable += 1
            yield None
        else:
            done.responses += 1
            yield record


def says(raw: bytes, name: str, value: str) -> bool:
    """Whether a line can be read and has this value."""
    try:
        return parse(raw).get(name) == value
    except ValueError:
        return False


def responses(rundir: RunDir, dataset: str) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Whole raw lines of a dataset, each with its fields; damaged ones are skipped."""
    for line in iterate(rundir.file(dataset, RAW)):
        try:
            yield line, whole(RAW, line.raw)
        except ValueError:
            continue

"""Small runs on disk, made by hand, for the tests of the files room."""

from collections.abc import Sequence
from typing import Any

from app.identity import bytes_digest, row_id, task_key
from app.jsonl import Appender
from app.reasons import STAGE_OF, Reason
from app.records import RejectedRecord, ResponseRecord, Sample, completion_id, line_of
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, sample_of

RECIPE = "0123456789abcdef"
AT = "2026-01-01T00:00:00+00:00"


def a_row(n: int) -> str:
    """Row id of the n-th row."""
    return row_id(digest(n), 1)


def digest(n: int) -> str:
    """Digest of the n-th row."""
    return bytes_digest(str(n).encode())


def response(row: str = a_row(1), dataset: str = "chat", index: int = 0, **changes: Any) -> ResponseRecord:
    """A response; give fields to change them. The counts follow the ids."""
    turn, recipe = changes.get("turn", 0), changes.get("recipe", RECIPE)
    prompt, output = changes.get("prompt_token_ids", [5, 6, 7]), changes.get("output_ids", [8, 9, 2])
    fields: dict[str, Any] = {
        "key": task_key(recipe, dataset, row, turn, index), "id": completion_id(dataset, row, turn, index),
        "primary_id": f"{dataset}:{row}", "dataset": dataset, "row_id": row, "source_id": "7", "row_number": 3,
        "turn": turn, "turns": 1, "completion_index": index, "prompt_token_ids": prompt, "output_ids": output,
        "text": "an answer", "finish_reason": "stop", "matched": "2", "num_prompt_tokens": len(prompt),
        "num_output_tokens": len(output), "max_new_tokens": 64, "recipe": recipe, "model": "teacher",
        "endpoint": "http://127.0.0.1:1", "server": "srv1", "attempt": 1, "stages": 1, "started_at": AT,
        "latency_seconds": 0.5, "meta_info": "{}",
    }  # fmt: skip
    return ResponseRecord(**fields | changes)


def rejection(row: str, reason: Reason, dataset: str = "chat", index: int = -1) -> RejectedRecord:
    """A rejection; index -1: of the whole row."""
    return RejectedRecord(
        key=task_key(RECIPE, dataset, row, 0, index), id=completion_id(dataset, row, 0, index),
        primary_id=f"{dataset}:{row}", dataset=dataset, row_id=row, source_id="", row_number=1,
        stage=STAGE_OF[reason], reason=reason, detail="because", attempts=0, at=AT,
    )  # fmt: skip


def write(rundir: RunDir, records: Sequence[ResponseRecord | Sample | RejectedRecord]) -> dict[tuple[str, str], int]:
    """Append records to the files they belong in; returns the sizes of these files."""
    ends = {}
    for record in records:
        name = {ResponseRecord: RAW, Sample: TOKENIZED, RejectedRecord: REJECTED}[type(record)]
        with Appender(rundir.file(record.dataset, name)) as file:
            file.append([line_of(record)])
            ends[record.dataset, name] = file.end
    return ends


def write_completed(rundir: RunDir, *records: ResponseRecord, filters: SampleFilters | None = None) -> None:
    """Append responses, and what is derived from them."""
    write(rundir, records)
    write(rundir, [sample_of(record, filters or SampleFilters(), AT) for record in records])

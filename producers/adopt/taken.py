"""The raw line that an answer becomes if it is trusted, and whether it is one that `headrace verify` would pass.

What a line says is put into our record as it is, and the record is then checked as any line of ours. Left out are only
values of fields that say nothing of the answer (endpoint, times): one of another type counts as not said.
"""

from dataclasses import dataclass, fields
from typing import Any

import orjson

from app.identity import task_key
from app.records import ResponseRecord, completion_id
from app.rundir import RAW
from app.verify_lines import SCHEMAS, Problem, field_problem, response_problem
from producers.adopt.foreign import ForeignLine
from producers.adopt.index import IndexedRow


@dataclass(frozen=True, slots=True)
class Taker:
    """What all lines that are taken have in common."""

    recipe: str  #: fingerprint
    max_new_tokens: int
    server: str  #: under which run.json has their origin
    at: str  #: now, ISO 8601, UTC

    def record_of(self, line: ForeignLine, row: IndexedRow, index: int) -> ResponseRecord:
        """The line as ours. Its values are as said: see `problem_of`."""
        said, place = line.said, (row.dataset, row.row_id, 0, index)
        return ResponseRecord(
            key=task_key(self.recipe, *place), id=completion_id(*place), primary_id=f"{row.dataset}:{row.row_id}",
            dataset=row.dataset, row_id=row.row_id, source_id=row.source_id, row_number=row.number, turn=0, turns=1,
            completion_index=index, prompt_token_ids=said["prompt_token_ids"], output_ids=said["output_ids"],
            text=said.get("text", ""), finish_reason=said.get("finish_reason"), matched=_matched(said),
            num_prompt_tokens=len(said["prompt_token_ids"]), num_output_tokens=len(said["output_ids"]),
            max_new_tokens=said.get("max_new_tokens", self.max_new_tokens), recipe=self.recipe,
            model=said.get("model", ""), endpoint=_if_text(said.get("endpoint"), ""), server=self.server, attempt=1,
            stages=1, started_at=_if_text(said.get("started_at"), self.at),
            latency_seconds=_if_number(said.get("latency_seconds")), meta_info=self._meta_info(line),
        )  # fmt: skip

    def _meta_info(self, line: ForeignLine) -> str:
        origin = {"file": str(line.file.path), "line": line.number, "at": self.at}
        return orjson.dumps({"adopted": origin, "meta_info": line.said.get("meta_info", {})}).decode()


def problem_of(record: ResponseRecord) -> Problem | None:
    """What `verify` would say of such a line: kind and detail."""
    said = {one.name: getattr(record, one.name) for one in fields(record)}  # `asdict` would copy the lists
    return field_problem(said, SCHEMAS[RAW]) or response_problem(said)


def _matched(said: dict[str, Any]) -> Any:
    """A stop id as text, as our lines have it; of a stop that does not say where, the last id."""
    matched = said.get("matched")
    if matched is None:
        return str(said["output_ids"][-1]) if said.get("finish_reason") == "stop" else ""
    return str(matched) if type(matched) is int else matched


def _if_text(value: Any, default: str) -> str:
    return value if isinstance(value, str) else default


def _if_number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else 0.0

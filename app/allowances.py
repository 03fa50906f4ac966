"""Which completions were made pending again, why, and with what allowance: OUT/retried.jsonl.

`headrace retry` writes it, the producer reads it. A completion asked again is the same work under the same key: the
recipe is the run's, and the allowance of this one completion stands here, in run.json and in its raw line.
"""

from pathlib import Path
from typing import Any

from app.jsonl import iterate, parse

RETRIED = "retried.jsonl"  #: id, dataset, row_id, completion_index, reason, max_new_tokens (0: as before), at


class Allowances:
    """Allowances of single completions, where they are not the run's. Memory: one entry per such completion."""

    def __init__(self, out: Path):
        self._by_row: dict[tuple[str, str], dict[int, int]] = {}
        for line in iterate(out / RETRIED):
            self._note(parse(line.raw))

    def _note(self, said: dict[str, Any]) -> None:
        if said["max_new_tokens"]:
            row = self._by_row.setdefault((said["dataset"], said["row_id"]), {})
            row[said["completion_index"]] = said["max_new_tokens"]

    def of(self, dataset: str, row_id: str) -> dict[int, int]:
        """Completion index → tokens; {} for a row that has the run's allowance. Index -1 stands for all of a row."""
        return self._by_row.get((dataset, row_id), {})

"""Small looks into a run, for the tests of this folder."""

import json
from pathlib import Path
from typing import Any

from tests.acceptance.harness import Run, status


def finished(run: Run, seconds: float = 600.0) -> bool:
    """Whether it completes; of its rows only those may be rejected whose random answer was the stop token alone."""
    code = run.wait(seconds)
    return code == 0 or (code == 5 and set(status(run.out)["totals"]["rejected_by_reason"]) == {"empty_output"})


def raw(out: Path) -> list[dict[str, Any]]:
    """The lines of all raw_responses.jsonl."""
    return [json.loads(line) for path in sorted(out.glob("*/raw_responses.jsonl")) for line in path.open("rb")]

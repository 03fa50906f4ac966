"""Rows that kill the server: each found and given up within the stated number of crashes, and nobody else harmed."""

import json
from contextlib import ExitStack

import pytest

from tests.acceptance.harness import TOKENIZER, ids, run, verified
from tests.acceptance.poison import deadly_token, server, stats, write_rows
from tests.belt import until

pytestmark = pytest.mark.timeout(300)  # real processes, on a machine that may be busy
STEADY = {"output_mean": 20, "step_seconds": 0.01}


def rejections(out):
    """The lines of all rejected.jsonl."""
    return [json.loads(line) for path in out.glob("*/rejected.jsonl") for line in path.open("rb")]


def test_a_poisoned_row_is_rejected_and_the_others_are_generated_once(tmp_path):
    """Two endpoints; crashes within the stated bound for the company there was; exit 5; nothing else rejected."""
    write_rows(tmp_path / "rows.jsonl", 120, (40,))
    deadly = {"crash_on_token": deadly_token(), "freeze_seconds": 0.1, "down_seconds": 0.3}
    with ExitStack() as stack:
        urls = [stack.enter_context(server(STEADY, **deadly)) for _ in range(2)]
        words = [word for url in urls for word in ("--endpoint", url)]
        words += ["--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--concurrency", 12]
        with run(tmp_path / "out", tmp_path / "rows.jsonl", *words) as started:
            assert started.wait(200) == 5, started.text()
        crashes = sum(until(lambda url=url: stats(url), what="stats")["crashes"] for url in urls)
    (rejected,) = rejections(tmp_path / "out")
    assert (rejected["reason"], rejected["row_number"]) == ("crashes_endpoint", 41)
    assert "0, 0 other requests" in rejected["detail"]
    assert 4 <= crashes <= 3 + 3
    found = ids(tmp_path / "out")
    assert len(found) == len(set(found)) == 119
    assert verified(tmp_path / "out")

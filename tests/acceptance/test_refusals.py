"""400s: a parameter or contract ends the run before it rejects its rows; a row that is to blame is rejected alone."""

import json

import pytest

from app.sglang.simulator import Faults, SimulatorConfig, running_simulator
from tests.acceptance.harness import TOKENIZER, headrace, ids, run, status, verified
from tests.acceptance.poison import deadly_token, write_rows

pytestmark = pytest.mark.timeout(300)  # real processes, on a machine that may be busy
INSTANT = {"id_low": 256, "id_high": 4000, "tokenizer_dir": str(TOKENIZER), "instant": True}


def words(path, *urls):
    """Arguments of a run."""
    endpoints = [word for url in urls for word in ("--endpoint", url)]
    return [path, *endpoints, "--tokenizer", TOKENIZER, "--max-new-tokens", 64]


@pytest.mark.long
def test_a_limit_that_no_canary_meets_ends_the_run_with_no_row_rejected(tmp_path):
    """A gateway that refuses our max_new_tokens: exit 2 with its answer, and every row still pending."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(data, 100, ())
    with running_simulator(SimulatorConfig(**INSTANT, faults=Faults(refuse_above_new_tokens=16))) as one:
        with run(out, *words(data, one.url)) as started:
            assert started.wait(150) == 2, started.text()
        assert "refused each of" in started.log.read_text()
        assert "HTTP 400" in started.log.read_text()
        totals = status(out)["totals"]
        assert (totals["rejected"], totals["generated"], totals["pending"]) == (0, 0, 100)


def test_rows_that_are_to_blame_are_rejected_alone_and_one_endpoint_s_refusal_is_not_the_last_word(tmp_path):
    """Three rows that every endpoint refuses, and an endpoint that refuses all: its rows are answered by the other."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(data, 60, (0, 1, 2))
    faults = {"refuse_on_token": deadly_token()}
    config = {**INSTANT, "instant": False, "output_mean": 20, "step_seconds": 0.01}
    with running_simulator(SimulatorConfig(**config, faults=Faults(**faults))) as one:
        with running_simulator(SimulatorConfig(**config, faults=Faults(**faults))) as two:
            with run(out, *words(data, one.url, two.url)) as started:
                assert started.wait(150) == 5, started.text()
    lines = [json.loads(line) for path in out.glob("*/rejected.jsonl") for line in path.open("rb")]
    assert sorted(line["row_number"] for line in lines) == [1, 2, 3]
    assert {line["reason"] for line in lines} == {"refused"}
    assert len(ids(out)) == 57
    assert verified(out)


def test_an_allowance_that_leaves_no_room_for_any_prompt_is_told_before_a_row_is_rejected(tmp_path):
    """--max-new-tokens beyond every context: exit 2."""
    data = tmp_path / "rows.jsonl"
    write_rows(data, 3, ())
    with running_simulator(SimulatorConfig(**INSTANT, context_length=1024)) as one:
        done = headrace("run", "--out", tmp_path / "out", *words(data, one.url), "--max-new-tokens", 1024)
    assert done.returncode == 2
    assert "--max-new-tokens 1024 leaves no endpoint room" in done.stderr

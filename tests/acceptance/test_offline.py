"""What is done to a finished run, and what the next `headrace run` makes of it."""

import json

import orjson
import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, ids, run, status, verified

ROWS = 30
#: Many answers are longer than 48 tokens, none is longer than 400.
SPREAD = SimulatorConfig(**IDS, output_mean=60, output_sigma=0.6, step_seconds=0.002, max_total_num_tokens=60_000)


@pytest.fixture(scope="module")
def endpoint():
    """A simulated server for this module."""
    with running_simulator(SPREAD) as one:
        yield one


@pytest.fixture
def words(endpoint, tmp_path):
    """The arguments of a run over thirty rows with a small allowance."""
    data = tmp_path / "chat.jsonl"
    data.write_bytes(b"".join((DEMO / "gsm8k.jsonl").read_bytes().splitlines(keepends=True)[:ROWS]))
    return [data, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 48]


def records(out) -> list[dict]:
    """Raw lines."""
    return [json.loads(line) for path in sorted(out.glob("*/raw_responses.jsonl")) for line in path.open("rb")]


def finish(out, words) -> None:
    """Run to the end."""
    with run(out, *words) as started:
        assert started.wait() == 0, started.text()


def test_only_the_cut_rows_are_generated_again_and_with_their_own_allowance(endpoint, words, tmp_path):
    """retry, then the same command: as many requests as answers were cut, the other lines untouched, verify holds."""
    out = tmp_path / "out"
    finish(out, words)
    before = {one["id"]: one for one in records(out)}
    cut = {name for name, one in before.items() if one["finish_reason"] == "length"}
    assert 0 < len(cut) < ROWS
    assert headrace("retry", out, "--reason", "truncated", "--max-new-tokens", 512).returncode == 0
    assert status(out)["totals"]["pending"] == len(cut)
    sent = endpoint.stats()["requests"]
    finish(out, words)
    after = {one["id"]: one for one in records(out)}
    assert endpoint.stats()["requests"] - sent <= len(cut) + 2  # and the canary of the start
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == cut
    assert {after[name]["max_new_tokens"] for name in cut} == {512}
    assert any(after[name]["num_output_tokens"] > 48 for name in cut)
    assert set(ids(out, "superseded.jsonl")) == cut
    assert verified(out)
    sent = endpoint.stats()["requests"]
    finish(out, words)
    assert endpoint.stats()["requests"] == sent


@pytest.mark.long
def test_samples_redone_stay_as_they_are_when_the_run_goes_on(words, tmp_path):
    """The filters that tokenize set stay in force, whatever the command line says by default; and it is said."""
    out = tmp_path / "out"
    finish(out, [*words, "--limit", 15])
    assert headrace("tokenize", out, "--truncated", "drop").returncode == 0
    with run(out, *words) as started:
        assert started.wait() == 5, started.text()
        assert "truncated drop → keep" in started.log.read_text()
    cut = sum(one["finish_reason"] == "length" for one in records(out))
    assert status(out)["totals"]["rejected_by_reason"] == {"truncated": cut}
    assert verified(out)


@pytest.mark.long
def test_what_was_adopted_is_not_generated(endpoint, words, tmp_path):
    """Twenty of thirty answers come from another run's files: ten are made, and verify holds."""
    first, out = tmp_path / "first", tmp_path / "out"
    finish(first, words)
    raw = first / "chat" / "raw_responses.jsonl"
    raw.write_bytes(b"".join(raw.read_bytes().splitlines(keepends=True)[:20]))
    done = headrace("adopt", out, first, words[0], "--tokenizer", TOKENIZER, "--max-new-tokens", 48, "--json")
    assert done.returncode == 0, done.stderr
    said = orjson.loads(done.stdout)
    assert (said["verdicts"], said["to_generate"]) == ({"trusted": 20}, 10)
    assert status(out)["totals"]["pending"] == 10
    sent = endpoint.stats()["requests"]
    finish(out, words)
    assert endpoint.stats()["requests"] - sent <= 12
    assert len(set(ids(out))) == ROWS
    assert verified(out)

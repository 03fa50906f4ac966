"""`headrace doctor` names what is wrong, layer by layer, with the exit code that a run would end with."""

import json

from click.testing import CliRunner

from app.cli.doctor import BYTES_PER_TOKEN
from app.cli.main import cli
from app.errors import OK, STORAGE, USAGE
from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.integration.test_preflight import redis_with


def examined(*words: str) -> tuple[int, dict[str, dict]]:
    """(exit code, finding by layer) of `headrace doctor … --json`."""
    result = CliRunner().invoke(cli, ["doctor", "--json", *words], standalone_mode=False, catch_exceptions=False)
    return result.return_value, {one["layer"]: one for one in json.loads(result.output)}


def test_without_options_it_looks_at_the_machine_and_says_how_to_ask_for_more():
    code, found = examined()
    assert code == OK
    assert found["packages"]["ok"] is found["Redis"]["ok"] is True
    assert found["endpoint"]["ok"] is found["tokenizer"]["ok"] is found["output"]["ok"] is None
    assert found["endpoint"]["remedy"] == "--endpoint URL"


def test_everything_in_order_is_told_with_its_figures(redis_url, demo_tokenizer, tmp_path):
    with running_simulator(SimulatorConfig(max_total_num_tokens=231_120)) as server:
        code, found = examined("--redis", redis_url, "--endpoint", server.url, "--tokenizer", str(demo_tokenizer),
                               "--out", str(tmp_path / "new"), "--rows", "10")  # fmt: skip
    assert code == OK
    assert "noeviction" in found["Redis"]["text"]
    assert "231,120 KV tokens" in found["endpoint"]["text"]
    assert "<think>" in found["tokenizer"]["text"]
    assert str(tmp_path) in found["output"]["text"]
    assert not (tmp_path / "new").exists()


def test_a_pool_smaller_than_the_context_is_told_with_what_it_means_for_rows():
    with running_simulator(SimulatorConfig(max_total_num_tokens=1000, context_length=2048)) as server:
        code, found = examined("--endpoint", server.url)
    assert code == OK
    assert "rows that need more than 998 tokens" in found["endpoint"]["remedy"]


def test_endpoints_of_two_models_are_a_fault():
    first, second = (running_simulator(SimulatorConfig(model_path=name)) for name in ("a", "b"))
    with first as one, second as two:
        code, found = examined("--endpoint", one.url, "--endpoint", two.url)
    assert code == USAGE
    assert "2 models" in found["endpoints"]["text"]


def test_an_endpoint_that_is_away_is_a_fault_with_its_address():
    code, found = examined("--endpoint", "http://127.0.0.1:9")
    assert code == USAGE
    assert "127.0.0.1:9" in found["endpoint"]["text"]


def test_a_redis_that_evicts_is_a_fault(tmp_path):
    with redis_with(tmp_path, "--maxmemory-policy", "allkeys-lru") as place:
        code, found = examined("--redis", f"redis://{place}")
    assert code == USAGE
    assert "noeviction" in found["Redis"]["text"]


def test_a_redis_that_is_away_ends_as_a_run_would():
    code, found = examined("--redis", "redis://127.0.0.1:1/0")
    assert code == STORAGE
    assert found["Redis"]["ok"] is False


def test_a_disk_too_small_for_what_is_to_come_is_a_fault(tmp_path):
    rows = 10**15 // BYTES_PER_TOKEN
    code, found = examined("--out", str(tmp_path), "--rows", str(rows))
    assert code == STORAGE
    assert "needed" in found["output"]["text"]


def test_a_tokenizer_that_is_none_is_a_fault(tmp_path):
    code, found = examined("--tokenizer", str(tmp_path))
    assert code == USAGE
    assert found["tokenizer"]["ok"] is False

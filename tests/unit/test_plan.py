"""The arithmetic of `headrace plan`, against figures of real servers and of the run that it was made for."""

import json
import shlex

import pytest
from click.testing import CliRunner

from app.capacity.plan import Busy, GPUMemory, HostCache, fit, scheduling_advice
from app.capacity.stages import Suggestion
from app.cli.main import cli
from app.errors import UsageError
from app.sglang.launch import launch_from_command, launch_of


def planned(line: str) -> dict:
    """`headrace plan … --json`."""
    result = CliRunner().invoke(cli, ["plan", "--json", *shlex.split(line)], catch_exceptions=False)
    return json.loads(result.output)


def test_a_pool_of_231120_tokens_holds_57_requests_of_4k():
    assert fit(231_120, 1000, 3000).grown == 57
    assert planned("--kv-tokens 231120 --avg-tokens 4000")["job"]["grown"] == 57


def test_a_flow_of_growing_requests_is_larger_and_limited_by_the_server():
    assert fit(231_120, 1150, 2700).flowing == 83  # the study of admission rules ends at 81 to 92 running
    limited = planned("--kv-tokens 231120 --avg-tokens 4000 --max-running-requests 48")["job"]
    assert (limited["flowing"], limited["grown"]) == (48, 48)
    assert "48 running requests" in limited["limit"]


def test_a_larger_memory_fraction_gives_its_part_of_free_memory_to_the_pool():
    before = GPUMemory(kv_tokens=116_171, kv_gib=14.80, mem_fraction=0.85, free_gib=183.054)
    assert round(before.bytes_per_token) == 136_793
    assert before.at_fraction(0.93).kv_tokens == pytest.approx(231_120, abs=5)


def test_a_pool_without_known_memory_is_not_guessed_at():
    assert GPUMemory(kv_tokens=1000, kv_gib=1.0).at_fraction(0.9) is None


@pytest.mark.parametrize(
    ("size", "verdict", "total"), [(48, "safe", 384), (50, "tight", 400), (300, "impossible", 2400)]
)
def test_hicache_size_is_per_rank(size, verdict, total):
    cache = HostCache(size, 8, 445)
    assert (cache.verdict, cache.total_gb, cache.safe_per_rank_gb) == (verdict, total, 48)
    advice = planned(f"--hicache-size {size} --tp 8 --host-free-gb 445")["advice"]
    assert f"{total:,} GB" in advice[0]
    assert "lets no more requests run" in advice[1]


@pytest.mark.parametrize(("size", "code"), [(48, 0), (50, 0), (300, 2)])
def test_what_cannot_be_ends_with_a_code_that_a_script_sees(size, code):
    line = ["plan", "--hicache-size", str(size), "--tp", "8", "--host-free-gb", "445"]
    result = CliRunner().invoke(cli, line, standalone_mode=False)
    assert result.return_value == code
    assert result.output.startswith("- hicache_size")


def test_a_launch_line_is_read_in_both_spellings():
    launch = launch_from_command(
        "sglang.launch_server --tp=8 --mem-fraction-static 0.93 --enable-hierarchical-cache --hicache-size 300"
    )
    assert (launch.tp_size, launch.mem_fraction, launch.hicache_size_gb) == (8, 0.93, 300)
    assert launch.hierarchical_cache


def test_a_launch_line_that_cannot_be_read_names_the_flag():
    with pytest.raises(UsageError, match="--tp 'eight' is no number"):
        planned("--kv-tokens 1000 --launch '--tp eight'")


def test_memory_of_a_real_server_is_read_from_its_own_words():
    body = {
        "mem_fraction_static": 0.907, "tp_size": 1, "max_total_num_tokens": 400_000,
        "internal_states": [{"memory_usage": {
            "weight": 3.279, "kvcache": 42.725, "startup_available": 92.617, "token_capacity": 400_000,
            "graph": {"prefill": 0.0, "decode": 0.348},
        }}],
    }  # fmt: skip
    launch = launch_of(body)  # figures of 0.5.17 on an H200
    assert (launch.kv_gib, launch.weights_gib, launch.free_gib, launch.graph_gib) == (42.725, 3.279, 92.617, 0.348)
    assert launch_of({}) == launch_from_command("")


def test_little_headroom_is_a_risk():
    advice = planned("--kv-tokens 116171 --kv-gib 14.8 --gpu-free-gib 100 --mem-fraction 0.85 --try-mem-fraction 0.93 "
                     "--weights-gib 74")["advice"]  # fmt: skip
    assert len(advice) == 1
    assert "mem_fraction_static 0.93 only 3.2 GiB" in advice[0]


def test_a_careful_server_gets_other_advice_than_one_that_retracts():
    assert "0.3" in scheduling_advice(Busy(use=0.8, waiting=200, conservativeness=1.0))
    stages = Suggestion(1500, use=0.8, staged_use=0.95)
    assert "--stage-tokens 1500" in scheduling_advice(Busy(use=0.8, waiting=200), stages)
    assert "--stage-tokens" not in scheduling_advice(Busy(use=0.8, waiting=200))
    assert scheduling_advice(Busy(use=0.95, waiting=200), stages) is None
    assert "7% of the answers" in scheduling_advice(Busy(use=0.9, waiting=0, retracted_share=0.07))
    assert scheduling_advice(Busy(use=0.95, waiting=0, retracted_share=0.03)) is None
    assert "1.3" in scheduling_advice(Busy(use=1.0, waiting=20, retracted=4))
    assert scheduling_advice(Busy(use=0.95, waiting=200)) is None
    assert scheduling_advice(Busy(use=0.5, waiting=0)) is None


def test_time_follows_from_rows_lengths_and_rate():
    job = planned("--kv-tokens 231120 --avg-tokens 4000 --rows 83000 --tokens-per-second 5000")["job"]
    assert job["wall_seconds"] == 83_000 * 3000 / 5000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "give --endpoint URL, or --kv-tokens N"),
        ("data.jsonl --kv-tokens 1000", "give --tokenizer DIR"),
        ("--kv-tokens 1000 --avg-tokens 10 --avg-prompt-tokens 10", "more than --avg-prompt-tokens"),
        ("--kv-tokens 1000 --try-mem-fraction 0.9", "--kv-gib"),
        ("--kv-tokens 1000 --kv-gib 1 --try-mem-fraction 0.9", "--mem-fraction and --gpu-free-gib"),
        ("--endpoint http://127.0.0.1:9", "plan with numbers"),
    ],
)
def test_what_is_missing_is_said(line, said):
    with pytest.raises(UsageError, match=said):
        planned(line)

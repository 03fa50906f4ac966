"""`headrace plan` asks a server, measures the prompts of a file, and learns lengths from a run."""

import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

from click.testing import CliRunner

from app.cli.main import cli
from app.manifest import Recipe, RunFile, write_run_file
from app.rundir import RunDir
from app.sglang.sampling import sampling_body
from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.belt import until
from tests.integration.simulator_client import generate
from tests.run_on_disk import AT, RECIPE, a_row, response, write


def planned(*words: str) -> dict:
    """`headrace plan … --json`."""
    return json.loads(CliRunner().invoke(cli, ["plan", "--json", *words], catch_exceptions=False).output)


def test_a_live_endpoint_and_a_file_say_what_fits_and_what_is_sent(tmp_path, demo_tokenizer):
    """Rows that cannot run are not counted, prompts are measured, capacity is the server's."""
    data = tmp_path / "d.jsonl"
    rows = [{"prompt": f"Question {n}: why is the sky blue?"} for n in range(8)] + [{"prompt": ""}, {"nothing": 1}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running_simulator(SimulatorConfig(max_total_num_tokens=231_120, max_running_requests=64)) as server:
        plan = planned(str(data), "--tokenizer", str(demo_tokenizer), "--endpoint", server.url, "--samples", "2")
    assert (plan["kv_tokens"], plan["max_running_requests"]) == (231_120, 64)
    assert plan["job"]["completions"] == 16
    assert 5 < plan["job"]["prompt_tokens"] < 60
    assert plan["job"]["output_tokens"] == 4096


def test_a_busy_server_and_the_answers_of_a_run_make_a_stage(tmp_path):
    """plan and doctor say the same number while requests wait there; none where the run's parameters forbid it."""
    sampling = sampling_body({"max_new_tokens": 256})
    config = SimulatorConfig(
        max_total_num_tokens=4000, max_running_requests=2, output_lengths="fixed", output_mean=64, step_seconds=0.003
    )
    said, over = {}, threading.Event()
    for name, body in (("plain", sampling), ("penalty", {**sampling, "frequency_penalty": 0.5})):
        rundir = RunDir(tmp_path / name)
        write(rundir, [response(a_row(n), output_ids=[8] * (20 + n)) for n in range(60)])
        write_run_file(rundir.run_json, RunFile(
            run_id="r", created_at=AT, headrace="0", recipe=Recipe(tokenizer={}, rendering={}, sampling=body),
            recipe_fingerprint=RECIPE, datasets=[],
        ))  # fmt: skip
    with running_simulator(config) as server, ThreadPoolExecutor(6) as pool, contextlib.ExitStack() as stack:
        stack.callback(over.set)  # before the pool waits for its threads

        def ask_on() -> None:
            while not over.is_set():
                generate(server.url, [7] * 40, 256)

        for _ in range(6):
            pool.submit(ask_on)
        until(lambda: server.stats()["waiting"] > 0, what="some wait")
        for name in ("plain", "penalty"):
            advice = planned("--endpoint", server.url, "--like", str(tmp_path / name))["advice"]
            words = ["doctor", "--json", "--endpoint", server.url, "--out", str(tmp_path / name)]
            found = json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).output)
            loads = [one["text"] for one in found if one["layer"] == "load"]
            said[name] = [re.findall(r"--stage-tokens (\d+)", " ".join(texts)) for texts in (advice, loads)]
            assert "--schedule-conservativeness 0.3" in " ".join(loads)
    assert said == {"plain": [["100"], ["100"]], "penalty": [[], []]}


def test_lengths_come_from_the_answers_of_another_run(tmp_path):
    rundir = RunDir(tmp_path / "out")
    records = [response(a_row(n), output_ids=[8] * (n + 1)) for n in range(5)]
    write(rundir, records)
    write_run_file(rundir.run_json, RunFile(
        run_id="r", created_at=AT, headrace="0", recipe=Recipe(tokenizer={}, rendering={}, sampling={}),
        recipe_fingerprint=RECIPE, datasets=[],
    ))  # fmt: skip
    job = planned("--kv-tokens", "100000", "--like", str(rundir.out))["job"]
    assert (job["prompt_tokens"], job["output_tokens"]) == (3, 3)
    assert "5 answers of" in job["lengths_from"]

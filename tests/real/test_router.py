"""Through sglang-router, two simulated servers behind it: what it repeats, what it hides, and what it survives."""

import asyncio
import json
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.sampling import sampling_body
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.embedded import end_with_parent
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, run, status, verified
from tests.belt import until
from tests.real.runs import raw
from tests.real.server import free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
STEADY = SimulatorConfig(**IDS, output_mean=40, step_seconds=0.01, max_total_num_tokens=24_000)
ROWS = 120


@contextmanager
def router(python, log, *flags):
    """A router over two simulated servers; its URL and them."""
    with running_simulator(STEADY) as one, running_simulator(replace(STEADY, seed=0)) as two:
        port, metrics = free_port(), free_port()
        command = [
            python, "-m", "sglang_router.launch_router", "--worker-urls", one.url, two.url, "--host", "127.0.0.1",
            "--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin",
            "--worker-startup-check-interval", "1", *flags,
        ]  # fmt: skip
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent()
            )
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _ready(url), 120, what=f"a router; see {log}")
            yield url, one, two
        finally:
            process.terminate()
            process.wait(30)


def _ready(url):
    try:
        workers = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return False
    return sum(bool(one.get("is_healthy")) for one in workers) == 2


def words(url):
    """A run through it, with no ceiling given."""
    return [DEMO / "gsm8k.jsonl", "--endpoint", url, "--tokenizer", TOKENIZER, "--max-new-tokens", 64, "--limit", ROWS]


@pytest.mark.parametrize("flags", [("--disable-retries",), ()], ids=["without its retries", "as it comes"])
def test_what_fails_is_asked_again_by_one_of_the_two(python, tmp_path, flags):
    """Each tenth answer is a 500. Without the router's retries each request is one attempt of ours, with them it
    repeats some itself. Nothing is lost or twice in the files; 64 are in flight, as the router tells no size."""
    out = tmp_path / "out"
    with router(python, tmp_path / "router.log", *flags) as (url, one, two):
        for server in (one, two):
            server.faults(internal_error=0.1)
        with run(out, *words(url)) as started:
            assert started.wait(240) == 0, started.text()
        failed = sum(server.stats()["faults"]["internal_error"] for server in (one, two))
        peak = max(server.stats()["peak_running"] for server in (one, two))
    attempts = sum(line["attempt"] for line in raw(out)) - ROWS
    assert failed > 3
    assert (attempts >= failed - 8) if flags else (attempts < failed / 2)  # canaries meet some of them
    assert 8 < peak <= 64
    assert verified(out)


def test_half_of_what_is_behind_it_may_die(python, tmp_path):
    """For ever, in mid-run: the other half does the rest, and no row is given up."""
    out = tmp_path / "out"
    with router(python, tmp_path / "router.log", "--disable-retries") as (url, _, two):
        with run(out, *words(url), "--concurrency", 8) as started:
            until(lambda: started.lines() > 20, 90, what="lines on disk")
            two.faults(freeze_seconds=0.5, down_seconds=-1)
            two.crash()
            assert started.wait(240) == 0, started.text()
    assert len(raw(out)) == ROWS
    assert not status(out)["totals"]["rejected"]
    assert verified(out)


def test_a_parameter_that_it_drops_is_refused(python, tmp_path):
    """Before a row is sent; those it knows go through."""
    with router(python, tmp_path / "router.log", "--disable-retries") as (url, one, two):
        sampling = json.dumps({"logit_bias": {"300": 2.0}})
        refused = headrace("run", "--out", tmp_path / "out", *words(url), "--sampling", sampling, timeout=120)
        assert refused.returncode == 2
        assert "which drops logit_bias" in refused.stderr
        asyncio.run(_leaves(url))
        until(lambda: not one.stats()["in_flight"] + two.stats()["in_flight"], 30, what="nothing in flight")


async def _leaves(url):
    """A request that we give up: the router has no /abort_request, so our going has to be enough."""
    async with SGLangClient() as client:
        sampling = sampling_body({"max_new_tokens": 20_000, "ignore_eos": True})
        with pytest.raises(Fault) as left:
            await client.generate(url, [300] * 9, sampling, rid=new_rid(), deadline_seconds=1.0)
        assert left.value.kind is FaultKind.TIMEOUT

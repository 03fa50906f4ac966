"""Whoever types wrong things or has a broken environment: real processes, seen from outside."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, run, status
from tests.belt import ROOT, until

KEY = "sk-key-that-nobody-may-see"
SLOW = SimulatorConfig(**IDS, output_mean=200, step_seconds=0.05)
FEW = ("--tokenizer", TOKENIZER, "--max-new-tokens", "64", "--limit", "5")


@pytest.fixture(scope="module")
def endpoint():
    """A simulated server that wants a key."""
    with running_simulator(SimulatorConfig(**IDS, output_mean=20, step_seconds=0.002, api_key=KEY)) as one:
        yield one


@pytest.fixture(scope="module")
def small_run(endpoint, tmp_path_factory):
    """A complete run of five rows with an API key; checked on its way that no process shows the key."""
    out = tmp_path_factory.mktemp("small") / "out"
    os.environ["HEADRACE_API_KEY"] = KEY
    try:
        with run(out, DEMO / "gsm8k.jsonl", "--endpoint", endpoint.url, *FEW) as started:
            started.child("worker")
            shown = [" ".join(child.cmdline()) for child in started.everything() if child.is_running()]
            assert started.wait() == 0, started.text()
    finally:
        del os.environ["HEADRACE_API_KEY"]
    assert len(shown) >= 4
    assert not any(KEY in line for line in shown)
    return out


def limited(*arguments: object, **options) -> subprocess.CompletedProcess:
    """`headrace` with options of subprocess.run."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *map(str, arguments)], cwd=ROOT, text=True, timeout=60,
        stdin=subprocess.DEVNULL, **{"capture_output": True, **options},
    )  # fmt: skip


def test_an_api_key_is_in_no_file_of_the_run(small_run):
    """Not in run.json, the settings, a log, Redis' AOF or a result."""
    files = [path for path in small_run.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("kind", ["missing", "garbage", "empty"])
def test_a_ledger_that_is_missing_or_damaged_is_made_again(small_run, kind):
    """It is a cache of the files: verify holds, status answers."""
    for path in (small_run / ".headrace").glob("ledger*"):
        path.unlink()
    if kind != "missing":
        (small_run / ".headrace" / "ledger.sqlite").write_bytes(os.urandom(9000) if kind == "garbage" else b"")
    assert status(small_run)["totals"]["responses"] == 5
    assert headrace("verify", small_run).returncode == 0


def test_redis_away_leaves_its_numbers_unknown(small_run):
    """-1, never 0; and no settings are needed to say what is on file."""
    done = headrace("status", small_run, "--json", "--redis", "redis://127.0.0.1:1")
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert shown["totals"]["in_flight"] == shown["totals"]["queued"] == shown["eta_seconds"] == -1 or shown["complete"]
    (small_run / ".headrace" / "settings.json").write_text("{")
    assert headrace("status", small_run).returncode == 0


def test_a_reader_that_leaves_changes_nothing(small_run):
    """`headrace status | head -0`: no traceback and the code as without; a full disk is exit 4."""
    reader, writer = os.pipe()
    os.close(reader)
    done = limited("status", small_run, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = limited("status", small_run, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 4
    assert done.stderr.startswith("headrace: No space left on device")


@pytest.mark.parametrize(
    "environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_neither_home_nor_locale_is_needed(small_run, environment):
    """An empty environment, as cron and containers give it; what is no ASCII still comes out as UTF-8."""
    done = limited("status", small_run, env=environment)
    assert done.returncode == 0, done.stderr
    assert "·" in done.stdout


def test_few_open_files_are_said_and_fewer_tasks_held(endpoint, tmp_path):
    """`ulimit -n 256`: the soft limit is raised as far as it goes; below that the worker holds what fits."""
    words = ["run", DEMO / "gsm8k.jsonl", "--endpoint", endpoint.url, *FEW, "--out", tmp_path / "out"]
    lower = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))}
    done = limited(*words, **lower, env={**os.environ, "HEADRACE_API_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert "holds 156 tasks instead of 1000" in done.stderr
    assert '"slots": 156' in (tmp_path / "out" / ".headrace" / "settings.json").read_text()


def test_a_start_that_is_refused_leaves_no_new_directory(tmp_path):
    """Whatever it is refused for; one that was there stays, with what is in it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine").write_text("")
    words = ["run", DEMO / "gsm8k.jsonl", "--endpoint", "http://127.0.0.1:1", "--tokenizer", TOKENIZER, "--out"]
    for out in (tmp_path / "new", here):
        done = headrace(*words, out, "--chat-template", tmp_path / "none")
        assert (done.returncode, "cannot be read" in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()
    assert (here / "mine").exists()


def test_a_recipe_may_change_until_an_endpoint_was_met(endpoint, tmp_path):
    """A start that failed leaves nothing that binds: nothing was sent, so a corrected option is no other recipe."""
    words = ["run", DEMO / "gsm8k.jsonl", *FEW, "--endpoint-wait", "0.1", "--out", tmp_path / "out"]
    first = headrace(*words, "--endpoint", "http://127.0.0.1:1")
    assert first.returncode == 3
    assert os.strerror(111) in first.stderr
    assert not list((tmp_path / "out").glob("*/raw_responses.jsonl"))
    second = headrace(*words, "--endpoint", "http://127.0.0.1:1", "--temperature", "0.5")
    assert second.returncode == 3, second.stderr


def test_stopping_ends_even_while_a_process_waits_to_be_started_again(tmp_path):
    """After its second death a worker is started again only after a pause: SIGTERM in there ends the run."""
    words = [DEMO / "gsm8k.jsonl", *FEW, "--drain-seconds", "1"]
    with running_simulator(SLOW) as one, run(tmp_path / "out", *words, "--endpoint", one.url) as started:
        for deaths in (1, 2):
            started.child("worker", "--name").send_signal(signal.SIGKILL)
            until(lambda deaths=deaths: started.text().count("worker-1 ended") == deaths, what="its death is seen")
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(30) == 3, started.text()

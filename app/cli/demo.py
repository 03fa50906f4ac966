"""`headrace demo`: the main job on bundled prompts, against two simulated servers, one of which crashes on the way."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path

from app.cli.talk import say, show
from app.errors import SOME_REJECTED, HeadraceError
from app.store.embedded import end_with_parent

_SERVER = {
    "max_total_num_tokens": 16_000, "context_length": 8192, "output_mean": 120.0, "output_sigma": 0.5,
    "step_seconds": 0.015, "id_low": 256, "id_high": 4000, "eos_id": 163_586,
}  # fmt: skip
_CRASH = {"crash_after_completions": 45, "crashes_left": 1, "freeze_seconds": 1.0, "down_seconds": 3.0}


def run_demo(out: Path | None) -> int:
    """Run it; returns 0 if everything held. The files stay in `out`, or in a new directory."""
    from app.cli.inspect import verify_command
    from app.cli.run import run_command

    data = Path(str(resources.files("app") / "demo_data"))
    out = out or Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    started = time.monotonic()
    say("two simulated SGLang servers; the second one will crash on the way and come back")
    with ExitStack() as stack:
        urls = [
            stack.enter_context(simulated_server(data / "tokenizer", faults)) for faults in ({}, _CRASH)
        ]
        code = run_command({
            "inputs": [str(data / "gsm8k.jsonl"), str(data / "glaive_tools.json")], "endpoints": urls,
            "tokenizer": str(data / "tokenizer"), "out": out, "max_new_tokens": 512,
            "request_timeout_seconds": 60.0, "temperature": 0.6,
        }, line_seconds=3.0)  # fmt: skip
    if code not in (0, SOME_REJECTED):
        return code
    show(f"\nheadrace verify {out}")
    verify_command(out, as_json=False)
    show(f"\n{time.monotonic() - started:.0f} s. The files lie in {out}:")
    for path in [*sorted(out.glob("*/*.jsonl")), out / "run.json"]:
        show(f"  {path.relative_to(out)}  {path.stat().st_size:,} bytes")
    return 0


@contextmanager
def simulated_server(tokenizer: Path, faults: dict) -> Iterator[str]:
    """A `headrace simulate` process; yields its URL."""
    config = {**_SERVER, "tokenizer_dir": str(tokenizer)}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "simulate", "--port", "0",
         "--config", json.dumps(config), "--faults", json.dumps(faults)],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True, text=True, env=os.environ,
        preexec_fn=end_with_parent(),
    )  # fmt: skip
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise HeadraceError("A simulated server did not start.")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

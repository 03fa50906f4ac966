"""What a process loads: everybody waits for it at each start, and pays for it in each process of a run."""

import subprocess
import sys

import pytest

from tests.architecture.test_walls import ROOT

_EVERYTHING = {
    "transformers", "tokenizers", "celery", "redis", "pydantic", "httpx", "aiohttp", "rich", "sqlite3", "numpy",
}  # fmt: skip


def loaded(code: str) -> set[str]:
    """Of these libraries, what a process has when it did this."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True, timeout=60)
    return _EVERYTHING & set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import app.cli.main", set()),
        ("import workers.process", _EVERYTHING - {"transformers", "tokenizers", "sqlite3", "numpy"}),
        ("import workers.collector", {"redis", "pydantic", "sqlite3"}),
        ("import app.cli.inspect, app.cli.watching", {"redis", "pydantic", "sqlite3"}),
    ],
    ids=["help", "worker", "collector", "status"],
)
def test_a_process_loads_what_it_needs(code, allowed):
    """`--help` is instant; only who renders has a tokenizer; only who speaks to servers has HTTP."""
    assert loaded(code) <= allowed

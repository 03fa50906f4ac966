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


_COUNTED = """
import sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, about: opened.append(str(about[0])) if event == "open" else None)
from app.tokenization import Renderer, RenderOptions
Renderer(RenderOptions("app/demo_data/tokenizer"))
sources = [name for name in opened if "/transformers/models/" in name and name.endswith(".py")]
assert sources, "it reads none: app.tokenization._auto_tokenizer is in vain"
assert len(sources) < 1.1 * len(set(sources)), (len(sources), len(set(sources)))
"""


def test_a_tokenizer_is_loaded_without_reading_all_models_twice():
    """A quarter of each start; pinned, since what is spared is inside transformers."""
    subprocess.run([sys.executable, "-c", _COUNTED], cwd=ROOT, check=True, timeout=60)

"""What the suite is played against, from the environment that `make test-real` sets.

REAL_SGLANG: the folder that setup.sh filled. ENDPOINTS (with TOKENIZER, and HEADRACE_API_KEY where they want one):
servers that run elsewhere; tests that must start, limit or kill a server are left out.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real.server import RealServer, get, running_server
from tests.tokenizers import compact

ENDPOINTS = tuple(url for url in os.environ.get("ENDPOINTS", "").split(",") if url)
FOLDER = os.environ.get("REAL_SGLANG", "")
API_KEY = os.environ.get("HEADRACE_API_KEY", "")  # the root conftest takes it away before each test


@dataclass(frozen=True)
class Target:
    """A server of the suite that no test kills, and what a client must know of it."""

    url: str
    tokenizer: Path
    key: str
    context: int
    version: str


@pytest.fixture(autouse=True)
def _key_of_the_endpoints(monkeypatch, _clean_environment):
    """Commands that tests start find the key of servers elsewhere."""
    if API_KEY:
        monkeypatch.setenv("HEADRACE_API_KEY", API_KEY)


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the real SGLang's venv."""
    if ENDPOINTS:
        pytest.skip("needs a server of its own, and ENDPOINTS are given")
    if not FOLDER:
        pytest.skip("REAL_SGLANG is not given: use `make test-real`")
    return Path(FOLDER).absolute() / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def models(python, tmp_path_factory) -> tuple[Path, Path]:
    """Two models of one tokenizer and different weights."""
    folders = []
    for seed in (0, 1):
        folder = compact(tmp_path_factory.mktemp("models") / f"tiny-{seed}")
        subprocess.run([python, Path(__file__).with_name("make_model.py"), folder, str(seed)], check=True)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def serve(python, models, tmp_path_factory) -> Callable:
    """Starts a server of its own for a `with`: serve(*flags, model=0, context=…, kv=…, running=…)."""

    @contextmanager
    def started(*flags: str, model: int = 0, **sizes: int) -> Iterator[RealServer]:
        log = tmp_path_factory.mktemp("server") / "server.log"
        with running_server(python, models[model], log, *flags, **sizes) as server:
            yield server

    return started


@pytest.fixture(scope="session")
def targets(request) -> Iterator[list[Target]]:
    """Servers that tests share: those of ENDPOINTS, or one of our own."""
    with ExitStack() as stack:
        if ENDPOINTS:
            tokenizer = Path(os.environ["TOKENIZER"])
            yield [_target(url, tokenizer, API_KEY) for url in ENDPOINTS]
        else:
            server = stack.enter_context(request.getfixturevalue("serve")())
            yield [_target(server.url, server.model, "")]


@pytest.fixture
def target(targets) -> Target:
    """One of them; whatever a test did to it, it must serve afterwards."""
    yield targets[0]
    assert get(targets[0].url, "/health", targets[0].key).status_code == 200, "the server did not survive this test"


def _target(url: str, tokenizer: Path, key: str) -> Target:
    card = get(url, "/v1/models", key).json()["data"][0]
    info = get(url, "/server_info", key).json()
    return Target(url.rstrip("/"), tokenizer, key, card["max_model_len"], info["version"])


@pytest.fixture
def run_words(targets) -> Callable[..., list[object]]:
    """The words of a run over files, at all shared servers or the URLs given."""

    def words(*data: object, urls: tuple[str, ...] = (), max_new_tokens: int = 48) -> list[object]:
        endpoints = urls or tuple(one.url for one in targets)
        options = [word for url in endpoints for word in ("--endpoint", url)]
        return [*data, *options, "--tokenizer", targets[0].tokenizer, "--max-new-tokens", max_new_tokens]

    return words

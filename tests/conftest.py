"""Fixtures that every tier uses: a real private Redis, emptied before each test."""

from pathlib import Path

import hypothesis
import pytest

from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH

# A machine may be busy: how long an example took proves nothing.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A real server for the whole session, shared by tests that only need its commands."""
    server = PrivateServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server):
    """Its address, emptied; known to have no holders from before (so nothing has to settle)."""
    client = connect(redis_server.url)
    client.flushall()
    client.set(EPOCH, 0)
    client.close()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url):
    """A synchronous client on it."""
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """No setting of the person who runs the tests reaches them."""
    for name in ("HEADRACE_API_KEY", "HEADRACE_REDIS", "HEADRACE_SETTINGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def demo_tokenizer():
    """The bundled tokenizer directory."""
    return Path(__file__).parent.parent / "app" / "demo_data" / "tokenizer"


@pytest.fixture(scope="session")
def kimi_tokenizer(tmp_path_factory):
    """A tokenizer directory of Kimi's shape and a real vocabulary."""
    from tests.tokenizers import kimi_shaped

    return kimi_shaped(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="session")
def deepseek_tokenizer():
    """DeepSeek's tokenizer directory."""
    from tests.tokenizers import deepseek

    return deepseek()

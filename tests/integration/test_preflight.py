"""Before anything is enqueued: a Redis to trust and endpoints that take the run; else one sentence and its code."""

import os
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from app.errors import HeadraceError, Incomplete, StorageError, UsageError
from app.preflight import survey
from app.sglang.sampling import sampling_body
from app.sglang.simulator import Faults, SimulatorConfig, running_simulator
from app.sglang.wire import EndpointInfo
from app.store.connection import AWAY, check, connect
from app.store.embedded import end_with_parent, server_binary
from tests.belt import VOCAB, until


@contextmanager
def redis_with(tmp_path, *options: str):
    """The URL of a server of ours with these options."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path), *options]
    process = subprocess.Popen([server_binary(), *words], stdout=subprocess.DEVNULL, preexec_fn=end_with_parent())
    try:
        until(lambda: not _refuses(port), what="a Redis")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def checked(url: str) -> None:
    """Both steps of every command that needs Redis."""
    check(connect(url), url)


def test_a_redis_that_evicts_is_refused_with_the_remedy(tmp_path):
    """It would lose queued rows silently."""
    with redis_with(tmp_path, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as place:
        with pytest.raises(UsageError, match="CONFIG SET maxmemory-policy noeviction"):
            checked(f"redis://{place}")


def test_a_replica_is_refused(redis_server, tmp_path):
    """Nothing can be enqueued there."""
    with redis_with(tmp_path, "--replicaof", "127.0.0.1 1") as place:
        with pytest.raises(UsageError, match="read-only replica"):
            checked(f"redis://{place}")


def test_a_password_that_is_wrong_or_missing_is_told_and_not_shown(tmp_path):
    """Exit 4; the one given is masked."""
    with redis_with(tmp_path, "--requirepass", "right") as place:
        for url in (f"redis://{place}", f"redis://:wrongsecret@{place}"):
            with pytest.raises(StorageError, match="refuses the password") as raised:
                checked(url)
            assert "wrongsecret" not in str(raised.value)
        checked(f"redis://:right@{place}")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere.sock", "redis://nohost.invalid:1"])
def test_a_redis_that_is_not_there_is_told_at_once(url):
    """Exit 4 with address and remedy."""
    started = time.monotonic()
    with pytest.raises(StorageError, match="correct --redis"):
        checked(url)
    assert time.monotonic() - started < 6
    assert AWAY


@pytest.mark.parametrize("url", ["http://x:1", "x", "127.0.0.1:6379", ""])
def test_what_is_no_redis_url_shows_the_form(url):
    """Exit 2."""
    with pytest.raises(UsageError, match="redis://host:6379/0"):
        connect(url)


def surveyed(*urls: str, key: str = "", wait: float = 0.5, **parameters):
    """A survey with what it said."""
    said: list[str] = []
    secret = SecretStr(key) if key else None
    sampling = sampling_body({"max_new_tokens": 8, **parameters})
    found = survey(urls, sampling, api_key=secret, vocab_size=VOCAB, wait_seconds=wait, say=said.append)
    return found, said


@contextmanager
def endpoint(faults: dict | None = None, **config):
    """A simulated server."""
    with running_simulator(SimulatorConfig(instant=True, **config, faults=Faults(**(faults or {})))) as one:
        yield one.url


def refusal(*urls: str, kind: type[HeadraceError] = UsageError, **options) -> str:
    """The sentence of a survey that fails."""
    with pytest.raises(kind) as raised:
        surveyed(*urls, **options)
    assert type(raised.value) is kind
    return str(raised.value)


def test_an_endpoint_that_wants_another_key_ends_the_run_at_once():
    """Exit 2, the remedy, and no key in it."""
    with endpoint(api_key="right") as url:
        told = refusal(url, key="wrongsecret")
        assert "HEADRACE_API_KEY" in told
        assert url in told
        assert "wrongsecret" not in told
        assert isinstance(surveyed(url, key="right")[0][url], EndpointInfo)


def test_a_router_that_would_drop_a_parameter_ends_the_run_and_serves_without_it():
    """Every answer would be another than the recipe says."""
    with endpoint(behind_router=True) as url:
        assert f"{url}: it is sglang-router, which drops logit_bias" in refusal(url, logit_bias={"5": 1.0})
        found = surveyed(url, sampling_seed=7)[0][url]
        assert (found.model, found.context_length, found.kv_tokens) == ("simulated/teacher", None, None)


def test_an_address_without_an_sglang_ends_the_run_at_once():
    """404: waiting mends nothing."""
    with endpoint() as url:
        assert "correct --endpoint" in refusal(url + "/elsewhere")


@pytest.mark.parametrize("fault", ["no_output_ids", "prefixed_output_ids"])
def test_a_server_that_returns_no_true_ids_ends_the_run_with_the_reason(fault):
    """Exit 2: which field, and which version is wanted."""
    with endpoint({fault: 1.0}) as url:
        told = refusal(url)
        assert "output_ids" in told
        assert "SGLang 0.5.6 or newer" in told


def test_endpoints_that_do_not_answer_are_each_named_with_their_evidence():
    """Said while waiting, then exit 3 once --endpoint-wait is over."""
    dead = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    said: list[str] = []
    with pytest.raises(Incomplete) as raised:
        survey(dead, sampling_body({"max_new_tokens": 8}), api_key=None, vocab_size=VOCAB, wait_seconds=1.6,
               say=said.append)  # fmt: skip
    for text in (said[0], str(raised.value)):
        for url in dead:
            assert f"{url}: " in text
        assert text.count(os.strerror(111)) == 2
    assert "--endpoint-wait" in str(raised.value)


def test_an_endpoint_that_accepts_and_never_answers_does_not_hold_us():
    """--endpoint-wait counts from the start, whatever a connection does."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        started = time.monotonic()
        assert "no answer yet" in refusal(f"http://127.0.0.1:{mute.getsockname()[1]}", kind=Incomplete)
        assert time.monotonic() - started < 10


def test_one_that_answers_is_enough():
    """A dead one beside it is kept with its evidence, and does not stop the run."""
    with endpoint() as url:
        started = time.monotonic()
        found, _ = surveyed(url, "http://127.0.0.1:1")
        assert time.monotonic() - started < 3  # nobody waits for one whose trouble is known
        assert isinstance(found[url], EndpointInfo)
        assert os.strerror(111) in found["http://127.0.0.1:1"]

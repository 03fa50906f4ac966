"""A Redis behind TLS with a user of few rights, endpoints that want a key: it works, and no secret is left anywhere."""

import asyncio
import re
import ssl
import subprocess
from pathlib import Path

import psutil
import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.acceptance.harness import DEMO, IDS, TOKENIZER, headrace, ids, run, verified
from tests.belt import ROOT, until
from tests.own_redis import OwnRedis
from tests.proxy import Proxy, running

KEY, PASSWORD = "sk-very-secret-key", "very-secret-password"
ACL = re.search(r"ACL SETUSER (headrace .*)", (ROOT / "docs" / "operating" / "security.md").read_text()).group(1)


class TlsProxy(Proxy):
    """As a TLS terminator before Redis."""

    def __init__(self, upstream: str, folder: Path):
        super().__init__(upstream)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.pem", folder / "server.key")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]


@pytest.fixture
def certificate(tmp_path) -> Path:
    """A folder with a certificate for 127.0.0.1 and the authority that signed it."""
    folder = tmp_path / "tls"
    folder.mkdir()
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    by_ca = ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    for name, more in (("ca", []), ("server", [*by_ca, "-addext", "basicConstraints=critical,CA:FALSE"])):
        out = ["-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        subprocess.run([*new, *more, *out], check=True, capture_output=True)
    return folder


def command_lines(process: psutil.Process) -> str:
    """Of a process and all below it, as `ps` shows them."""
    words = []
    for one in (process, *process.children(recursive=True)):
        try:
            words += one.cmdline()
        except psutil.Error:
            continue
    return " ".join(words)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_secrets_are_left_nowhere_and_few_rights_are_enough(certificate, tmp_path, monkeypatch):
    """TLS with an authority of our own, the documented rights, a key: complete; then everything is searched."""
    config = SimulatorConfig(**IDS, api_key=KEY, output_lengths="fixed", output_mean=20, step_seconds=0.02)
    out = tmp_path / "out"
    with OwnRedis(tmp_path / "redis") as box, running_simulator(config) as endpoint:
        box.client().execute_command("ACL", "SETUSER", *ACL.replace("PASSWORD", PASSWORD).split())
        with running(TlsProxy(box.url, certificate)) as proxy:
            url = f"rediss://headrace:{PASSWORD}@127.0.0.1:{proxy.port}/0"
            words = [DEMO / "gsm8k.jsonl", "--limit", 40, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER,
                     "--max-new-tokens", 32, "--concurrency", 8]  # fmt: skip
            monkeypatch.setenv("HEADRACE_API_KEY", KEY)
            monkeypatch.setenv("HEADRACE_REDIS", url)
            strange = headrace("run", "--out", out, *words)
            assert strange.returncode == 4, strange.stderr  # nobody we trust signed that certificate
            assert "certificate" in strange.stderr
            monkeypatch.setenv("HEADRACE_REDIS", f"{url}?ssl_ca_certs={certificate / 'ca.pem'}")
            with run(out, *words) as started:
                until(lambda: started.lines() > 8, 90, what="lines on disk")
                shown = command_lines(psutil.Process(started.process.pid))
                stored = b" ".join(_everything_in(box.client()))
                assert started.wait() == 0, started.text()
    assert len(set(ids(out))) == 40
    assert verified(out)
    found = [path for path in tmp_path.rglob("*") if path.is_file() and holds_secret(path.read_bytes())]
    assert found == [out / ".headrace" / "settings.json"]  # where `status` finds the run's Redis
    assert KEY.encode() not in found[0].read_bytes()
    assert found[0].stat().st_mode & 0o077 == 0
    assert "app.cli.main worker" in shown
    assert not holds_secret(shown.encode())
    assert b"headrace" in stored
    assert not holds_secret(stored + strange.stderr.encode())


def test_a_key_that_is_refused_is_not_said_back(tmp_path, monkeypatch):
    """The sentence about a 401, and every log, without the key."""
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    with running_simulator(SimulatorConfig(**IDS, api_key="another")) as endpoint:
        done = headrace("run", DEMO / "gsm8k.jsonl", "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--out",
                        tmp_path / "out")  # fmt: skip
    assert done.returncode == 2
    assert not holds_secret((done.stdout + done.stderr).encode())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and holds_secret(path.read_bytes())]


def holds_secret(data: bytes) -> bool:
    return KEY.encode() in data or PASSWORD.encode() in data


def _everything_in(client) -> list[bytes]:
    """Every key of Redis and its value, as it is serialised."""
    names = list(client.scan_iter("*"))
    return [part for name in names for part in (name, repr(_value(client, name)).encode())]


def _value(client, name: bytes) -> object:
    kind = client.type(name).decode()
    read = {"string": client.get, "hash": client.hgetall, "set": client.smembers, "stream": client.xrange,
            "list": lambda key: client.lrange(key, 0, -1), "zset": lambda key: client.zrange(key, 0, -1)}  # fmt: skip
    return read[kind](name) if kind in read else None



"""Every way in which the network can fail a request, provoked with a real socket."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import httpx
import orjson
import pytest

from app.sglang import client as client_module
from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.transport import AiohttpTransport

SAMPLING = {"max_new_tokens": 4}
ANSWER = orjson.dumps(
    {
        "output_ids": [8, 9],
        "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 3, "completion_tokens": 2},
    }
)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A raw server; `handler` gets each connection. Its URL comes out."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(run, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One whole request, its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    await reader.readexactly(int(length.split(b":")[1]))
    return head


async def generate(client: SGLangClient, url: str, deadline_seconds: float = 20.0):
    """A generation as a worker asks for it."""
    return await client.generate(url, [1, 2, 3], SAMPLING, rid=new_rid(), deadline_seconds=deadline_seconds)


async def fault_of(url: str, **kwargs: float) -> Fault:
    """The fault of one request to that URL."""
    async with SGLangClient() as client:
        with pytest.raises(Fault) as caught:
            await generate(client, url, **kwargs)
    return caught.value


def answering(raw: bytes) -> Handler:
    """Reads one request, writes these bytes, closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw)
        await writer.drain()

    return handler


async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads one request and closes with RST."""
    await read_request(reader)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        pytest.param(resetting, FaultKind.RESET, id="reset"),
        pytest.param(answering(b""), FaultKind.DISCONNECTED, id="closed without a byte"),
        pytest.param(answering(OK[:20]), FaultKind.DISCONNECTED, id="closed inside the head"),
        pytest.param(answering(OK[:-5]), FaultKind.DISCONNECTED, id="closed inside the body"),
        pytest.param(
            answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n20\r\nhalf"),
            FaultKind.DISCONNECTED, id="closed inside a chunk"),
        pytest.param(answering(b"SSH-2.0-OpenSSH\r\n\r\n"), FaultKind.DISCONNECTED, id="not HTTP"),
        pytest.param(
            answering(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope"),
            FaultKind.BAD_BODY, id="body not in its encoding"),
    ],
)  # fmt: skip
def test_a_connection_that_breaks_after_sending_may_have_reached_the_server(handler, kind):
    """Each kind of break is told apart; none is called a failure to connect, so a row that kills can be seen."""

    async def main() -> Fault:
        async with server(handler) as url:
            fault = await fault_of(url)
            assert url in fault.detail
            return fault

    fault = asyncio.run(main())
    assert (fault.kind, fault.reached, fault.chargeable) == (kind, True, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_never_reached_anybody(host):
    """Nobody listens: no row is to blame."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port
        fault = asyncio.run(fault_of(f"http://{host}:{free.getsockname()[1]}"))
    assert (fault.kind, fault.reached, fault.chargeable) == (FaultKind.UNREACHABLE, False, False)


def test_an_unknown_host_never_reached_anybody():
    """A name that never resolves (RFC 6761)."""
    assert asyncio.run(fault_of("http://nowhere.invalid:1")).kind is FaultKind.UNREACHABLE


def test_tls_against_a_plain_server_never_reached_anybody():
    """https:// to a server without TLS."""

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def main() -> Fault:
        async with server(plain) as url:
            return await fault_of(url.replace("http://", "https://"))

    assert asyncio.run(main()).kind is FaultKind.UNREACHABLE


def test_connecting_has_a_short_time_of_its_own(monkeypatch):
    """A full backlog answers no SYN: that is known in seconds, whatever the deadline of the request."""
    limits = httpx.Timeout(None, connect=0.2).as_dict()
    monkeypatch.setattr(client_module, "_EXTENSIONS", {"timeout": limits})
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        fault = asyncio.run(fault_of(f"http://127.0.0.1:{deaf.getsockname()[1]}", deadline_seconds=60.0))
        for filler in fillers:
            filler.close()
    assert (fault.kind, fault.reached) == (FaultKind.CONNECT_TIMEOUT, False)


def test_the_deadline_ends_a_silent_server_and_tells_it():
    """A server that reads and never answers: TIMEOUT at our deadline, and an abort goes out with the same rid."""
    heard = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_request(reader)
        heard.append(head.split()[1])
        if heard[-1] == b"/abort_request":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await reader.read()  # until the client leaves

    async def main() -> Fault:
        async with server(silent) as url:
            return await fault_of(url, deadline_seconds=0.1)

    fault = asyncio.run(main())
    assert (fault.kind, fault.reached, fault.chargeable) == (FaultKind.TIMEOUT, True, True)
    assert heard == [b"/generate", b"/abort_request"]


def test_an_answer_may_come_slower_than_any_default_timeout(monkeypatch):
    """No read timeout stands in the way of a long generation: only the deadline counts, and None is none."""
    assert client_module._EXTENSIONS["timeout"]["read"] is None
    assert client_module._EXTENSIONS["timeout"]["pool"] is None

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for start in range(0, len(OK), 40):
            writer.write(OK[start : start + 40])
            await writer.drain()
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with server(slow) as url, SGLangClient() as client:
            made = await client.generate(url, [1, 2, 3], SAMPLING, rid=new_rid(), deadline_seconds=None)
            assert made.output_ids == [8, 9]

    asyncio.run(main())


def test_a_read_timeout_that_is_asked_for_is_kept():
    """The transport honours httpx's read timeout, though our client sets none."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        async with server(silent) as url, httpx.AsyncClient(transport=AiohttpTransport(), timeout=0.1) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.get(url)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_running_out_of_descriptors_is_this_machines_fault(host):
    """EMFILE, of the socket or of the resolver: no attempt is charged, no endpoint suspected."""

    async def main(port: int) -> Fault:
        async with SGLangClient() as client:
            hoard: list[int] = []
            with suppress(OSError):
                while True:
                    hoard.append(os.dup(0))
            try:
                with pytest.raises(Fault) as caught:
                    await generate(client, f"http://{host}:{port}")
            finally:
                for descriptor in hoard:
                    os.close(descriptor)
            return caught.value

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        limit = 64 + max(map(int, os.listdir("/proc/self/fd")))  # other tests of this process may hold some
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))
        try:
            fault = asyncio.run(main(listening.getsockname()[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fault.kind is FaultKind.LOCAL_RESOURCES
    assert (fault.reached, fault.chargeable, fault.fatal_for_run) == (False, False, False)


def test_a_server_that_closes_idle_connections_fails_no_request():
    """Kept-alive connections are reused, and dropped by us before the server drops them."""
    connections = 0

    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            async with asyncio.timeout(0.3):
                await read_request(reader)
            writer.write(OK)

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await impatient(reader, writer)
        except TimeoutError:
            pass

    async def main() -> None:
        async with server(quiet) as url, SGLangClient(keepalive_seconds=0.1) as client:
            for _ in range(20):
                await generate(client, url)
            assert connections == 1, "a busy connection is reused"
            for pause in (0.05, 0.09, 0.11, 0.3):
                await asyncio.sleep(pause)
                await generate(client, url)

    asyncio.run(main())
    assert connections > 1


def test_a_thousand_requests_are_in_flight_at_once():
    """No limit of the client stands below what the endpoints can hold."""

    async def main() -> int:
        arrived, everybody = 0, asyncio.Event()

        async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal arrived
            await read_request(reader)
            arrived += 1
            if arrived == 1000:
                everybody.set()
            await everybody.wait()
            writer.write(OK)
            await writer.drain()

        async with server(patient) as url, SGLangClient() as client:
            made = await asyncio.gather(*(generate(client, url, 60.0) for _ in range(1000)))
        return len(made)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this machine allows fewer than 4096 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        assert asyncio.run(main()) == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_foreign_exception_leaves_the_transport():
    """Whatever a session raises of MAPPED comes out as httpx's, with the cause still behind it."""

    class Failing:
        def __init__(self, failure: Exception):
            self.failure = failure

        def request(self, *args: object, **kwargs: object) -> None:
            raise self.failure

        async def close(self) -> None:
            pass

    async def main() -> None:
        for failure in (aiohttp.ClientConnectionError("x"), TimeoutError(), ssl.SSLError(1, "x"), OSError(5, "x")):
            transport = AiohttpTransport()
            transport._session = Failing(failure)
            async with httpx.AsyncClient(transport=transport) as http:
                with pytest.raises(httpx.TransportError) as caught:
                    await http.get("http://h")
            assert caught.value.__cause__ is failure

    asyncio.run(main())

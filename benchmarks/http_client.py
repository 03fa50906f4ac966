"""What one generate call costs: httpx as it comes, httpx over our transport, bare aiohttp.

    .venv/bin/python benchmarks/http_client.py [--in-flight 256 1000] [--seconds 1] [--calls-each 4]

A trivial server in another process waits the given time and answers with 1,000 token ids. Decides
docs/decisions/0001-httpx-over-aiohttp.md; run it again before changing that.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import httpx

from app.sglang.client import SGLangClient, new_rid
from app.sglang.sampling import sampling_body
from app.sglang.transport import AiohttpTransport

IDS = list(range(1000, 2000))
BODY = json.dumps({"input_ids": IDS, "sampling_params": sampling_body({"max_new_tokens": 1000})}).encode()
ANSWER = json.dumps(
    {
        "text": "word " * 1000,
        "output_ids": IDS,
        "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 1000, "completion_tokens": 1000},
    }
).encode()
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
Call = Callable[[], Awaitable[object]]


class SlowServer(asyncio.Protocol):
    """Answers each request after a while. Knows just enough HTTP to find the end of a request."""

    seconds = 1.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, rest = self.received.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) if found else 0
        if found and len(rest) >= length:
            self.received = b""
            asyncio.get_running_loop().call_later(self.seconds, self.transport.write, REPLY)


def serve(seconds: float, port_out: Connection) -> None:
    """Body of the server's process."""

    async def main() -> None:
        SlowServer.seconds = seconds
        server = await asyncio.get_running_loop().create_server(SlowServer, "127.0.0.1", 0, backlog=2048)
        port_out.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def measure(name: str, call: Call, in_flight: int, calls_each: int, limit_seconds: float) -> None:
    """Prints one line: calls per second, CPU per call, latency."""
    latencies: list[float] = []

    async def caller() -> None:
        for _ in range(calls_each):
            started = time.perf_counter()
            await call()
            latencies.append(time.perf_counter() - started)

    wall, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.timeout(limit_seconds):
            await asyncio.gather(*(caller() for _ in range(in_flight)))
    except TimeoutError:
        name += f" (stopped after {limit_seconds:g} s)"
    wall, cpu, done = time.perf_counter() - wall, time.process_time() - cpu, len(latencies)
    p50 = statistics.median(latencies) if latencies else float("nan")
    p99 = statistics.quantiles(latencies, n=100)[98] if done > 1 else float("nan")
    print(f"| {name} | {in_flight} | {done / wall:.1f} | {cpu / max(done, 1) * 1000:.2f} | {p50:.2f} | {p99:.2f} |")


async def compare(url: str, in_flight: int, calls_each: int, limit_seconds: float) -> None:
    """All clients, one after the other."""
    sampling = sampling_body({"max_new_tokens": 1000})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        httpx.AsyncClient(timeout=None, limits=limits) as plain,
        httpx.AsyncClient(timeout=None, transport=AiohttpTransport()) as over_aiohttp,
        SGLangClient() as ours,
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as bare,
    ):

        async def with_aiohttp() -> None:
            async with bare.post(f"{url}/generate", data=BODY) as response:
                await response.read()

        calls: dict[str, Call] = {
            "aiohttp": with_aiohttp,
            "httpx over our transport": lambda: over_aiohttp.post(f"{url}/generate", content=BODY),
            "SGLangClient, checks included": lambda: ours.generate(
                url, IDS, sampling, rid=new_rid(), deadline_seconds=None, vocab_size=150_000
            ),
            "httpx": lambda: plain.post(f"{url}/generate", content=BODY),
        }
        for name, call in calls.items():
            await measure(name, call, in_flight, calls_each, limit_seconds)


def main() -> None:
    """Starts the server, measures, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--seconds", type=float, default=1.0, help="how long the server takes for an answer")
    parser.add_argument("--calls-each", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, default=40.0, help="after which a client is stopped")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port_in, port_out = context.Pipe()
    server = context.Process(target=serve, args=(options.seconds, port_out), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port_in.recv()}"
    print("| client | in flight | calls/s | CPU ms/call | p50 s | p99 s |\n|---|---|---|---|---|---|")
    for in_flight in options.in_flight:
        asyncio.run(compare(url, in_flight, options.calls_each, options.limit_seconds))
    server.terminate()


if __name__ == "__main__":
    main()

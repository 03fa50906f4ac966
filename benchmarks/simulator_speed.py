"""How fast is the simulated server itself? It must never be what a benchmark measures.

    python benchmarks/simulator_speed.py [REQUESTS] [CONNECTIONS]

Prints requests/s over HTTP (one process for the server, a bare client in this one, 64 ids in, 16 out), ids/s of the
token chain, and how much faster than real time the pure engine plays 1,000 requests. Needs two cores for the first.
"""

import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Callable

import uvloop

from app.sglang.simulator import SimulatorConfig, serve
from app.sglang.simulator.engine import Engine, EngineConfig, Request
from app.sglang.simulator.tokens import TokenChain

TARGET_PER_SECOND = 2_000


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    connections = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    for name, config in (("batching", SimulatorConfig(speed=100.0)), ("instant", SimulatorConfig(instant=True))):
        rate, busy = http_rate(config, requests, connections)
        print(f"HTTP, {name:8}  {rate:8,.0f} requests/s (target {TARGET_PER_SECOND:,}), client busy {busy:.0%}")
    chain_speed()
    engine_speed()


def http_rate(config: SimulatorConfig, requests: int, connections: int) -> tuple[float, float]:
    """Requests per second, and the share of a core that the client used."""
    context = multiprocessing.get_context("spawn")
    ready, child_end = context.Pipe()
    server = context.Process(target=_serve, args=(config, child_end), daemon=True)
    server.start()
    port = int(ready.recv().rsplit(":", 1)[1])
    try:
        began, cpu = time.perf_counter(), time.process_time()
        uvloop.run(_flood(port, requests, connections))
        seconds = time.perf_counter() - began
        return requests / seconds, (time.process_time() - cpu) / seconds
    finally:
        server.terminate()
        server.join()


def _serve(config: SimulatorConfig, ready) -> None:
    serve(config, port=0, on_ready=ready.send)


async def _flood(port: int, requests: int, connections: int) -> None:
    ids = b",".join(b"%d" % token for token in range(1000, 1064))
    body = b'{"input_ids":[' + ids + b'],"sampling_params":{"max_new_tokens":16}}'
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    message = head % len(body) + body

    async def one(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            writer.write(message)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in answer[:20], answer
            await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(one(requests // connections) for _ in range(connections)))


def chain_speed() -> None:
    """Time per id of generating, of reading a fresh prompt, and of recognising a continuation."""
    chain = TokenChain(0, 163_584, 163_586)
    prompt = list(range(1000))
    state = chain.plan(prompt).state
    answer = chain.ids(state, 20_000)

    def per_id(work: Callable[[], object], count: int) -> str:
        began = time.perf_counter()
        for _ in range(10):
            work()
        return f"{(time.perf_counter() - began) / 10 / count * 1e9:.0f} ns"

    print(f"chain           generate {per_id(lambda: chain.ids(state, 20_000), 20_000)}, "
          f"read {per_id(lambda: chain.plan(prompt), 1000)}, "
          f"recognise {per_id(lambda: chain.plan(prompt + answer), 21_000)} an id")  # fmt: skip


def engine_speed() -> None:
    """1,000 requests (prompts 500-1,800, outputs log-normal around 2,700) on 231,120 KV tokens, by both rules."""
    for admission in ("free_space", "reserve"):
        engine = Engine(EngineConfig(kv_tokens=231_120, max_running=4096, admission=admission))
        rnd = random.Random(5)
        for _ in range(1000):
            engine.submit(0.0, Request("", rnd.randint(500, 1800), 8192, min(8192, int(rnd.lognormvariate(7.9, 0.45)))))
        began, now = time.perf_counter(), 0.0
        while (event := engine.next_event()) is not None:
            now = event
            engine.advance(now)
        seconds = time.perf_counter() - began
        print(f"engine, {admission:10} plays {now:.0f} s in {seconds:.2f} s; {engine.counters.retractions} retractions")


if __name__ == "__main__":
    main()

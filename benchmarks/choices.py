"""What each choice made for speed brings, by itself: `python -m benchmarks.choices [--tokens 1000] [--json FILE]`.

A row with a prompt and an answer of so many tokens, each step of it as we do it and as it would be done without the
choice; microseconds of CPU in the process that does it. What they come to together: benchmarks/overhead.py; grouped
syncs: benchmarks/fsync.py. docs/decisions/0013-what-a-row-costs.md has the figures.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import random
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import uvloop
from redis.asyncio import Redis

from app.packing import compress, decompress, pack_task, unpack_task
from app.records import Task, line_of
from app.sglang.client import SGLangClient, new_rid
from app.sglang.sampling import sampling_body
from app.store.courier import Courier
from app.store.embedded import PrivateServer
from benchmarks.http_client import serve

_COMMANDS, _CALLS, _AT_ONCE, _ROUNDS, _LARGEST_ID = 3200, 1920, 64, 3, 160_000


def _task(tokens: int) -> Task:
    rnd = random.Random(1)
    ids = [int(_LARGEST_ID * rnd.random() ** 3) for _ in range(tokens)]  # small ones are frequent, as in a text
    return Task(
        key="0" * 32, dataset="d", row_id="0" * 24, source_id="", row_number=1, turn=0, turns=1, completion_index=0,
        max_new_tokens=tokens, prompt_token_ids=ids,
    )  # fmt: skip


def _us(action: Callable[[], object], times: int = 500) -> float:
    begun = time.process_time()
    for _ in range(times):
        action()
    return 1e6 * (time.process_time() - begun) / times


def texts(tokens: int) -> dict[str, float]:
    """A request's body and an answer's, made and read: the standard library and orjson."""
    task = _task(tokens)
    body = {"input_ids": task.prompt_token_ids, "sampling_params": sampling_body({"max_new_tokens": tokens})}
    answer = orjson.dumps({"output_ids": task.prompt_token_ids, "text": "word " * tokens, "meta_info": {}})
    return {
        "make a body, json": _us(lambda: json.dumps(body).encode()),
        "make a body, orjson": _us(lambda: orjson.dumps(body)),
        "read an answer, json": _us(lambda: json.loads(answer)),
        "read an answer, orjson": _us(lambda: orjson.loads(answer)),
    }


def payloads(tokens: int) -> dict[str, float]:
    """A task in Redis: its size and the way in and out; ids packed, and as JSON."""
    task = _task(tokens)
    words = {name: value for name, value in dataclasses.asdict(task).items() if name != "chat"}
    packed, plain = pack_task(task), line_of(words)
    return {
        "payload, JSON, bytes": len(plain), "payload, JSON compressed, bytes": len(compress(plain)),
        "payload, packed and compressed, bytes": len(packed),
        "in and out, JSON compressed": _us(lambda: orjson.loads(decompress(compress(line_of(words))))),
        "in and out, packed and compressed": _us(lambda: unpack_task(pack_task(task))),
    }  # fmt: skip


def lists(tokens: int) -> dict[str, float]:
    """What a worker allocates for a row at most at once: ids as one list of the prompt and one of the answer."""
    blob, answer = pack_task(_task(tokens)), orjson.dumps(_task(tokens).prompt_token_ids)
    unpack_task(blob), compress(answer)  # whose workspaces are made once
    tracemalloc.start()
    held = (unpack_task(blob), orjson.loads(answer))
    of_lists = tracemalloc.get_traced_memory()[0]
    compress(line_of({"prompt_token_ids": held[0].prompt_token_ids, "output_ids": held[1]}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"two lists of ids, bytes": of_lists, "at most, its line included, bytes": peak}


async def _timed(calls: Awaitable[object], number: int) -> float:
    begun = time.process_time()
    await calls
    return 1e6 * (time.process_time() - begun) / number


async def _at_once(number: int, one: Callable[[], Awaitable[object]]) -> None:
    """So many calls, `_AT_ONCE` at a time, as tasks of a worker make them."""

    async def some() -> None:
        for _ in range(number // _AT_ONCE):
            await one()

    await asyncio.gather(*(some() for _ in range(_AT_ONCE)))


async def commands(url: str) -> dict[str, float]:
    """One command to Redis of 64 tasks that have some: each alone, and through the courier."""
    client, courier = Redis.from_url(url, max_connections=_AT_ONCE), Courier(url)
    await courier.command("PING")
    await _at_once(_AT_ONCE, lambda: client.zrem("z", "a", "b"))  # so many connections
    alone = await _timed(_at_once(_COMMANDS, lambda: client.zrem("z", "a", "b")), _COMMANDS)
    shared = await _timed(_at_once(_COMMANDS, lambda: courier.command("ZREM", "z", "a", "b")), _COMMANDS)
    await asyncio.gather(client.aclose(), courier.close())
    return {"a command, alone": alone, "a command, by the courier": shared}


async def calls(port: int, tokens: int) -> dict[str, float]:
    """A generation, 64 at once, from a server that answers at once with 1,000 ids."""
    task, url = _task(tokens), f"http://127.0.0.1:{port}"
    sampling, client = sampling_body({"max_new_tokens": 1000}), SGLangClient()

    def one() -> Awaitable[object]:
        return client.generate(url, task.prompt_token_ids, sampling, rid=new_rid(), deadline_seconds=60)

    await _at_once(_AT_ONCE, one)
    try:
        return {"a generation": await _timed(_at_once(_CALLS, one), _CALLS)}
    finally:
        await client.aclose()


def loops(tokens: int) -> dict[str, float]:
    """Both on asyncio's own event loop and on uvloop; the least of some rounds."""
    found: dict[str, float] = {}
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(0.0, theirs), daemon=True)
    server.start()
    port = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        redis = PrivateServer(Path(folder))
        redis.start()
        try:
            for name, run in (("asyncio", asyncio.run), ("uvloop", uvloop.run)) * _ROUNDS:
                for what, us in (run(commands(redis.url)) | run(calls(port, tokens))).items():
                    found[f"{what}, {name}"] = min(us, found.get(f"{what}, {name}", us))
        finally:
            redis.stop()
            server.terminate()
            server.join()
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    for measure in (texts, payloads, lists, loops):
        found |= measure(arguments.tokens)
    for name, value in found.items():
        print(f"{name:<40}{value:>10,.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

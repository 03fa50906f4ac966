"""What an engineer writes in an evening: asyncio and aiohttp, a semaphore, retries, a file that is appended to.

    python benchmarks/peers/evening.py URL PROMPTS.jsonl OUT.jsonl CONCURRENCY MAX_TOKENS

Kept as such scripts are: resumes by the ids in its file, gives a row up after three tries.
"""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp

TRIES, TIMEOUT_SECONDS = 3, 600


def load(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


async def main(url: str, prompts: str, out: str, concurrency: int, max_tokens: int) -> None:
    rows, done = load(prompts), {row["id"] for row in load(out)}
    semaphore = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        with open(out, "a") as file:  # noqa: ASYNC230 - as such scripts do

            async def ask(row: dict) -> dict:
                body = {"model": "default", "messages": row["messages"], "max_tokens": max_tokens, "temperature": 1.0}
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    return await response.json()

            async def one(row: dict) -> None:
                async with semaphore:
                    for attempt in range(TRIES):
                        try:
                            answer = await ask(row)
                            break
                        except (aiohttp.ClientError, TimeoutError) as exc:
                            print(f"row {row['id']}: {exc}", file=sys.stderr)
                            await asyncio.sleep(2**attempt)
                    else:
                        return
                text = answer["choices"][0]["message"]["content"]
                file.write(json.dumps({"id": row["id"], "text": text}) + "\n")
                file.flush()

            await asyncio.gather(*(one(row) for row in rows if row["id"] not in done))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:6])))

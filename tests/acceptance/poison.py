"""Rows of which some kill the server, and servers in processes of their own that come back: for tests and benchmark."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.tokenization import Renderer, RenderOptions
from tests.acceptance.harness import IDS, TOKENIZER
from tests.belt import ROOT

POISON = "‡"


def write_rows(path: Path, rows: int, poisoned: tuple[int, ...]) -> None:
    """Rows of about 20 tokens, no two equal; `poisoned` are numbers of rows, from 0."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(rows):
            mark = f" {POISON}" if n in poisoned else ""
            file.write(json.dumps({"prompt": f"What is {n} plus {n * 7 % 1000}?{mark}"}) + "\n")


def deadly_token() -> int:
    """An id that the poisoned prompts have and no other."""
    encode = Renderer(RenderOptions(tokenizer=str(TOKENIZER))).encode
    harmless = {token for n in range(10) for token in encode(f"<|user|>What is {n} plus {n}?")}
    return next(token for token in encode(f" {POISON}") if token not in harmless)


@contextmanager
def server(config: dict | None = None, **faults) -> Iterator[str]:
    """The URL of a `headrace simulate` process."""
    words = ["--port", "0", "--config", json.dumps({**IDS, **(config or {})}), "--faults", json.dumps(faults)]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "simulate", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def tell(url: str, **faults) -> None:
    """Replace faults of a server."""
    request = urllib.request.Request(f"{url}/_sim/faults", json.dumps(faults).encode())
    urllib.request.urlopen(request, timeout=10).read()


def stats(url: str) -> dict:
    """What a server counted since it came up."""
    with urllib.request.urlopen(f"{url}/_sim/stats", timeout=30) as answer:
        return json.load(answer)

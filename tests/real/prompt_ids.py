"""Our prompt ids against those of a real server's /v1/tokenize, over rows of every shape.

usage: python -m tests.real.prompt_ids --endpoint http://127.0.0.1:30000 --tokenizer DIR [--datasets DIR] [--rows 200]

--tokenizer: the folder that the server was started with (--tokenizer-path). Rows whose control tokens are made text
are counted and left out: a server makes turns of them. Exit 0: all equal; 1: a difference, or nothing compared.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import SecretStr

from app.cli.parity import as_sent
from app.reasons import Rejected
from app.records import Conversation
from app.sglang.client import SGLangClient
from app.sglang.tool_dump import tool_form
from app.tokenization import Renderer, RenderOptions
from producers.readers import read_records
from producers.shapes import conversation_of
from tests.belt import ROOT
from tests.golden import OWN


def rows(folder: Path, per_file: int) -> Iterator[tuple[str, Conversation]]:
    """(name, conversation) of the first rows of each file, and of our own conversations."""
    for name, (value, options) in OWN.items():
        if not options:
            yield name, conversation_of(value)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md"):
        for raw in islice(read_records(path), per_file):
            if raw.error is None:
                try:
                    yield f"{path.name}:{raw.number}", conversation_of(raw.value)
                except Rejected:
                    continue


async def compare(endpoint: str, directory: Path, folder: Path, wanted: int, api_key: SecretStr | None = None) -> int:
    """Compare up to `wanted` rows. Returns the exit code."""
    counts: Counter[str] = Counter()
    async with SGLangClient(api_key or None) as client:
        info = await client.info(endpoint)
        form = tool_form(info.version)
        renderer = Renderer(RenderOptions(str(directory), tool_form=form))
        for name, chat in rows(folder, -(-wanted // 12)):
            if counts["equal"] + counts["different"] >= wanted:
                break
            if renderer.holds_control_tokens(chat):
                counts["control tokens, left out"] += 1
                continue
            theirs = await client.tokenize(endpoint, as_sent(chat.messages), chat.tools)
            ours = renderer.render(chat)
            verdict = "refused there" if theirs is None else "equal" if theirs == ours else "different"
            counts[verdict] += 1
            counts["with tools"] += verdict == "equal" and bool(chat.tools)
            if verdict != "equal":
                print(f"{verdict}: {name}")
    print(f"SGLang {info.version}, tools as {form}: {dict(counts)}")
    return 0 if counts["equal"] and not counts["different"] else 1


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--datasets", type=Path, default=ROOT / "tests" / "data" / "datasets")
    parser.add_argument("--rows", type=int, default=200)
    asked = parser.parse_args()
    return asyncio.run(compare(asked.endpoint, asked.tokenizer, asked.datasets, asked.rows))


if __name__ == "__main__":
    sys.exit(main())

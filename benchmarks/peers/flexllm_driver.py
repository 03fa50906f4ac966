"""flexllm (PyPI) on the same prompts, by its batch call with checkpoints; arguments as evening.py's."""

import json
import sys
from pathlib import Path

from flexllm import LLMClient


def main(url: str, prompts: str, out: str, concurrency: str, max_tokens: str) -> None:
    """`output_jsonl` is its checkpoint; retries are its default, retry_times=3. Raises if its result holds failures."""
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    client = LLMClient(
        provider="openai", base_url=f"{url}/v1", api_key="none", model="default", concurrency_limit=int(concurrency)
    )
    results = client.chat_batch_sync(
        [row["messages"] for row in rows], output_jsonl=out, metadata_list=[{"id": row["id"]} for row in rows],
        show_progress=False, max_tokens=int(max_tokens), temperature=1.0,
    )  # fmt: skip
    results.raise_for_errors()


if __name__ == "__main__":
    main(*sys.argv[1:6])

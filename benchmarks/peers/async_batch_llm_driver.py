"""async-batch-llm (PyPI) on the same prompts, with its checkpoint file and resume; arguments as evening.py's."""

import asyncio
import json
import sys
from pathlib import Path

from async_batch_llm import ArtifactIdentity, JsonlArtifactStore, ResumePolicy, llm, process_prompts


def main(url: str, prompts: str, out: str, concurrency: str, max_tokens: str) -> int:
    """Retries are its default, RetryConfig(max_attempts=3). Exit 1 if its result holds failures."""
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    strategy = llm(
        "openai-compatible:default", base_url=f"{url}/v1", api_key="none", temperature=1.0,
        generation_config={"max_tokens": int(max_tokens)}, max_connections=int(concurrency),
    )  # fmt: skip
    store = JsonlArtifactStore(
        Path(out).with_name("artifacts.jsonl"), identity=ArtifactIdentity(provider="sglang", model="default")
    )
    questions = [(row["id"], row["messages"][0]["content"]) for row in rows]
    batch = asyncio.run(process_prompts(
        strategy, questions, concurrency=int(concurrency), artifact_store=store, resume=ResumePolicy.REUSE_SUCCESSES
    ))  # fmt: skip
    with Path(out).open("w") as file:
        for result in batch.results:
            row = {"id": result.item_id, "text": result.output} if result.success else {"failed": result.item_id}
            file.write(json.dumps(row) + "\n")
    print(batch.summary())
    return 1 if batch.failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:6]))

"""datatrove's InferenceRunner (PyPI) on the same prompts, with its checkpoints; arguments as evening.py's.

It reaches an endpoint on 127.0.0.1 by a few lines of its own, and one on another host by OpenAI's client: two entries.
"""

import json
import sys
from pathlib import Path

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

ROWS_A_CHUNK = 100  # its default is 6,000, its example's 500 of 1,005: here too a run is several chunks


async def rollout(document: Document, generate):
    """One answer a row."""
    return await generate({"messages": document.metadata["messages"]})


def main(url: str, prompts: str, out: str, concurrency: str, max_tokens: str) -> None:
    """Checkpoints and request cache are on, by `checkpoints_local_dir`; six attempts a request are built in."""
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    folder = Path(out).parent
    config = InferenceConfig(
        server_type="endpoint", endpoint_url=url, api_key="none", model_name_or_path="default",
        max_concurrent_generations=int(concurrency),
        default_generation_params={"max_tokens": int(max_tokens), "temperature": 1.0},
    )  # fmt: skip
    runner = InferenceRunner(
        rollout_fn=rollout, config=config, records_per_chunk=ROWS_A_CHUNK,
        checkpoints_local_dir=str(folder / "checkpoints"),
        output_writer=JsonlWriter(str(folder / "answers"), output_filename="${rank}_chunk_${chunk_index}.jsonl"),
    )  # fmt: skip
    documents = [Document(text="-", id=row["id"], metadata={"messages": row["messages"]}) for row in rows]
    LocalPipelineExecutor(pipeline=[documents, runner], logging_dir=str(folder / "logs"), tasks=1).run()


if __name__ == "__main__":
    main(*sys.argv[1:6])

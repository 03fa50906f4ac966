"""distilabel (PyPI) on the same prompts, with its cache; arguments as evening.py's."""

import json
import sys
from pathlib import Path

from distilabel.models import OpenAILLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import ChatGeneration


def main(url: str, prompts: str, out: str, concurrency: str, max_tokens: str) -> None:
    """A batch is as many rows as may be in flight. `use_cache` is its default; so are the client's max_retries=6."""
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    batch = int(concurrency)
    with Pipeline(name="peers", cache_dir=Path(out).parent / "cache") as pipeline:
        load = LoadDataFromDicts(data=rows, batch_size=batch)
        generate = ChatGeneration(
            llm=OpenAILLM(
                model="default", base_url=f"{url}/v1", api_key="none",
                generation_kwargs={"max_new_tokens": int(max_tokens), "temperature": 1.0},
            ),
            input_batch_size=batch,
        )  # fmt: skip
        load >> generate
    distiset = pipeline.run(use_cache=True)
    with Path(out).open("w") as file:
        for row in distiset["default"]["train"]:
            answer = row["generation"]
            record = {"failed": row["id"]} if answer is None else {"id": row["id"], "text": answer}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:6])

"""curator (PyPI: bespokelabs-curator) on the same prompts, with its cache; arguments as evening.py's."""

import importlib.util
import json
import os
import sys
from pathlib import Path

# Nothing is fetched or told: the encoding it counts tokens with is read where litellm, which it needs, ships it.
LITELLM = Path(importlib.util.find_spec("litellm").origin).parent
os.environ["TIKTOKEN_CACHE_DIR"] = str(LITELLM / "litellm_core_utils" / "tokenizers")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["TELEMETRY_ENABLED"] = "False"

from bespokelabs import curator  # noqa: E402 - reads them when imported


class Teacher(curator.LLM):
    """A row's messages in, one answer out."""

    def prompt(self, row: dict):
        return row["messages"]

    def parse(self, row: dict, response: str):
        return [{"id": row["id"], "text": response}]


def main(url: str, prompts: str, out: str, concurrency: str, max_tokens: str) -> None:
    """Its rate limits, made for hosted models, are lifted. Defaults: max_retries=10, require_all_responses=True."""
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    teacher = Teacher(
        model_name="default", backend="openai",
        generation_params={"max_tokens": int(max_tokens), "temperature": 1.0},
        backend_params={
            "base_url": f"{url}/v1", "api_key": "none", "max_concurrent_requests": int(concurrency),
            "max_requests_per_minute": 1_000_000, "max_tokens_per_minute": 10**12,
        },
    )  # fmt: skip
    answers = teacher(rows, working_dir=str(Path(out).parent / "cache"))
    with Path(out).open("w") as file:
        for row in answers.dataset:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:6])

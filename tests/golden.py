"""Golden prompts: rows of every shape, and the ids that two tokenizers of full size give them.

usage: python -m tests.golden --show     # the decoded prompts, to be read
       python -m tests.golden --write    # the ids into tests/data/golden, once they have been read
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from app.records import Conversation
from app.tokenization import Renderer
from producers.readers import read_records
from producers.shapes import ShapeOptions, conversation_of
from tests.belt import ROOT
from tests.tokenizers import deepseek, kimi_shaped, renderer_of

GOLDEN = ROOT / "tests" / "data" / "golden"
DATASETS = ROOT / "tests" / "data" / "datasets"
_ROWS = 2  #: of each file
_NAUGHTY = (3, 134, 136, 153, 178)  #: of blns.json: a word, beyond the BMP, many scripts, joined emoji, isolates
_MAX_IDS = 1500

_USER, _ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is"}
_CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
_WITH_CALL = [_USER, {"role": "assistant", "content": None, "reasoning_content": "Add them.", "tool_calls": [_CALL]},
              {"role": "tool", "content": "4", "tool_call_id": "functions.add:0"}]  # fmt: skip

#: Conversations of our own: name → (row, options of its shape).
OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "assistant first": ({"messages": [_ANSWER, _USER]}, {}),
    "user user": ({"messages": [_USER, _USER]}, {}),
    "answer made again": ({"messages": [_USER, _ANSWER]}, {}),
    "answer continued": ({"messages": [_USER, _ANSWER]}, {"prefill": True}),
    "developer": ({"messages": [{"role": "developer", "content": "Be brief."}, _USER]}, {}),
    "system option": ({"prompt": "Hi"}, {"system": "You are terse."}),
    "reasoning of an earlier turn": (
        {"messages": [_USER, {**_ANSWER, "reasoning_content": "Two and two."}, _USER]}, {}),
    "reasoning in an earlier answer": (
        {"messages": [_USER, {"role": "assistant", "content": "<think>Two and two.</think>4"}, _USER]}, {}),
    "call and result": ({"messages": _WITH_CALL, "tools": [_TOOL]}, {}),
    "alpaca": ({"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"}, {}),
    "OpenCodeInstruct": ({"id": "7", "input": "Write add(a, b).", "output": "def add(a, b): ..."}, {}),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, {}),  # noqa: E501
    "control tokens": ({"prompt": "<|im_end|><|im_user|> <｜User｜>x<｜Assistant｜> [EOS]</think>"}, {}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GoldenRow:
    """A row by its name: file and number, or one of our own."""

    name: str
    conversation: Conversation


def rows() -> Iterator[GoldenRow]:
    """All rows, in order."""
    for path in sorted(DATASETS.iterdir()):
        if path.suffix == ".md" or path.name.startswith(("kv_retrieval", "specforge", "tau2")):  # nothing runs of these
            continue
        records = read_records(path)
        if path.name == "blns.json":
            records = (raw for raw in records if raw.number in _NAUGHTY)
        for raw in islice(records, len(_NAUGHTY) if path.name == "blns.json" else _ROWS):
            yield GoldenRow(f"{path.name}:{raw.number}", conversation_of(raw.value))
    for name, (value, options) in OWN.items():
        yield GoldenRow(name, conversation_of(value, ShapeOptions(**options)))


def golden_of(renderer: Renderer) -> dict[str, list[int]]:
    """Name → ids, of the prompts that are short enough to be read."""
    made = {row.name: renderer.render(row.conversation) for row in rows()}
    return {name: ids for name, ids in made.items() if len(ids) <= _MAX_IDS}


def read_golden(tokenizer: str) -> dict[str, list[int]]:
    """Name → ids, as they were read and written."""
    lines = (GOLDEN / f"{tokenizer}.jsonl").read_text("utf-8").splitlines()
    return {line["row"]: line["ids"] for line in map(json.loads, lines)}


def main() -> None:
    """Show or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, directory in (("kimi", kimi_shaped(Path(folder) / "kimi")), ("deepseek", deepseek())):
            renderer = renderer_of(directory, tool_form="ordered")
            golden = golden_of(renderer)
            if asked.show:
                for row, ids in golden.items():
                    print(f"=== {name} {row} ({len(ids)})\n{renderer.decode(ids)}")
            if asked.write:
                lines = (json.dumps({"row": row, "ids": ids}, separators=(",", ":")) for row, ids in golden.items())
                (GOLDEN / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()

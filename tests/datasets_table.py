"""The tables of docs/datasets.md: what becomes of each row of published data sets.

usage: python -m tests.datasets_table                  # the table over tests/data/datasets, into docs/datasets.md
       python -m tests.datasets_table --datasets DIR   # the table over the whole files in DIR (one folder each)
"""

import argparse
from collections import Counter
from pathlib import Path

from app.reasons import Rejected
from app.records import Conversation
from app.tokenization import Renderer, RenderOptions
from producers.readers import RawRow, read_records
from producers.readers.formats import sniff
from producers.readers.source import Source
from producers.shapes import PROMPT_FIELDS, ShapeOptions, conversation_of
from tests.belt import ROOT

EXCERPTS = ROOT / "tests" / "data" / "datasets"
PAGE = ROOT / "docs" / "datasets.md"
HEADER = (
    "| file | format | recognised shape | rows | run | rejected, by reason |\n|---|---|---|---:|---:|---|\n"
)  # fmt: skip


def table(folder: Path, renderer: Renderer) -> str:
    """One line per file; every row of it is run (rendered to ids) or rejected."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    return HEADER + "".join(_line(path, path.relative_to(folder), renderer) for path in files)


def with_table(page: str, name: str, made: str) -> str:
    """The page with what stands between its marks replaced."""
    begin, end = f"<!-- {name}: made by tests/datasets_table.py -->\n", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    return before + begin + made + end + rest.split(end, 1)[1]


def _line(path: Path, name: Path, renderer: Renderer) -> str:
    shapes: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for raw in read_records(path):
        shapes[_shape(raw)] += 1
        verdicts[_verdict(raw, renderer)] += 1
    rows, run = verdicts.total(), verdicts.pop("", 0)
    shown = " or ".join(shape for shape, _ in shapes.most_common(3))
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(verdicts.items())) or "–"
    assert rows == run + verdicts.total()
    return f"| {name} | {_format(path)} | {shown} | {rows:,} | {run:,} | {rejected} |\n"


def _verdict(raw: RawRow, renderer: Renderer) -> str:
    """The reason of a rejection, "" for a row that runs."""
    if raw.error is not None:
        return raw.error.reason
    try:
        renderer.render(conversation_of(raw.value, ShapeOptions()))
    except Rejected as verdict:
        return verdict.reason
    return ""


def _format(path: Path) -> str:
    if path.read_bytes()[:4] == b"PAR1":
        return "Parquet"
    packed = "gzip, " if path.read_bytes()[:2] == b"\x1f\x8b" else ""
    return packed + sniff(Source(path)).name.lower().replace("_", " ").replace("json", "JSON").replace("csv", "CSV")


def _shape(raw: RawRow) -> str:
    """The field that holds the prompt, and what is in it."""
    value = raw.value
    if raw.error is not None:
        return "unreadable"
    if not isinstance(value, dict):
        return "text"
    field = next((name for name in PROMPT_FIELDS if value.get(name) not in (None, "", [])), None)
    try:
        conversation = conversation_of(value, ShapeOptions())
    except Rejected:
        return "none" if field is None else f"`{field}`"
    return f"`{field}`: {_kind(value[field], conversation)}"


def _kind(found: object, conversation: Conversation) -> str:
    if isinstance(found, str):
        what = "text"
    elif isinstance(found[0], dict) and "from" in found[0]:
        what = "from/value chat"
    else:
        what = "texts" if isinstance(found[0], str) else "chat"
    return what + (" with tools" if conversation.tools else "")


def main() -> None:
    """Write a table into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=Path, help="folder of whole files")
    folder = parser.parse_args().datasets
    renderer = Renderer(RenderOptions(str(ROOT / "app" / "demo_data" / "tokenizer")))
    name = "whole files" if folder else "excerpts"
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), name, table(folder or EXCERPTS, renderer)), "utf-8")


if __name__ == "__main__":
    main()

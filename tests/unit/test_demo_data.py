"""The bundled prompts and tokenizer are what their maker makes."""

import sys
from pathlib import Path

from producers.readers import read_records
from producers.shapes import conversation_of

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "app" / "demo_data"


def test_the_maker_makes_the_same_bytes_again(tmp_path, monkeypatch):
    """The tokenizer's training has no chance in it, and the files in the repository are its result."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "data"))
    import make_tokenizers as maker

    maker.make_demo_tokenizer(tmp_path / "tokenizer")
    maker.make_word_tokenizer(tmp_path / "strict", maker.STRICT_TEMPLATE, add_bos=False)
    maker.make_word_tokenizer(tmp_path / "bos", maker.BOS_TEMPLATE, add_bos=True)
    maker.make_tiktoken_like(tmp_path / "tiktoken_like")
    del sys.modules["make_tokenizers"]
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 4 + 3 + 3 + 4
    for path, data in made.items():
        kept = DEMO if path.parts[0] == "tokenizer" else ROOT / "tests" / "data" / "tokenizers"
        assert (kept / path).read_bytes() == data, path


def test_every_bundled_row_is_a_prompt():
    """140 questions and 100 chats with tools, some of them twice, none rejected; and all of it is small."""
    counts = [
        len([conversation_of(row.value) for row in read_records(DEMO / name)])
        for name in ("gsm8k.jsonl", "glaive_tools.json")
    ]
    assert counts == [140, 100]
    assert sum(path.stat().st_size for path in (DEMO / "tokenizer").iterdir()) < 250_000

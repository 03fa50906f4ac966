"""Prompts that were read, decoded, keep their ids."""

import pytest

from tests.golden import golden_of, read_golden
from tests.tokenizers import renderer_of


@pytest.mark.parametrize("name", ["kimi", "deepseek"])
def test_golden_prompts_keep_their_ids(name, kimi_tokenizer, deepseek_tokenizer):
    """Rows of every shape, id by id; tests/data/golden/README.md says how they were checked."""
    renderer = renderer_of({"kimi": kimi_tokenizer, "deepseek": deepseek_tokenizer}[name], tool_form="ordered")
    golden = read_golden(name)
    assert len(golden) >= 30
    assert golden_of(renderer) == golden

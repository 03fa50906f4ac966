"""Writes a tiny model with random weights beside a tokenizer. Runs in the venv of the real SGLang, which has torch.

usage: make_model.py FOLDER SEED   (FOLDER holds the tokenizer; another SEED makes another model)
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

#: Rows beyond the tokenizer's ids, as models have them: what is returned may be higher than any id of the tokenizer.
PADDED_TO = 128
#: So many ordinary ids end an answer as well, so that random answers end by themselves after some hundred tokens.
STOPS = 10


def main(folder: Path, seed: int) -> None:
    """Config, generation config and weights."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    size = max([*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"])]) + 1
    end = tokenizer["model"]["vocab"]["<|im_end|>"]
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=-(-size // PADDED_TO) * PADDED_TO, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        tie_word_embeddings=False, eos_token_id=end, initializer_range=0.3,
    )).to(torch.bfloat16)  # fmt: skip
    model.generation_config.eos_token_id = [end, *range(300, 4000, 3700 // STOPS)]
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A tokenizer that transformers cannot load by itself: tiktoken's file format and a class beside it."""

import base64
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode  # where transformers 4 had it

SIGNS = bytes_to_unicode()
BYTES = {sign: byte for byte, sign in SIGNS.items()}


def spell(token):
    return "".join(SIGNS[byte] for byte in token)


class ByteTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 - transformers' own form

    def __init__(self, vocab_file, **kwargs):
        lines = Path(vocab_file).read_bytes().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        self._model = tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
        self._names = {rank: spell(token) for token, rank in ranks.items()}
        self._ranks = {name: rank for rank, name in self._names.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self._ranks)

    def get_vocab(self):  # without the added tokens
        return dict(self._ranks)

    def _tokenize(self, text, **kwargs):
        return [self._names[rank] for rank in self._model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self._ranks[token]

    def _convert_id_to_token(self, index):
        return self._names[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(BYTES[sign] for sign in "".join(tokens)).decode("utf-8", errors="replace")

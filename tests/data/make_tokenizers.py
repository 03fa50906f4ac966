"""Makes the demo's prompts and tokenizer and the tokenizers of the tests, the same bytes each time.

usage: python tests/data/make_tokenizers.py [--prompts GSM8K_TEST_JSONL GLAIVE_DEMO_JSON]

With --prompts it cuts the demo's prompts out of the two published files (see app/demo_data/README.md); without, it only
trains the tokenizers on the prompts that are there.
"""

import base64
import json
import sys
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "app" / "demo_data"
TEST_TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
VOCABULARY = 4096

# The control tokens stand where Kimi K2 has them: far above the vocabulary, with gaps between them.
SPECIAL = {
    "[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588,
    "<|im_system|>": 163594, "<|im_middle|>": 163601, "[UNK]": 163838, "[PAD]": 163839,
}  # fmt: skip
ADDED = {
    "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596, "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599, "<think>": 163606, "</think>": 163607,
}  # fmt: skip
WORDS = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

DEMO_TEMPLATE = """\
{#- Our own wording of the turns that Kimi K2 uses. `thinking=false` closes the reasoning at once. -#}
{%- macro turn(kind, name) -%}<|im_{{ kind }}|>{{ name }}<|im_middle|>{%- endmacro -%}
{%- if tools -%}
{{ turn('system', 'tool_declare') }}{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ turn('assistant', message.name or 'assistant') }}
{%- generation -%}
<think>{{ message.reasoning_content or '' }}</think>{{ message.content or '' }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endgeneration -%}
{%- elif message.role == 'user' -%}
{{ turn('user', message.name or 'user') }}{{ message.content }}<|im_end|>
{%- elif message.role == 'tool' -%}
{{ turn('system', message.name or 'tool') }}## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else -%}
{{ turn('system', message.name or message.role) }}{{ message.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ turn('assistant', 'assistant') }}<think>{% if thinking is defined and not thinking %}</think>{% endif %}
{%- endif -%}
"""

STRICT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['user', 'assistant'] or (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant, beginning with user') }}
{%- endif -%}
[{{ message.role }}] {{ message.content }}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls %} {{ call.function.name }}({{ call.function.arguments + '' }}){% endfor -%}
{%- endif -%}
[EOS]
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}
"""

BOS_TEMPLATE = """\
{{- bos_token -}}
Today is {{ strftime_now('%d %B %Y') }}.
{% for message in messages -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}assistant:{%- endif -%}
"""

TIKTOKEN_LIKE_CODE = '''\
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
        self._model = tiktoken.Encoding("bytes", pat_str=r"\\S+|\\s+", mergeable_ranks=ranks, special_tokens={})
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
'''


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--prompts"]:
        cut_prompts(Path(arguments[1]), Path(arguments[2]))
    make_demo_tokenizer(DEMO / "tokenizer")
    make_word_tokenizer(TEST_TOKENIZERS / "strict", STRICT_TEMPLATE, add_bos=False)
    make_word_tokenizer(TEST_TOKENIZERS / "bos", BOS_TEMPLATE, add_bos=True)
    make_tiktoken_like(TEST_TOKENIZERS / "tiktoken_like")


def cut_prompts(gsm8k: Path, glaive: Path) -> None:
    """The demo's prompts: the first rows of two published files, as they are."""
    with gsm8k.open("rb") as file:
        (DEMO / "gsm8k.jsonl").write_bytes(b"".join(islice(file, 140)))
    rows = json.loads(glaive.read_text("utf-8"))[:100]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (DEMO / "glaive_tools.json").write_text(f"[\n{lines}\n]\n", "utf-8")


def make_demo_tokenizer(out: Path) -> None:
    """Byte-level BPE trained on the demo's prompts, with control tokens at sparse high ids."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = _split_into_words()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        _demo_texts(),
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    with_control_tokens({**model["vocab"], **SPECIAL, **ADDED}, merges, out, DEMO_TEMPLATE)
    _write_json(out / "generation_config.json", {"eos_token_id": SPECIAL["<|im_end|>"]})


def with_control_tokens(vocabulary: dict[str, int], merges: list, out: Path, template: str, **model: bool) -> None:
    """A tokenizer directory of byte-level BPE; the gaps in the vocabulary put the control tokens at their ids."""
    tokenizer = Tokenizer(BPE(vocabulary, merges, **model))
    tokenizer.pre_tokenizer = _split_into_words()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    _save(tokenizer, out, template, {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
                                     "unk_token": "[UNK]"})  # fmt: skip


def _split_into_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _demo_texts() -> list[str]:
    texts = []
    for line in (DEMO / "gsm8k.jsonl").read_text("utf-8").splitlines():
        texts += json.loads(line).values()
    for row in json.loads((DEMO / "glaive_tools.json").read_text("utf-8")):
        texts += [message["value"] for message in row["conversations"]]
        texts.append(json.dumps(json.loads(row["tools"]), ensure_ascii=False))
    return texts


def make_word_tokenizer(out: Path, template: str, *, add_bos: bool) -> None:
    """Bytes and nothing else, with [BOS] put before every text when `add_bos`."""
    from tokenizers.processors import TemplateProcessing

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[BOS]", "[EOS]"])
    if add_bos:
        bos = tokenizer.token_to_id("[BOS]")
        tokenizer.post_processor = TemplateProcessing("[BOS] $A", None, [("[BOS]", bos)])
    _save(tokenizer, out, template, {"bos_token": "[BOS]", "eos_token": "[EOS]"})


def make_tiktoken_like(out: Path) -> None:
    """A directory in the manner of Kimi's: tiktoken.model, a Python class, and no tokenizer.json."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    lines.append(base64.b64encode(b"  ") + b" 256\n")
    (out / "tiktoken.model").write_bytes(b"".join(lines))
    (out / "tokenization_bytes.py").write_text(TIKTOKEN_LIKE_CODE, "utf-8")
    added = {str(SPECIAL[token]): {"content": token, "special": True, "lstrip": False, "rstrip": False,
             "normalized": False, "single_word": False} for token in ("[BOS]", "[EOS]", "<|im_end|>")}  # fmt: skip
    _write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "ByteTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added,
    })  # fmt: skip
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
    (out / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}", "utf-8")


def _save(tokenizer: Tokenizer, out: Path, template: str, special: dict[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
    })  # fmt: skip
    (out / "chat_template.jinja").write_text(template, "utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

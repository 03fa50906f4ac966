"""From a conversation to token ids, with the demo's tokenizer and three small ones of our own."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import UsageError
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.tokenization import Renderer, RenderOptions
from producers.readers import read_records
from producers.shapes import conversation_of

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "app" / "demo_data"
TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
USER = {"role": "user", "content": "hé 🙂 <b>\u2028x"}


@pytest.fixture(scope="module")
def demo() -> Renderer:
    return Renderer(RenderOptions(str(DEMO / "tokenizer")))


def renderer(name: str, **options) -> Renderer:
    return Renderer(RenderOptions(str(TOKENIZERS / name), **options))


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def chat_with_call(arguments) -> list[dict]:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]


# --- ids


def test_ids_are_what_the_tokenizers_own_chat_call_gives(demo):
    """A flat list of ints, equal to apply_chat_template(tokenize=True), for every row of the demo."""
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(str(DEMO / "tokenizer"))
    rows = [*read_records(DEMO / "gsm8k.jsonl"), *read_records(DEMO / "glaive_tools.json")]
    assert len(rows) == 240
    for row in rows[::5]:
        conversation = conversation_of(row.value)
        ids = demo.render(conversation)
        assert all(type(token_id) is int for token_id in ids)
        assert ids == peer.apply_chat_template(
            conversation.messages, tools=conversation.tools, add_generation_prompt=True, return_dict=False
        )


@pytest.mark.parametrize("name", ["demo", "bos", "strict", "tiktoken_like"])
def test_many_rows_at_once_give_what_each_gives_alone(name):
    """In their order: of any length, with control tokens in what they say, refused; as text encoded by itself."""
    folder = DEMO / "tokenizer" if name == "demo" else TOKENIZERS / name
    own = Renderer(RenderOptions(str(folder), trust_remote_code=name == "tiktoken_like"))
    said = [USER["content"] * n for n in (1, 300, 2, 40, 3)]
    asked = [*said, f"a {own.decode(own.eos_token_ids[:1])} b", "the last"]
    many = [Conversation([{"role": "user", "content": text}]) for text in asked]
    many.insert(2, Conversation([{"role": "nobody", "content": "x"}, USER]))
    found = own.render_each(many)
    assert isinstance(found[2], Rejected)
    for conversation, ids in zip(many, found, strict=True):
        if isinstance(ids, Rejected):
            with pytest.raises(Rejected, match=re.escape(ids.detail)):
                own.render(conversation)
        elif own.holds_control_tokens(conversation):
            assert ids == own.render(conversation)
        else:
            assert ids == own.encode(own.text(conversation))
    assert sum(own.holds_control_tokens(one) for one in many) == 1


def test_the_demo_prompt_ends_in_an_open_thought(demo):
    """The generation prompt opens the reasoning; --template-kwargs may close it."""
    assert demo.text(Conversation([USER])).endswith("<|im_assistant|>assistant<|im_middle|><think>")
    options = RenderOptions(str(DEMO / "tokenizer"), template_kwargs={"thinking": False})
    assert Renderer(options).text(Conversation([USER])).endswith("<think></think>")


def test_one_bos_where_the_template_writes_one():
    """The bos tokenizer puts one before every text by itself, and its template writes one too."""
    with_bos = renderer("bos", date="2026-03-01")
    bos = with_bos._tokenizer.bos_token_id
    assert with_bos._tokenizer("x")["input_ids"][0] == bos
    assert with_bos.render(Conversation([USER])).count(bos) == 1
    silent = renderer("bos", chat_template=str(TOKENIZERS / "strict" / "chat_template.jinja"))
    assert silent.render(Conversation([USER])).count(bos) == 0


def test_a_date_in_a_template_is_the_runs_date():
    """The same prompt on every day of a run; the date is part of the fingerprint only where it is printed."""
    first, second = renderer("bos", date="2026-03-01"), renderer("bos", date="2026-03-02")
    assert "Today is 01 March 2026." in first.text(Conversation([USER]))
    assert "Today is 02 March 2026." in second.text(Conversation([USER]))
    assert "Today is 01 March 2026." in first.text(Conversation([USER]))
    assert first.fingerprint() != second.fingerprint()
    assert renderer("strict", date="2026-03-01").fingerprint() == renderer("strict").fingerprint()


def test_decoding_gives_the_text_with_its_control_tokens(demo):
    """Byte for byte, spaces before punctuation and all."""
    conversation = Conversation([{"role": "user", "content": "a , b . c n't  \n\t🙂"}])
    assert demo.decode(demo.render(conversation)) == demo.text(conversation)


def test_a_last_answer_is_continued(demo):
    """Prefill: nothing behind its text, no end of turn."""
    text = demo.text(Conversation([USER, {"role": "assistant", "content": "The answer"}]))
    assert text.endswith("<think></think>The answer")


# --- tools


def test_bare_functions_are_wrapped(demo):
    """A template gets OpenAI's form, whichever form the row has."""
    bare = {"name": "f", "description": "d", "parameters": {}}
    wrapped = {"type": "function", "function": bare}
    assert demo.render(Conversation([USER], [bare])) == demo.render(Conversation([USER], [wrapped]))


def test_arguments_come_in_the_form_that_the_template_takes(demo, tmp_path):
    """One that iterates or dumps gets the object, one that joins text gets JSON; never Python's repr."""
    conversation = Conversation(chat_with_call({"city": "Zürich", "n": 1}))
    assert '<|tool_call_argument_begin|>{"city": "Zürich", "n": 1}<' in demo.text(conversation)
    assert 'f({"city": "Zürich", "n": 1})' in renderer("strict").text(conversation)
    printing = tmp_path / "printing.jinja"
    printing.write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert '{"city": "Zürich", "n": 1}' in renderer("strict", chat_template=str(printing)).text(conversation)
    iterating = tmp_path / "iterating.jinja"
    iterating.write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments|items %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
    )
    assert "city=Zürich;n=1;" in renderer("strict", chat_template=str(iterating)).text(conversation)


# --- verdicts on rows


def test_what_a_template_raises_is_a_verdict_on_the_row():
    """A strict template refuses two user turns in a row; the next row is rendered."""
    strict = renderer("strict")
    with pytest.raises(Rejected) as caught:
        strict.render(Conversation([USER, USER]))
    assert caught.value.reason == Reason.TEMPLATE_ERROR
    assert "roles must alternate" in caught.value.detail
    assert strict.render(Conversation([USER]))


def test_ids_beyond_the_models_vocabulary_reject_the_row(tmp_path):
    """The bound is the model's: as given, or from config.json. The tokenizer's own sizes are no bound."""
    path = str(DEMO / "tokenizer")
    with pytest.raises(Rejected) as caught:
        Renderer(RenderOptions(path, model_vocab_size=163_606)).render(Conversation([USER]))
    assert caught.value.reason == Reason.IDS_OUT_OF_VOCABULARY
    assert Renderer(RenderOptions(path, model_vocab_size=163_607)).render(Conversation([USER]))
    copy = copy_of(DEMO / "tokenizer", tmp_path / "t")
    (copy / "config.json").write_text('{"text_config": {"vocab_size": 4096}}')
    assert Renderer(RenderOptions(str(copy))).model_vocab_size == 4096


def test_a_prompt_without_ids_rejects_the_row(tmp_path):
    """A template that renders nothing leaves nothing to send."""
    (tmp_path / "t.jinja").write_text("{% if false %}x{% endif %}")
    with pytest.raises(Rejected) as caught:
        renderer("strict", chat_template=str(tmp_path / "t.jinja")).render(Conversation([USER]))
    assert caught.value.reason == Reason.EMPTY_PROMPT


# --- the tokenizer


def test_the_vocabulary_size_is_its_largest_id_plus_one(demo):
    """Kimi's control tokens stand far above its words: the length of the vocabulary says nothing about the ids."""
    assert demo.vocab_size == 163_840
    assert len(demo._tokenizer) < 5_000
    assert max(demo.render(Conversation([USER]))) < demo.vocab_size
    assert renderer("tiktoken_like", trust_remote_code=True).vocab_size == 163_587


def test_end_ids_come_from_all_files_that_name_some(demo):
    """The tokenizer's [EOS], and the end of a turn from generation_config.json."""
    assert demo.eos_token_ids == [163_585, 163_586]


def test_the_fingerprint_is_of_contents(demo, tmp_path):
    """A copy elsewhere has the same; another template, token, kwarg or vocabulary has another."""
    copy = copy_of(DEMO / "tokenizer", tmp_path / "copy")
    assert Renderer(RenderOptions(str(copy))).fingerprint() == demo.fingerprint()
    json.dumps(demo.fingerprint())
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(
        json.dumps({**config, "transformers_version": "9", "name_or_path": "x"})
    )
    assert Renderer(RenderOptions(str(copy))).fingerprint() == demo.fingerprint()
    changed = [RenderOptions(str(copy), template_kwargs={"thinking": False})]
    changed.append(RenderOptions(str(copy), chat_template=str(TOKENIZERS / "bos" / "chat_template.jinja")))
    for options in changed:
        assert Renderer(options).fingerprint() != demo.fingerprint()
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "[PAD]"}))
    assert Renderer(RenderOptions(str(copy))).fingerprint() != demo.fingerprint()


def test_remote_code_is_part_of_the_fingerprint(tmp_path):
    """A changed class may give other ids."""
    copy = copy_of(TOKENIZERS / "tiktoken_like", tmp_path / "copy")
    before = Renderer(RenderOptions(str(copy), trust_remote_code=True)).fingerprint()
    assert before == renderer("tiktoken_like", trust_remote_code=True).fingerprint()
    with (copy / "tokenization_bytes.py").open("a") as file:
        file.write("\n# changed\n")
    assert Renderer(RenderOptions(str(copy), trust_remote_code=True)).fingerprint() != before


def test_a_tokenizer_with_its_own_code_works_if_trusted():
    """As Kimi's: tiktoken.model and a class beside it."""
    own = renderer("tiktoken_like", trust_remote_code=True)
    ids = own.render(Conversation([{"role": "user", "content": "hé  🙂"}]))
    assert ids[-12:] == [163_586, *b"assistant: "]
    assert own.decode(ids) == "user: hé  🙂<|im_end|>assistant: "


def test_a_renderer_pickles_as_its_options(demo):
    """So that a process of a pool loads its own."""
    data = pickle.dumps(demo)
    assert len(data) < 1000
    assert pickle.loads(data).render(Conversation([USER])) == demo.render(Conversation([USER]))


# --- sentences


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (RenderOptions("/no/such/dir"), "no such directory"),
        (RenderOptions(str(DEMO / "gsm8k.jsonl")), "name the directory"),
        (RenderOptions(str(DEMO)), "cannot be loaded"),
        (RenderOptions(str(TOKENIZERS / "tiktoken_like")), "pass --trust-remote-code if you trust it"),
        (RenderOptions(str(TOKENIZERS / "strict"), chat_template="/no/template"), "--chat-template /no/template"),
    ],
)
def test_a_tokenizer_that_cannot_work_is_an_error_with_its_remedy(options, says):
    """Before the first row, in one sentence."""
    with pytest.raises(UsageError, match=says) as caught:
        Renderer(options)
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_does_not_give_is_one_sentence(monkeypatch, tmp_path):
    """Without a network the way out is a local directory."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="name a local directory, or check the name and the network"):
        Renderer(RenderOptions("nobody/no-such-model"))


def hub_with(monkeypatch, cache: Path, commits: list[str]) -> None:
    """The cache of a hub that cannot be reached; the last commit is its main."""
    home = cache / "models--org--teacher"
    for commit in commits:
        shutil.copytree(TOKENIZERS / "strict", home / "snapshots" / commit)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commits[-1])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def test_a_name_on_the_hub_is_pinned_to_its_commit(monkeypatch, tmp_path):
    """`org/name` is what the hub has now, `org/name@revision` what it had then; run.json keeps the commit."""
    old, new = "a" * 40, "b" * 40
    hub_with(monkeypatch, tmp_path, [old, new])
    assert Renderer(RenderOptions("org/teacher")).pinned_name == f"org/teacher@{new}"
    assert Renderer(RenderOptions(f"org/teacher@{old}")).pinned_name == f"org/teacher@{old}"
    assert renderer("strict").pinned_name == str(TOKENIZERS / "strict")


def test_no_chat_template_and_a_broken_one_are_errors(tmp_path):
    """No row of any kind could be rendered with them."""
    copy = copy_of(TOKENIZERS / "strict", tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="has no chat template; give one with --chat-template FILE"):
        Renderer(RenderOptions(str(copy)))
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.")
    with pytest.raises(UsageError, match=r"is no valid template \(.*broken.jinja, line 2\)"):
        Renderer(RenderOptions(str(copy), chat_template=str(tmp_path / "broken.jinja")))


def test_importing_the_room_does_not_import_transformers():
    """`headrace --help` must not wait a second and a half for it."""
    code = "import app.tokenization, producers.readers, producers.shapes, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_loading_says_nothing_on_the_terminal():
    """transformers would tell people that torch is missing."""
    code = f"from app.tokenization import *; Renderer(RenderOptions({str(DEMO / 'tokenizer')!r}))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_is_not_imported_where_it_is_installed(tmp_path):
    """Each rendering process would pay seconds and 500 MB for it; a tokenizer needs none."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('print("torch was imported")\n__version__ = "2.9.0"\n')
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(metadata)
    code = f"from app.tokenization import *; Renderer(RenderOptions({str(DEMO / 'tokenizer')!r})); print('loaded')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["loaded"], done.stderr

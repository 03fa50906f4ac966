"""From a conversation to token ids: the only room that knows transformers.

Invariant: the ids are what the tokenizer's own `apply_chat_template(..., tokenize=True)` gives, a flat list of ints, so
that there is one BOS where the template writes one and none is added. Nothing but the conversation, the tokenizer's
files and the options goes into them: a template that asks for today's date gets the date of the run.

transformers is imported when a Renderer is made, not before: `headrace --help` must not wait for it.

Text in a row that looks like a control token stays text (app/control_tokens.py): a row cannot forge turns. Where a
tokenizer cannot write it as text, the row is rejected.
"""

import datetime
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from app.control_tokens import ControlTokens, encoded
from app.errors import UsageError
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.sglang.tool_dump import ToolForm, bare, dumped
from app.template_input import refuse_kwargs, strange_role, with_string_arguments
from app.tokenizer_files import (
    TOKENIZER_FILES,
    content_digest,
    directory_of,
    json_file,
    one_line,
    own_code,
    refuse_untrusted_code,
)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How conversations are rendered.

    tokenizer: a directory, or a name on the hub, `org/name` or `org/name@revision`. chat_template: a file instead of
    the tokenizer's own template. template_kwargs: more variables for the template. date: ISO date for templates that
    print one (None: today); fix it once per run. model_vocab_size: of the model that will get the ids (None: what its
    config.json says). tool_form: how the template gets tools.
    """

    tokenizer: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    date: str | None = None
    model_vocab_size: int | None = None
    tool_form: ToolForm = "given"


class Renderer:
    """A tokenizer with its chat template. Pickles as its options, so that a pool's child loads its own."""

    def __init__(self, options: RenderOptions):
        """Loads the tokenizer. Raises UsageError with the remedy if that cannot work."""
        refuse_kwargs(options.template_kwargs)
        self.options = options
        self.directory = directory_of(options.tokenizer)
        refuse_untrusted_code(self.directory, options.tokenizer, trusted=options.trust_remote_code)
        self._tokenizer = _load(
            self.directory, _stamp(self.directory), options.tokenizer, options.trust_remote_code, options.chat_template
        )
        self._template = _template_of(self._tokenizer, options)
        self.date = datetime.date.fromisoformat(options.date) if options.date else datetime.date.today()  # noqa: DTZ011
        self.is_dated = "strftime_now" in str(self._template)

    @property
    def pinned_name(self) -> str:
        """The tokenizer by its name on the hub with the commit that was loaded; a directory as it was given."""
        name, _, _ = self.options.tokenizer.partition("@")
        return f"{name}@{self.directory.name}" if self.directory.parent.name == "snapshots" else self.options.tokenizer

    def __reduce__(self) -> tuple[type["Renderer"], tuple[RenderOptions]]:
        return Renderer, (self.options,)

    def render(self, conversation: Conversation) -> list[int]:
        """The prompt's ids, generation prompt included. Raises Rejected(TEMPLATE_ERROR, EMPTY_PROMPT, CONTROL_TOKENS,
        IDS_OUT_OF_VOCABULARY)."""
        (found,) = self.render_each([conversation])
        if isinstance(found, Rejected):
            raise found
        return found

    def render_each(self, conversations: Iterable[Conversation]) -> list[list[int] | Rejected]:
        """`render` of each, or what it raises. All texts are made before any ids: in turns both take twice as long."""
        found = [self._text_or_ids(conversation) for conversation in conversations]
        texts = [text for text in found if isinstance(text, str)]
        ids = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
        return [self._checked(next(ids)) if isinstance(one, str) else one for one in found]

    def _text_or_ids(self, conversation: Conversation) -> str | list[int] | Rejected:
        """The prompt as text; as ids where control tokens stand in the row."""
        try:
            if self.holds_control_tokens(conversation):
                return self._checked(self._encode_as_text(conversation))
            return self.text(conversation)
        except Rejected as verdict:
            return verdict

    def text(self, conversation: Conversation) -> str:
        """The prompt as text. A conversation that ends in an answer is to be continued. Raises Rejected."""
        self._refuse_strange_role(conversation)
        return self._rendered(conversation.messages, conversation.tools)

    def holds_control_tokens(self, conversation: Conversation) -> bool:
        """Whether a control token stands in what the row itself says."""
        return self._control.are_in([conversation.messages, conversation.tools])

    def text_control_tokens(self, ids: list[int]) -> int:
        """Control tokens that a prompt says as text, by the difference of what it says and what it is."""
        control = sum(token_id in self._control_ids for token_id in ids)
        return max(0, self._control.count_in(self.decode(ids)) - control)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these ids, control tokens included unless said; for people, never to be tokenized again."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """The ids of a text by itself, control tokens recognised, none added."""
        return self._encode(text)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id that the tokenizer can make, plus one. (Its length and `vocab_size` leave out gaps.)"""
        return max(max(self._tokenizer.get_vocab().values()), *self._tokenizer.added_tokens_decoder, 0) + 1

    @cached_property
    def model_vocab_size(self) -> int | None:
        """Ids that the model knows: as given, or from the config.json beside the tokenizer; None if nobody says."""
        if self.options.model_vocab_size is not None:
            return self.options.model_vocab_size
        config = json_file(self.directory / "config.json")
        found = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        return found if isinstance(found, int) else None

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids at which the model stops: the tokenizer's, config.json's and generation_config.json's, sorted."""
        found = {self._tokenizer.eos_token_id}
        for name in ("config.json", "generation_config.json"):
            ids = json_file(self.directory / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
        return sorted(token_id for token_id in found if isinstance(token_id, int))

    def fingerprint(self) -> dict[str, Any]:
        """All of the tokenizer that decides about ids, by content: no path, no version of a library."""
        patterns = (*TOKENIZER_FILES, "*.py") if self._runs_own_code else TOKENIZER_FILES
        files = sorted({path for pattern in patterns for path in self.directory.glob(pattern)})
        return {
            "files": {path.name: content_digest(path) for path in files},
            "special_tokens": {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()},
            "chat_template": self._template,
            "template_kwargs": self.options.template_kwargs,
            "date": self.date.isoformat() if self.is_dated else "",
        }

    @property
    def _runs_own_code(self) -> bool:
        return self.options.trust_remote_code and own_code(self.directory) is not None

    @cached_property
    def _wants_string_arguments(self) -> bool:
        """Whether the template joins a call's arguments as text: given a dict it fails, or prints Python's repr."""
        for what_follows in ("tool", "user"):  # some templates know no tool messages
            as_dict, as_text = (self._probed(form, what_follows) for form in ({"probe": "x"}, '{"probe": "x"}'))
            if as_dict is not None or as_text is not None:
                return as_dict is None or "{'probe'" in as_dict
        return False

    def _probed(self, arguments: Any, what_follows: str) -> str | None:
        """A chat with a call as the template writes it, None if it refuses it."""
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": what_follows, "content": "x", **({"tool_call_id": call["id"]} if what_follows == "tool" else {})},
        ]
        try:
            return self._apply_template(messages, None)
        except Exception:  # noqa: BLE001 - see `text`
            return None

    def _refuse_strange_role(self, conversation: Conversation) -> None:
        if (strange := strange_role(conversation.messages, self._template)) is not None:
            raise Rejected(Reason.TEMPLATE_ERROR, strange)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        if any("tool_calls" in message for message in messages) and self._wants_string_arguments:
            messages = [with_string_arguments(message) for message in messages]
        tools = dumped(tools, self.options.tool_form) if tools else None
        try:
            try:
                return self._apply_template(messages, tools)
            except Exception:
                if tools is None or bare(tools) == tools:
                    raise
                return self._apply_template(messages, bare(tools))
        except MemoryError:
            raise
        except Exception as exc:  # a template is its author's program: whatever it raises is its verdict
            raise Rejected(Reason.TEMPLATE_ERROR, f"the chat template refused it: {one_line(exc)}") from exc

    def _apply_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        if self.is_dated:
            # Templates may ask for today, and transformers takes no other answer as an argument.
            _compiled(self._tokenizer.get_chat_template(tools=tools)).globals["strftime_now"] = self.date.strftime
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **self.options.template_kwargs,
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode_as_text(self, conversation: Conversation) -> list[int]:
        """The ids of a row that holds control tokens, each of them tokenized as the text that it is."""
        self._refuse_strange_role(conversation)
        try:
            hidden = self._control.hide(conversation.messages, conversation.tools)
            rendered = self._rendered(hidden.messages, hidden.tools)
            return encoded(hidden.pieces(rendered), self._encode, self._encode_plain)
        except ValueError as exc:
            raise Rejected(Reason.CONTROL_TOKENS, f"control tokens in it cannot be written as text: {exc}") from exc

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which nothing is a control token. Raises ValueError if this tokenizer can't do that."""
        if self._words is not None:
            ids = self._words.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if not self._control_ids.isdisjoint(ids):
            raise ValueError("the tokenizer knows them as words, too")
        return ids

    @cached_property
    def _control(self) -> ControlTokens:
        added = {token.content: token.special for token in self._tokenizer.added_tokens_decoder.values()}
        return ControlTokens(added, str(self._template))

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.content in self._control.texts)

    @cached_property
    def _words(self) -> Any:
        """A fast tokenizer without its added tokens, made for the first row that needs it; None for another kind."""
        if not self._tokenizer.is_fast:
            return None
        from tokenizers import Tokenizer

        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(described | {"added_tokens": [], "post_processor": None}))

    def _checked(self, ids: list[int]) -> list[int] | Rejected:
        if not ids:
            return Rejected(Reason.EMPTY_PROMPT, "the chat template made nothing of it")
        limit = self.model_vocab_size
        if limit is not None and max(ids) >= limit:
            detail = f"the tokenizer made id {max(ids)}, the model has {limit}"
            return Rejected(Reason.IDS_OUT_OF_VOCABULARY, detail)
        return ids


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Another one if a file of the directory was changed."""
    states = ((path.name, path.stat()) for path in directory.iterdir() if path.exists())
    return tuple(sorted((name, state.st_mtime_ns, state.st_size) for name, state in states))


@lru_cache(maxsize=1)
def _load(directory: Path, stamp: object, name: str, trust_remote_code: bool, chat_template: str | None) -> Any:
    """The last one is kept: a command asks for the same several times, and the producer that it forks once more.

    chat_template: the tokenizer is given it later, and keeps it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would tell people on stderr that torch is missing
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # rows come one by one; its threads would be lost in a fork
    if not trust_remote_code:
        # Where torch is installed transformers imports it: seconds and 500 MB a process.
        sys.modules.setdefault("torch", None)
    auto_tokenizer = _auto_tokenizer()
    if trust_remote_code:
        _keep_old_import()
    try:
        return auto_tokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except Exception as exc:  # parsers, Rust and remote code raise what they like; it ends the command
        raise UsageError(
            f"--tokenizer {name} cannot be loaded ({type(exc).__name__}: {one_line(exc)}); "
            "it needs tokenizer.json, or the model's own tokenizer files with --trust-remote-code."
        ) from exc


@cache
def _auto_tokenizer() -> Any:
    """transformers' AutoTokenizer.

    Importing it reads the sources of all models twice, a quarter of a second each time: by their folder, and by the
    file in it that makes it a package. The second time gets what the first one found.
    """
    from transformers.utils import import_utils

    read = import_utils.create_import_structure_from_path  # remembers by argument
    import_utils.create_import_structure_from_path = lambda path: read(
        Path(path).parent if Path(path).name == "__init__.py" else path
    )
    try:
        from transformers import AutoTokenizer
    finally:
        import_utils.create_import_structure_from_path = read
    return AutoTokenizer


def _keep_old_import() -> None:
    """Kimi's tokenization_kimi.py, as published with K2 and K2.5, takes this from where only transformers 4 has it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.gpt2 import tokenization_gpt2

    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        tokenization_gpt2.bytes_to_unicode = bytes_to_unicode


def _template_of(tokenizer: Any, options: RenderOptions) -> Any:
    if options.chat_template:
        try:
            tokenizer.chat_template = Path(options.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"--chat-template {options.chat_template} cannot be read: {one_line(exc)}.") from exc
    if not tokenizer.chat_template:
        raise UsageError(f"The tokenizer {options.tokenizer} has no chat template; give one with --chat-template FILE.")
    _refuse_broken(tokenizer.chat_template, options)
    return tokenizer.chat_template


def _refuse_broken(template: Any, options: RenderOptions) -> None:
    from jinja2 import TemplateSyntaxError

    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            _compiled(text)
        except TemplateSyntaxError as exc:
            where = f"{options.chat_template or options.tokenizer}, line {exc.lineno}"
            raise UsageError(f"The chat template is no valid template ({where}): {one_line(exc)}.") from exc


def _compiled(template: str) -> Any:
    """transformers' own compiled form of a template, the one that it renders with."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)

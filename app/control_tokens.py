"""Control tokens that stand in a row's own text: told from those that the chat template writes. Pure.

A tokenizer turns `<|im_end|>` into the end of a turn wherever it stands, so that a text which talks about chat formats
would forge turns. Here each such string in a row is replaced by a placeholder before the template is rendered; in what
comes out, the pieces between the template's own tokens that hold placeholders are given back as texts, to be tokenized
without any control token. The other pieces, and all rows without such strings, are not touched.

In an answer, the tags that open and close its reasoning stay what they are: templates look for them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

_REASONING_TAGS = ("<think>", "</think>")
_BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>")
_PRIVATE = range(0xE000, 0xF8FF)  # characters without a meaning: no filter of a template changes them


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered prompt. hidden: with its placeholders; text: as the row has it."""

    hidden: str
    text: str

    @property
    def is_plain(self) -> bool:
        """Whether it is to be tokenized without control tokens."""
        return self.hidden != self.text


class ControlTokens:
    """The control tokens of a tokenizer.

    added: text → whether it is called special, of every token that a tokenizer finds before it splits into words;
    template: of the chats. A control token is one that is special, stands in the template, opens or closes reasoning,
    or is written `<|so|>`; the rest (runs of spaces, HTML tags) are words.
    """

    def __init__(self, added: dict[str, bool], template: str):
        self.texts = frozenset(
            text for text, special in added.items()
            if text.strip()
            and (special or text in template or text in _REASONING_TAGS or _BARRED.fullmatch(text))
        )  # fmt: skip
        self._added = _any_of(added)
        self._pattern = _any_of(self.texts)
        self._of_others = _any_of(self.texts - set(_REASONING_TAGS))
        self._in_json = re.compile(_alternatives(orjson.dumps(text)[1:-1].decode() for text in self.texts).encode())

    def count_in(self, text: str) -> int:
        """How many stand in a text."""
        return sum(1 for _ in self._pattern.finditer(text)) if self.texts else 0

    def are_in(self, value: Any) -> bool:
        """Whether one stands anywhere in a JSON value."""
        return bool(self.texts) and self._in_json.search(orjson.dumps(value)) is not None

    def hide(self, messages: list[dict[str, Any]], tools: Any) -> "Hidden":
        """Messages and tools with placeholders for the control tokens in them. Raises ValueError."""
        hidden = Hidden(_free_mark(orjson.dumps([messages, tools]).decode()), self._added)
        hidden.messages = [
            hidden.of(message, self._of_others if message["role"] == "assistant" else self._pattern)
            for message in messages
        ]
        hidden.tools = hidden.of(tools, self._pattern)
        return hidden


class Hidden:
    """What a row says, with placeholders, and the way back."""

    messages: list[dict[str, Any]]
    tools: Any

    def __init__(self, mark: str, added: re.Pattern[str]):
        self._mark, self._added = mark, added
        self._texts: list[str] = []

    def of(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """The same JSON value with its strings, names of fields included, cleared of what the pattern finds."""
        if isinstance(value, str):
            return pattern.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {self.of(name, pattern): self.of(inner, pattern) for name, inner in value.items()}
        return [self.of(inner, pattern) for inner in value] if isinstance(value, list) else value

    def pieces(self, rendered: str) -> list[Piece]:
        """A rendered prompt cut into few pieces. Raises ValueError if the template changed a placeholder."""
        if any(mark in self._lifted(rendered) for mark in (self._mark, f"\\u{ord(self._mark):04x}")):
            raise ValueError("the template cuts or rewrites the text around them")
        return [Piece(hidden, self._lifted(hidden)) for hidden in _joined(self._cut(rendered), self._mark)]

    def _placeholder(self, found: re.Match[str]) -> str:
        self._texts.append(found.group())
        return f"{self._mark}{len(self._texts) - 1}{self._mark}"

    def _lifted(self, text: str) -> str:
        return re.sub(f"{self._mark}([0-9]+){self._mark}", lambda found: self._texts[int(found.group(1))], text)

    def _cut(self, rendered: str) -> Iterator[str]:
        """The tokens that the tokenizer finds first, and what stands between them."""
        start = 0
        for found in self._added.finditer(rendered):
            yield rendered[start : found.start()]
            yield found.group()
            start = found.end()
        yield rendered[start:]


def _joined(parts: Iterable[str], mark: str) -> Iterator[str]:
    """Neighbours without placeholders as one."""
    ordinary = ""
    for part in parts:
        if mark in part:
            if ordinary:
                yield ordinary
            yield part
            ordinary = ""
        else:
            ordinary += part
    if ordinary:
        yield ordinary


def encoded(pieces: list[Piece], ordinary: Callable[[str], list[int]], plain: Callable[[str], list[int]]) -> list[int]:
    """The ids of pieces. Raises ValueError if this tokenizer gives other ids in pieces than at once.

    ordinary, plain: tokenize a text with all tokens, and without the added ones.
    """
    if not any(piece.is_plain for piece in pieces):
        return ordinary("".join(piece.text for piece in pieces))
    apart = [token_id for piece in pieces for token_id in (plain if piece.is_plain else ordinary)(piece.hidden)]
    if apart != ordinary("".join(piece.hidden for piece in pieces)):
        raise ValueError("the tokenizer makes other ids of a prompt in pieces")
    return [token_id for piece in pieces for token_id in (plain if piece.is_plain else ordinary)(piece.text)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(texts))


def _alternatives(texts: Iterable[str]) -> str:
    """The longest first, as tokenizers match."""
    return "|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))) or r"(?!)"


def _free_mark(text: str) -> str:
    """A character that the text doesn't hold. Raises ValueError if it holds them all."""
    for code in _PRIVATE:
        if chr(code) not in text:
            return chr(code)
    raise ValueError("it holds every character without a meaning")

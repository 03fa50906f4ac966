"""What the pages of the documentation tell people to type."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: Pages that people read from top to bottom; the reference is made from the code.
REFERENCE = ROOT / "docs" / "reference.md"
READ = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")} - {REFERENCE})
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: `sh`: every line is a command. `console`: those after "$ ", the others are output.
TYPED = ("sh", "console")


@dataclass(frozen=True, slots=True)
class Line:
    """One command, as it stands on a page."""

    page: str  #: path below the repository
    number: int  #: of its first line
    block: int  #: of the page
    text: str  #: joined where it goes on after a backslash, without its comment
    output: tuple[str, ...] = ()  #: what the page says that it prints

    @property
    def words(self) -> list[str]:
        """Its words, after variables set for it alone."""
        words = shlex.split(self.text)
        while "=" in words[0].split("/")[0] and not words[0].startswith("-"):
            words.pop(0)
        return words

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """(language, contents, number of the first line) of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.start(2)) + 1


def lines_of(page: Path) -> list[Line]:
    """The commands of a page in order."""
    name, made = str(page.relative_to(ROOT)), []
    for block, (language, text, first) in enumerate(blocks(page)):
        if language in TYPED:
            made += _lines(name, block, text, first, language == "console")
    return made


def _lines(page: str, block: int, text: str, first: int, console: bool) -> Iterator[Line]:
    rows = text.splitlines()
    while rows:
        number, row = first + text.count("\n") - len(rows), rows.pop(0)
        while row.endswith("\\"):
            row = f"{row[:-1].rstrip()} {rows.pop(0).strip()}"
        if console and not row.startswith("$ "):
            continue  # what was printed before the first command
        output = []
        while console and rows and not rows[0].startswith("$ "):
            output.append(rows.pop(0))
        command = _without_comment(row.removeprefix("$ "))
        if command:
            yield Line(page, number, block, command, tuple(output))


def _without_comment(row: str) -> str:
    """Quotes keep a `#`."""
    quote = ""
    for at, sign in enumerate(row):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (at == 0 or row[at - 1].isspace()):
            return row[:at].rstrip()
    return row.rstrip()

"""What the documentation says is what the code does: commands parse, links lead somewhere, the reference is current."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from app.cli.main import cli
from app.cli.reference import reference

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each `headrace …` line in a page's code blocks; a line goes on after a backslash."""
    for block in _BLOCK.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = re.sub(r"^\s*(\$ )?(exec )?((?:[A-Z_]+=\S+ )*)", "", line)
            if line.startswith("headrace ") and not set(line) & set("…─"):  # no ellipsis, no drawing
                yield [word for word in shlex.split(line, comments=True)[1:] if word != "&"]


COMMANDS = [(page, words) for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.stem}: {' '.join(words)[:60]}" for page, words in COMMANDS]
)
def test_a_command_in_the_documentation_is_one(page, words):
    """Command, options and their values are accepted; nothing is run."""
    group: click.Command = cli
    context = click.Context(cli, info_name="headrace")
    while isinstance(group, click.Group):
        name, group, words = group.resolve_command(context, list(words))
    group.make_context(name, words, parent=context)


def test_the_documentation_has_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files_that_are_there(page):
    targets = [target for target in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_reference_is_what_the_code_says():
    """`make reference` writes it again."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference() + "\n"

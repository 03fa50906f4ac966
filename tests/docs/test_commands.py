"""Every command that a page tells people to type is played, or stands in the table below with the reason why not."""

import importlib.util
import re
import subprocess

import click
import pytest

from app.cli.main import cli
from tests.docs.pages import READ, REFERENCE, ROOT, TYPED, Line, blocks, lines_of
from tests.docs.stage import OFFLINE, Stage

#: Lines that no test plays → why, and what holds them instead.
NOT_PLAYED = {
    r"make (setup|demo|test|lock)\b(?!-)": "sets this checkout up, or runs these tests; `headrace demo` has a test",
    r"make (test-long|test-real|chaos|bench|screenshots)\b": "minutes; the target is there",
    r"\. \.venv/bin/activate": "changes the shell of a person",
    r"python -m (benchmarks|tests)\.": "minutes; the module is there",
    r"(cp \.env\.example|docker compose) ": "no Docker engine here; tests/deploy runs each service's command",
    r"export HEADRACE_REDIS='rediss": "wants a certificate: tests/acceptance/test_security.py plays it with one",
}
#: Commands that end otherwise than with 0, as their page says.
ENDS_WITH = {"headrace plan --hicache-size 300": 2}

LINES = [line for page in READ for line in lines_of(page)]
COMMANDS = [line for line in LINES if line.words[0] == "headrace"]
_START = r"(?:[A-Z_]+=\S+ )*(?:exec )?(?:headrace|make|docker|pip) \w[^─\n]*$"


def expected(line: Line) -> int:
    return next((code for start, code in ENDS_WITH.items() if line.text.startswith(start)), 0)


def check(line: Line, code: int, said: str) -> None:
    assert code == expected(line), f"{line} ended with {code}:\n{said}"
    assert "Traceback" not in said
    for row in line.output:  # what the page shows begins like what comes
        assert not row.strip() or row.split()[0] in said, f"{line} does not say {row!r}:\n{said}"


def test_no_command_stands_where_nobody_reads_it():
    """In a block of another language, or indented: it would rot."""
    for page in READ:
        text = page.read_text(encoding="utf-8")
        for language, contents, _ in blocks(page):
            text = text.replace(contents, "")
            if language not in (*TYPED, "bash"):
                assert not re.findall(rf"^(?:\$ )?{_START}", contents, re.MULTILINE), page
        assert not re.findall(rf"^(?:\$ |    ){_START}", text, re.MULTILINE), page


@pytest.mark.parametrize("line", [*COMMANDS, *lines_of(REFERENCE)], ids=str)
def test_a_command_exists_with_these_options(line):
    """Command, options and their values are accepted; nothing is run."""
    parse(line.words[1:])


def parse(words: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(cli, info_name="headrace")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, list(words))
    command.make_context(name, words, parent=context)


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_prose_names_is_there(page):
    """`headrace COMMAND … --option` between words: the command, and every option as one of its own."""
    text = page.read_text(encoding="utf-8")
    for _, contents, _ in blocks(page):
        text = text.replace(contents, "")
    for words in map(str.split, re.findall(r"`headrace ([a-z][^`]*)`", text)):
        command: click.Command = cli
        while isinstance(command, click.Group) and words and words[0].isalpha():
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words


def test_scripts_are_valid_and_their_commands_exist():
    """Blocks of bash are files for a batch system, not lines for a person: read by bash and by our command tree."""
    scripts = [(page, text) for page in READ for language, text, _ in blocks(page) if language == "bash"]
    assert scripts
    for page, text in scripts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        for found in re.finditer(r"^(?:exec )?(headrace [^&\n]*)", text, re.MULTILINE):
            parse(Line(str(page), 0, 0, found[1].rstrip()).words[1:])


def test_what_is_not_played_is_listed_and_would_be_found():
    others = [line for line in LINES if line.words[0] != "headrace"]
    for line in others:
        assert any(re.match(pattern, line.text) for pattern in NOT_PLAYED), line
    for pattern in NOT_PLAYED:
        assert any(re.search(pattern, line.text) for line in others), f"nobody says {pattern}: take it out"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for line in others for word in re.findall(r"\bmake ([\w-]+)", line.text)} <= targets
    for module in (found[1] for line in others if (found := re.match(r"python -m ([\w.]+)", line.text))):
        assert importlib.util.find_spec(module), module


def test_what_needs_no_running_run_does_as_its_page_says(tmp_path):
    """In one folder, in the order of the pages, on the demo's prompts and answers that another script saved."""
    played = 0
    with Stage(tmp_path / "stage") as stage:
        for line in COMMANDS:
            if line.words[1] in OFFLINE:
                check(line, *stage.play_here(line))
                played += 1
    assert played > 20


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", sorted({line.page for line in COMMANDS}))
def test_a_page_is_played_from_top_to_bottom(page, tmp_path):
    """With real processes, simulated servers and a Redis; what stays is there until its block ends."""
    lines = [line for line in COMMANDS if line.page == page]
    with Stage(tmp_path / "stage") as stage:
        for line, after in zip(lines, [*lines[1:], None], strict=True):
            check(line, *stage.play(line))
            if after is None or after.block != line.block:
                assert stage.end_block() == []

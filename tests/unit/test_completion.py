"""Completion in a shell: commands, options, reasons, paths; through the same variables that the shells set."""

import shutil
import subprocess

import pytest
from click.shell_completion import BashComplete

from app.cli.main import cli, main


def completed(*words: str) -> list[tuple[str, str]]:
    """(type, value) of what the last word may become. Types: plain, file, dir (the shell itself lists these two)."""
    *before, incomplete = words
    found = BashComplete(cli, {}, "headrace", "_HEADRACE_COMPLETE").get_completions(before, incomplete)
    return [(one.type, one.value) for one in found]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("ver",), ("plain", "verify")),
        (("workers", "sc"), ("plain", "scale")),
        (("endpoints", "dr"), ("plain", "drain")),
        (("run", "--max-new"), ("plain", "--max-new-tokens")),
        (("retry", "out", "--reason", "trunc"), ("plain", "truncated")),
        (("export", "out", "--format", "par"), ("plain", "parquet")),
        (("worker", "--lane", "s"), ("plain", "short")),
        (("status", "ru"), ("dir", "ru")),
        (("watch", "ru"), ("dir", "ru")),
        (("run", "--out", "ru"), ("dir", "ru")),
        (("run", "B1=da"), ("file", "B1=da")),
        (("run", "--tokenizer", "/mo"), ("file", "/mo")),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_what_is_begun_is_completed(words, wanted):
    assert wanted in completed(*words)


def test_hidden_commands_are_not_offered():
    assert "produce" not in [value for _, value in completed("")]


@pytest.mark.parametrize(
    ("shell", "environment", "wanted"),
    [
        ("bash", {"COMP_WORDS": "headrace retry out --reason trunc", "COMP_CWORD": "4"}, "plain,truncated"),
        ("zsh", {"COMP_WORDS": "headrace retry out --reason trunc", "COMP_CWORD": "4"}, "plain\ntruncated"),
        ("fish", {"COMP_WORDS": "headrace retry out --reason trunc", "COMP_CWORD": "trunc"}, "plain"),
    ],
)
def test_each_shell_gets_its_script_and_its_answers(shell, environment, wanted, monkeypatch, capsys):
    """As docs/command-line.md has it: the script, then what the script asks for at every TAB."""
    monkeypatch.setenv("_HEADRACE_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        main([])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"_HEADRACE_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
    monkeypatch.setenv("_HEADRACE_COMPLETE", f"{shell}_complete")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    answer = capsys.readouterr().out
    assert wanted in answer
    assert "truncated" in answer

"""Where settings come from: the command line, the environment, a file; and how they reach a run's other processes."""

import re
import stat
import subprocess
import sys

import pytest

from app.cli.main import SETTABLE, cli
from app.cli.settings_file import defaults_from
from app.errors import UsageError
from app.settings import load_settings, save_settings, settings_of
from tests.belt import ROOT
from tests.unit.test_cli_usage import data, said

__all__ = ["data"]
VALUES = {"inputs": ["a"], "out": "out", "endpoints": ["http://x"], "tokenizer": "t"}


def arguments(**more: str) -> list[str]:
    """Of a run that fails over its --limit, so that the sentence says which value counted."""
    given = {"endpoint": "http://127.0.0.1:9", "tokenizer": "t", "out": "out", **more}
    return ["run", "data.jsonl", *(word for name, value in given.items() for word in (f"--{name}", value))]


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(data, capsys, monkeypatch):
    """Three values for one option: the nearest counts."""
    (data / "headrace.toml").write_text("limit = -3\n")
    assert "not -3" in said(capsys, *arguments())
    monkeypatch.setenv("HEADRACE_LIMIT", "-2")
    assert "not -2" in said(capsys, *arguments())
    assert "not -1" in said(capsys, *arguments(limit="-1"))


@pytest.mark.parametrize("value", ["http://a:1 ftp://b", "http://a:1,ftp://b", " http://a:1 ,\tftp://b "])
def test_several_endpoints_in_one_variable_stand_apart_by_spaces_or_commas(data, capsys, monkeypatch, value):
    """Both are read: the second one is the wrong one."""
    monkeypatch.setenv("HEADRACE_ENDPOINT", value)
    monkeypatch.setenv("HEADRACE_TOKENIZER", "t")
    monkeypatch.setenv("HEADRACE_OUT", "out")
    assert "'ftp://b'" in said(capsys, "run", "data.jsonl")


def test_a_wrong_value_from_the_environment_names_the_variable(data, capsys, monkeypatch):
    """Nobody looks for it on the command line."""
    monkeypatch.setenv("HEADRACE_LIMIT", "many")
    assert "HEADRACE_LIMIT" in said(capsys, *arguments())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('max-new-tokns = 1', "did you mean max-new-tokens"),
        ("zzz = 1", "'zzz'"),
        ("limit = true", "limit must be a whole number"),
        ("limit = 1.5", "limit must be a whole number"),
        ("max_new_tokens = 'x'", "max-new-tokens must be a whole number"),
        ("temperature = 'warm'", "temperature must be a number"),
        ("tokenizer = 5", "tokenizer must be a text"),
        ("fit-output = 1", "fit-output must be true or false"),
        ("endpoint = [1]", "endpoint must be a text"),
        ("sampling = 3", "sampling must be a text"),
        ("limit =", "no valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_settings_file_is_told_with_file_and_setting(data, capsys, text, words):
    """Unknown names and wrong types: exit 2, also of commands that need no setting."""
    (data / "headrace.toml").write_text(text + "\n")
    told = said(capsys, "status", ".")
    assert words in told
    assert "headrace.toml" in told


def test_a_settings_file_that_is_named_must_exist(data, capsys, monkeypatch):
    """Only the one in the working directory may be absent."""
    monkeypatch.setenv("HEADRACE_SETTINGS", "other.toml")
    assert "other.toml" in said(capsys, "status", ".")


def test_a_settings_file_gives_lists_tables_and_flags(data, capsys):
    """endpoint as a list, sampling as a table; found wrong by what they hold, so they were read."""
    (data / "headrace.toml").write_text(
        'endpoint = ["http://a:1", "http://b:2"]\ntokenizer = "t"\nout = "out"\nfit-output = true\n'
        "[sampling]\nmin_p = 7\n"
    )
    assert "min_p must be a number from 0 to 1" in said(capsys, "run", "data.jsonl")


def test_the_settings_file_does_not_steer_the_demo():
    """Its --out would send the demo's files into a real run."""
    assert "demo" not in SETTABLE
    assert set(SETTABLE) < set(cli.commands)


def test_saved_settings_come_back_equal_and_are_for_our_eyes(tmp_path):
    """A Redis URL may hold a password: nobody else may read the file."""
    settings = settings_of({**VALUES, "system": "Grüße", "sampling": {"stop": ["</s>"]}})
    path = tmp_path / "settings.json"
    save_settings(path, settings)
    assert load_settings(path) == settings
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"inputs": []}', '{"colour": 1}'])
def test_damaged_saved_settings_say_what_writes_them_anew(tmp_path, text):
    """Whatever stands in the file: a UsageError with the remedy."""
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="writes it anew"):
        load_settings(path)
    with pytest.raises(UsageError, match="writes it anew"):
        load_settings(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "top_p", "top_k"])
def test_a_parameter_in_sampling_may_repeat_or_replace_a_default_only(name):
    """The same value twice is no contradiction; another one beside an explicit option is."""
    value = {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 5}[name]
    assert settings_of({**VALUES, "sampling": {name: value}})
    assert settings_of({**VALUES, name: value, "sampling": {name: value}})
    with pytest.raises(UsageError, match="say it once"):
        settings_of({**VALUES, name: value, "sampling": {name: value / 5}})


def test_the_soft_limit_of_open_files_is_raised_as_far_as_needed():
    """Many systems begin with 256 and allow more: nobody need know. In a process of its own, since it lasts."""
    code = (
        "import resource\nfrom app.cli.limits import slots_within_limits\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 900))\n"
        "print(slots_within_limits(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0], slots_within_limits(2000))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["500", "600", "800"], done.stderr


@pytest.mark.parametrize(
    ("text", "says"), [("\ud800", r"holds \\ud800, half a surrogate pair"), ("\udcff", "use a UTF-8 LANG")]
)
def test_text_that_is_no_text_is_told_for_what_it_is(tmp_path, text, says):
    """An escape in JSON is no matter of the terminal's language; a raw byte is."""
    values = {"inputs": ["a"], "out": tmp_path, "endpoints": ["http://a:1"], "tokenizer": "t"}
    with pytest.raises(UsageError, match=f"--template-kwargs .*{says}"):
        settings_of({**values, "template_kwargs": {"mode": text}})


def test_the_settings_file_of_the_documentation_is_one(data):
    """Every name is a setting, every value of its type."""
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "command-line.md").read_text(), re.DOTALL)
    (data / "headrace.toml").write_text(text)
    found = defaults_from(data / "headrace.toml", {name: cli.commands[name] for name in SETTABLE})
    assert found["run"]["max_new_tokens"] == 8192
    assert found["worker"] == found["workers"]["list"] == {"redis": "redis://box:6379/0"}
    assert found["doctor"]["tokenizer"] == "/models/teacher"

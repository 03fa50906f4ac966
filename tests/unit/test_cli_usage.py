"""What a person types wrong is told in one sentence, with the remedy and exit 2, before anything is read or sent."""

import subprocess
import sys

import pytest

from app.cli.main import cli, main
from app.errors import STORAGE, USAGE
from tests.belt import ROOT

ENOUGH = ("--endpoint", "http://127.0.0.1:9", "--tokenizer", "t", "--out", "out")


def said(capsys, *arguments: str, code: int = USAGE) -> str:
    """The one line on stderr of a command that ends with this code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    assert told.out == ""
    assert told.err.startswith("headrace: ")
    assert told.err.count("\n") == 1, told.err
    return told.err


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A directory with one good input, which is also where we are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runn"], ["'runn'", "did you mean 'run'", "headrace --help"]),
        (["run", "--tokeniser", "x"], ["'--tokeniser'", "did you mean '--tokenizer'", "headrace run --help"]),
        (["run"], ["DATA", "headrace run --help"]),
        (["run", "data.jsonl"], ["--endpoint", "headrace run --help"]),
        (["run", "data.jsonl", *ENOUGH, "--limit", "many"], ["--limit", "'many'"]),
        (["run", "data.jsonl", *ENOUGH, "--truncated", "maybe"], ["--truncated", "'keep', 'drop'"]),
        (["retry", "out", "--reason", "truncatd"], ["--reason", "did you mean 'truncated'"]),
        (["endpoints", "lst"], ["did you mean 'list'"]),
        (["enqueue", "data.jsonl", *ENOUGH, "--workers", "4"], ["No such option '--workers'"]),
        (["worker", "--slots", "0"], ["--slots"]),
        (["worker"], ["--redis"]),
        (["enqueue", "data.jsonl", *ENOUGH], ["--redis"]),
        (["run", "data.jsonl", *ENOUGH, "--turns", "all", "--prefill"], ["--prefill", "--turns all"]),
        (["enqueue", "data.jsonl", *ENOUGH, "--redis", "redis://h", "--turns", "all", "--no-wait"], ["--no-wait"]),
        (["simulate", "--port", "99999"], ["--port"]),
        (["simulate", "--config", '{"colour": 1}'], ["colour"]),
        (["status", "nowhere"], ["nowhere", "No such directory"]),
        (["verify", "data.jsonl"], ["data.jsonl", "is a file"]),
        (["collect", "nowhere", "--redis", "redis://127.0.0.1:1"], ["nowhere", "headrace enqueue", "--run-wait"]),
        (["collect", ".", "--redis", "redis://127.0.0.1:1"], ["run.json"]),
    ],
)  # fmt: skip
def test_usage_faults_are_one_sentence_that_helps(data, capsys, arguments, words):
    """Unknown names show the near one, wrong values the option; exit 2."""
    text = said(capsys, *arguments)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--temperature", "-1", "--temperature must be at least 0"),
        ("--temperature", "nan", "--temperature must be"),
        ("--max-new-tokens", "0", "--max-new-tokens must be at least 1"),
        ("--top-p", "2", "--top-p must be at most 1"),
        ("--samples", "0", "--samples must be at least 1"),
        ("--limit", "0", "--limit must be at least 1"),
        ("--workers", "-1", "--workers must be at least 0"),
        ("--workers", "0", "--workers 0 needs --redis"),
        ("--request-timeout", "inf", "--request-timeout must be a finite number"),
        ("--limit-seconds", "0", "--limit-seconds must be more than 0"),
        ("--drain-seconds", "1e300", "--drain-seconds must be at most"),
        ("--top-k", "0", "top_k must be"),
        ("--sampling", "{x", "--sampling is no valid JSON"),
        ("--sampling", "[1]", "--sampling must be a JSON object"),
        ("--sampling", '{"min_p": NaN}', "NaN is no number"),
        ("--sampling", '{"max_tokens": 5}', "did you mean max_new_tokens"),
        ("--sampling", '{"n": 2}', "--samples"),
        ("--template-kwargs", "3", "--template-kwargs must be a JSON object"),
        ("--template-kwargs", '{"a": "\\ud800"}', "--template-kwargs holds \\ud800"),
        ("--system", "a\udcff", "--system is not valid UTF-8"),
        ("--endpoint", "ftp://x", "ftp://x"),
        ("--endpoint", "http://x:99999", "http://x:99999"),
        ("--redis", "http://x:1", "redis://host:6379/0"),
        ("--api-key", "k\u00e4y", "--api-key holds characters"),
        ("--out", "data.jsonl", "--out data.jsonl is a file"),
        ("--out", "data.jsonl/below", "lies below a file"),
    ],
)  # fmt: skip
def test_wrong_values_of_run_are_named_with_their_bound(data, capsys, option, value, words):
    """Exit 2 naming option and remedy, and no directory is left behind."""
    assert words in said(capsys, "run", "data.jsonl", *ENOUGH, option, value)
    assert not (data / "out").exists()


def test_a_secret_that_is_refused_is_not_shown(data, capsys):
    """The sentence about a key never holds the key."""
    assert "geheim" not in said(capsys, "run", "data.jsonl", *ENOUGH, "--api-key", "geheim\u00fc")


def test_an_option_twice_with_other_values_is_a_contradiction(data, capsys):
    """--temperature and a temperature inside --sampling: one of the two is a mistake."""
    text = said(capsys, "run", "data.jsonl", *ENOUGH, "--temperature", "0.4", "--sampling", '{"temperature": 2}')
    assert "say it once" in text


@pytest.mark.parametrize("text", ["/nope", "data.jsonl", "."])
def test_a_tokenizer_that_is_none_is_told_before_any_server_is_asked(data, capsys, text):
    """Missing, a file, a directory without one: exit 2."""
    assert "--tokenizer" in said(capsys, "run", "data.jsonl", *ENOUGH, "--tokenizer", text)


def test_a_template_that_cannot_be_read_is_named(data, capsys, demo_tokenizer):
    """Exit 2 naming --chat-template."""
    text = said(capsys, "run", "data.jsonl", *ENOUGH, "--tokenizer", demo_tokenizer, "--chat-template", "nope.jinja")
    assert "--chat-template nope.jinja" in text


def test_a_place_that_cannot_be_written_is_a_fault_of_the_disk(data, capsys):
    """Exit 4 with the path and the system's words."""
    assert "/proc/headrace" in said(capsys, "run", "data.jsonl", *ENOUGH, "--out", "/proc/headrace", code=STORAGE)


def test_results_without_their_run_file_are_left_alone(data, capsys):
    """Nobody knows which recipe made them: never appended to."""
    (data / "out" / "data").mkdir(parents=True)
    (data / "out" / "data" / "raw_responses.jsonl").write_text("{}\n")
    assert "run.json is missing" in said(capsys, "run", "data.jsonl", *ENOUGH)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1}'])
def test_a_damaged_or_newer_run_file_is_refused(data, capsys, text):
    """run and status say which file, exit 2."""
    (data / "out").mkdir()
    (data / "out" / "run.json").write_text(text)
    assert "run.json" in said(capsys, "run", "data.jsonl", *ENOUGH)
    assert "run.json" in said(capsys, "status", "out")


def test_a_run_of_a_newer_headrace_names_it(data, capsys):
    """Not "damaged": the remedy is another one."""
    (data / "out").mkdir()
    (data / "out" / "run.json").write_text('{"format": 2, "headrace": "7.1"}')
    assert "was written by a newer Headrace (7.1); resume the run with that" in said(capsys, "status", "out")


def test_status_of_a_dataset_folder_shows_the_run_above(data, capsys):
    """A near miss of the directory is named."""
    (data / "run.json").write_text("{}")
    (data / "d").mkdir()
    assert f"did you mean {data}" in said(capsys, "status", data / "d")


def test_a_log_level_that_is_none_is_told(data, capsys, monkeypatch):
    """HEADRACE_LOG_LEVEL is a setting like others."""
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "loud")
    assert "HEADRACE_LOG_LEVEL" in said(capsys, "worker", "--redis", "redis://127.0.0.1:1")


@pytest.mark.parametrize("command", sorted(name for name, command in cli.commands.items() if not command.hidden))
def test_help_has_an_example(command, capsys):
    """Every command shows how it is called."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count(f"headrace {command}") >= 2


@pytest.mark.parametrize("command", ["run", "enqueue"])
def test_the_long_help_is_in_sections_and_leaves_no_option_over(command, capsys):
    """A new option has its section; under "Options" stands --help alone."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert told.index("What is needed:") < told.index("Prompts:") < told.index("Answers:") < told.index("The run:")
    (left,) = told.split("\nOptions:\n")[1:]
    assert [word for word in left.split() if word.startswith("--")] == ["--help"]


def test_help_loads_nothing_heavy():
    """Help is instant because no library of the work is loaded for it."""
    heavy = "celery redis httpx aiohttp transformers pyarrow pydantic rich sqlite3 asyncio"
    code = (
        "import sys; from app.cli.main import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in '{heavy}'.split() if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stderr.strip() == "[]"

"""docs/reference.md, from the code: `python -m app.cli.reference` prints it, a test holds the page to it."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import app
from app import errors, reasons
from app.cli.logs import EVENT
from app.cli.main import cli

_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")

_HEAD = """\
# Reference

Made from the code by `make reference`; a test holds it current. Every option can also stand in the environment
(`--max-new-tokens` as `HEADRACE_MAX_NEW_TOKENS`) unless its command says otherwise, and those of `run`, `enqueue`,
`worker`, `collect`, `status`, `watch`, `metrics`, `flower`, `workers`, `endpoints`, `doctor` and `verify` in a settings
file (`headrace.toml`). The command line wins over the environment, the environment over the file.
"""


def reference() -> str:
    """The page."""
    return "\n".join([_HEAD, *_commands(cli, "headrace"), *_exit_codes(), *_reasons(), *_events()])


def _commands(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield from _command(command, f"{path} {name}")


def _command(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b")
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"## {path}\n\n`{path} {pieces}`\n\n{' '.join(text.split())}\n"
    if examples.strip():
        yield f"```sh\n{inspect.cleandoc(examples).strip()}\n```\n"
    rows = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    rows = [(name, what) for name, what in rows if what and not name.endswith("--help")]
    if rows:
        yield "| option | |\n|---|---|"
        yield from (f"| `{_cell(name)}` | {_cell(' '.join(what.split()))} |" for name, what in rows)
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n\n| code | |\n|---|---|"
    yield "| 0 | complete |"
    kinds = (errors.HeadraceError, errors.UsageError, errors.Incomplete, errors.StorageError)
    for kind in kinds:
        yield f"| {kind.exit_code} | {_first_line(kind) if kind is not errors.HeadraceError else 'an internal error'} |"
    yield f"| {errors.SOME_REJECTED} | complete, some rows rejected |"
    for kind in (errors.RecipeChanged, errors.VerificationFailed):
        yield f"| {kind.exit_code} | {_first_line(kind)} |"
    yield ""


def _first_line(kind: type) -> str:
    return inspect.getdoc(kind).partition("\n")[0].rstrip(".")


def _reasons() -> Iterator[str]:
    """The closed list, with the words that stand beside each in the code."""
    yield "## Reasons in rejected.jsonl\n\n| stage | reason | |\n|---|---|---|"
    said = dict(re.findall(r'^    [A-Z_]+ = "(\w+)"  #: (.+)$', inspect.getsource(reasons.Reason), re.MULTILINE))
    for reason, stage in reasons.STAGE_OF.items():
        yield f"| {stage.value} | `{reason.value}` | {_cell(said[reason.value])} |"


def _events() -> Iterator[str]:
    """Names of what is logged, with the words that follow."""
    yield "\n## Events in logs\n"
    yield "`HEADRACE_LOG_FORMAT=json` writes a JSON object a line, `HEADRACE_LOG_LEVEL=INFO` more of them.\n"
    yield "| event | level | as text |\n|---|---|---|"
    for event, level, text in sorted(set(logged_events())):
        yield f"| `{event}` | {level} | {_cell(text)} |"


def logged_events() -> Iterator[tuple[str, str, str]]:
    """(event, level, message) of every log call in our rooms; the event is "" where a message names none."""
    root = Path(app.__file__).parent.parent
    for path in sorted(path for room in ("app", "producers", "workers") for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            on, level, first = node.func.value, node.func.attr, node.args[0]
            if not (isinstance(on, ast.Name) and on.id in ("log", "_log") and level in _LEVELS):
                continue
            for text in [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]:
                message = str(ast.literal_eval(text))
                event = EVENT.match(message)
                yield (event.group() if event else "", level.upper(), message)


if __name__ == "__main__":
    print(reference())

"""headrace.toml: options under their own names, for whoever does not want to repeat them.

A command line wins over the environment, the environment over this file. A name that no command has, or a value of
another type than the option takes, is an error that names file and setting.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from app.errors import UsageError

_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    click.types.IntParamType: ((int,), "a whole number"),
    click.types.FloatParamType: ((int, float), "a number"),
    click.types.BoolParamType: ((bool,), "true or false"),
}
_TEXT = ((str,), "a text in quotes")


def defaults_from(path: Path, commands: Mapping[str, click.Command]) -> dict[str, dict[str, Any]]:
    """click's default_map for these commands. Raises UsageError."""
    everything = {name: option for command in commands.values() for name, option in _options_of(command)}
    values = {name: _value(path, name, value, everything) for name, value in _read(path).items()}
    return {name: _own(command, values) for name, command in commands.items()}


def _own(command: click.Command, values: Mapping[str, Any]) -> dict[str, Any]:
    """What of it the command has an option for; of a group: each of its commands."""
    if isinstance(command, click.Group):
        return {name: _own(one, values) for name, one in command.commands.items()}
    return {option.name: values[name] for name, option in _options_of(command) if name in values}


def _read(path: Path) -> dict[str, Any]:
    """Settings by the option's name without its dashes at the front."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"Cannot read settings file {path}: {exc.strerror}.") from exc
    except ValueError as exc:  # no TOML, or no UTF-8
        raise UsageError(f"Settings file {path} is no valid TOML: {exc}.") from exc
    return {name.replace("_", "-"): value for name, value in found.items()}


def _options_of(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from _options_of(one)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield max(parameter.opts, key=len).removeprefix("--"), parameter


def _value(path: Path, name: str, value: Any, options: Mapping[str, click.Option]) -> Any:
    option = options.get(name)
    if option is None:
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"did you mean {near[0]}?" if near else "settings have the names of the options, see --help."
        raise UsageError(f"Settings file {path}: there is no setting {name!r}; {hint}")
    if option.multiple:
        return [_one(path, name, one, option) for one in (value if isinstance(value, list) else [value])]
    return _one(path, name, value, option)


def _one(path: Path, name: str, value: Any, option: click.Option) -> Any:
    if option.metavar == "JSON" and isinstance(value, dict):
        return json.dumps(value, default=str)
    types, words = next((entry for kind, entry in _TYPES.items() if isinstance(option.type, kind)), _TEXT)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"Settings file {path}: {name} must be {words}, not {value!r}.")
    return value

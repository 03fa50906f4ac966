"""How SGLang hands the tools of a row to a chat template: each version its own way; templates print all of it.

Read from the source of the releases 0.5.8 to 0.5.23. A server parses tools into its own models and dumps those, so that
keys are added, dropped and put in another order; since 0.5.14 it rewrites the types of parameters, too. Pure.
"""

import re
from typing import Any, Literal

from app.sglang.schema_types import standard_types

ToolForm = Literal["given", "functions", "strict", "defer", "types", "ordered"]

#: The first version of each form.
_SINCE: tuple[tuple[tuple[int, int, int], ToolForm], ...] = (
    ((0, 5, 23), "ordered"), ((0, 5, 14), "types"), ((0, 5, 11), "defer"), ((0, 5, 9), "strict"),
    ((0, 0, 0), "functions"),
)  # fmt: skip
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def tool_form(version: str | None) -> ToolForm:
    """The form of a server's version; one that does not say is taken for a new one."""
    found = _VERSION.match(version or "")
    number = tuple(map(int, found.groups())) if found else _SINCE[0][0]
    return next(form for since, form in _SINCE if number >= since)


def dumped(tools: list[dict[str, Any]], form: ToolForm) -> list[dict[str, Any]]:
    """Tools (in OpenAI's wrapper, or bare) as a template gets them. "given": wrapped, and otherwise as they are."""
    wrapped = [tool if isinstance(tool.get("function"), dict) else {"function": tool} for tool in tools]
    match form:
        case "given":
            return [{"type": "function"} | tool for tool in wrapped]
        case "functions":
            return [_strict(tool["function"]) for tool in wrapped]
        case "strict":
            return [_kind(tool) | {"function": _strict(tool["function"])} for tool in wrapped]
        case "defer":
            return [_kind(tool) | {"function": _strict(tool["function"])} | _defer(tool) for tool in wrapped]
        case "types":
            return [_kind(tool) | {"function": _typed(_strict(tool["function"]))} | _defer(tool) for tool in wrapped]
        case "ordered":
            return [_kind(tool) | {"function": _typed(_ordered(tool["function"]))} | _defer(tool) for tool in wrapped]


def bare(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions alone: what SGLang tries when a template refuses the wrapper."""
    return [tool.get("function", tool) for tool in tools]


def _kind(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type", "function")}


def _defer(tool: dict[str, Any]) -> dict[str, Any]:
    return {"defer_loading": tool.get("defer_loading")}


def _strict(function: dict[str, Any]) -> dict[str, Any]:
    names = ("description", "name", "parameters")
    return {name: function.get(name) for name in names} | {"strict": bool(function.get("strict", False))}


def _typed(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"parameters": standard_types(function["parameters"])}


def _ordered(function: dict[str, Any]) -> dict[str, Any]:
    """Keys it knows, in the row's order; then what the row left out."""
    known = {name: function.get(name) for name in ("description", "name", "parameters")}
    known |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {name: known[name] for name in [*function, *known] if name in known}

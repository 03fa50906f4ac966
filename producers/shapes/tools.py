"""Tools a row offers, and calls an answer made: OpenAI's form, whatever they came in.

Invariant: arguments are always a dict, so that a row that has them as a JSON string gives the same prompt.
"""

from typing import Any

import orjson

from app.jsonl import why_no_json
from app.reasons import Reason, Rejected
from producers.shapes.fields import at_path

_TOOL_FIELDS = ("tools", "functions", "function")


def tools_of(value: Any, path: str | None) -> list[dict[str, Any]] | None:
    """The tools of a row in OpenAI's wrapper, None if it has none. Raises Rejected(BAD_TOOL_CALL)."""
    if not isinstance(value, dict):
        return None
    found = at_path(value, path) if path else _first_tools(value)
    if not found:
        return None
    tools = _parsed(found, "its tools")
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise Rejected(Reason.BAD_TOOL_CALL, "its tools are no list")
    return [_tool(_parsed(tool, f"tools[{index}]"), index) for index, tool in enumerate(tools)] or None


def tool_calls_of(value: Any, place: str) -> list[dict[str, Any]]:
    """Calls (one, several, or a JSON string of either) in OpenAI's form; `place` names them in the rejection."""
    calls = _parsed(value, place)
    return [_call(call, place) for call in (calls if isinstance(calls, list) else [calls])]


def _first_tools(row: dict[str, Any]) -> Any:
    for name in _TOOL_FIELDS:
        found = row.get(name)
        # `function` is also what code sets call a piece of code: only a list of them is an offer of tools.
        if found and (name == "tools" or isinstance(found, list)):
            return found
    return None


def _tool(tool: Any, index: int) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Rejected(Reason.BAD_TOOL_CALL, f"tools[{index}] is no function with a name")
    return tool if inner is not tool else {"type": "function", "function": tool}


def _call(call: Any, place: str) -> dict[str, Any]:
    call = _parsed(call, place)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Rejected(Reason.BAD_TOOL_CALL, f"{place} is a call without a name")
    arguments = function.get("arguments") or {}
    arguments = _parsed(arguments, f"{place} (arguments of {function['name']})")
    if not isinstance(arguments, dict):
        raise Rejected(Reason.BAD_TOOL_CALL, f"{place} calls {function['name']} with arguments that are no object")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    call_id = call.get("id")
    return {"id": call_id, **made} if isinstance(call_id, str) and call_id else made


def _parsed(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as exc:
        raise Rejected(Reason.BAD_TOOL_CALL, f"{place}: {why_no_json(exc)}") from exc

"""Chats become ids at the simulated server, by SGLang's own rules and not by ours: what a client compares its ids with.

Read from the source of 0.5.23 and seen at a running one: fields that its message classes do not know are dropped,
`null` content is "", arguments in JSON become objects, an answer at the end becomes a message of the user, tools are
dumped in the form of the version; then the folder's chat template, then the tokenizer without added tokens.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import orjson

from app.sglang.simulator import bodies
from app.sglang.simulator.requests import Refused
from app.sglang.tool_dump import dumped, tool_form

_ROLES = ("user", "system", "assistant", "tool", "function", "developer", "latest_reminder", "root")
_OTHERS_FIELDS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")


class ChatTemplate:
    """The chat template of a tokenizer's folder."""

    def __init__(self, folder: Path, version: str) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        self.tokenizer_length: int = config["model_max_length"]
        beside = folder / "chat_template.jinja"
        text = beside.read_text("utf-8") if beside.exists() else config["chat_template"]
        self._names = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in config.items() if name.endswith("_token") and isinstance(token, str | dict)
        }  # fmt: skip
        self._template = _environment().from_string(text)
        self._form = tool_form(version)

    def render(self, body: dict[str, Any]) -> str:
        """The prompt of a chat request. Raises Refused."""
        if not body.get("messages"):
            raise Refused(400, bodies.bad_request("Messages cannot be empty."))
        messages = [_message(one) for one in body["messages"]]
        if messages[-1]["role"] == "assistant":
            messages[-1]["role"] = "user"
        tools = dumped(body["tools"], self._form) if body.get("tools") else None
        asked = {"add_generation_prompt": True, **(body.get("chat_template_kwargs") or {})}
        try:
            return self._template.render(messages=messages, tools=tools, **self._names, **asked)
        except Exception as exc:  # whatever the template raises
            raise Refused(400, bodies.bad_request(str(exc))) from exc


def _message(given: dict[str, Any]) -> dict[str, Any]:
    role = str(given.get("role", "")).lower()
    if role not in _ROLES:
        raise Refused(400, bodies.schema_error(f"1 validation error: role {role!r}"))
    fields = ("role", "content") if role == "user" else _OTHERS_FIELDS
    message = {name: given[name] for name in fields if given.get(name) is not None} | {"role": role}
    message.setdefault("content", "")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = orjson.loads(function["arguments"])
        except orjson.JSONDecodeError as exc:
            message = "Assistant tool call function.arguments must be valid JSON."
            raise Refused(400, bodies.bad_request(message)) from exc
    return {"id": call.get("id"), "index": None, "type": "function", "function": function}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model writes; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}  # noqa: DTZ005
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

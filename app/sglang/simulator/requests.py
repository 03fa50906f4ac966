"""What a client asked, checked as SGLang 0.5.23 checks it: same order, same status codes, same three shapes of 400.

Invariant: whoever gets an `Ask` from here may send it to the engine; whoever gets `Refused` answers with its body.
Simplified: stop strings, penalties, grammars and logit_bias are accepted and do nothing.
"""

from array import array
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from app.sglang.simulator import bodies
from app.sglang.simulator.config import SimulatorConfig

DEFAULT_MAX_NEW_TOKENS = 128

_KINDS: dict[str, str] = {
    "max_new_tokens": "i64", "stop": "any", "stop_token_ids": "ids", "stop_regex": "any", "temperature": "f64",
    "top_p": "f64", "top_k": "i64", "min_p": "f64", "frequency_penalty": "f64", "presence_penalty": "f64",
    "repetition_penalty": "f64", "min_new_tokens": "i64", "n": "i64", "json_schema": "any", "regex": "any",
    "ebnf": "any", "structural_tag": "any", "ignore_eos": "a boolean", "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean", "no_stop_trim": "a boolean", "stream_interval": "i64",
    "logit_bias": "any", "sampling_seed": "i64", "custom_params": "any", "beam_width": "i64", "watermark": "any",
    "choice": "any",
}  # fmt: skip
_ALLOWED = {"i64": (int,), "f64": (int, float), "a boolean": (bool,)}


class Refused(Exception):
    """A request that is answered at once: status and JSON body."""

    def __init__(self, status: int, body: Any):
        super().__init__(status)
        self.status = status
        self.body = body


@dataclass(slots=True)
class Ask:
    """One completion to make."""

    rid: str
    ids: list[int]
    max_new_tokens: int  #: clipped to what context and pool hold
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    return_prompt_token_ids: bool = False


@dataclass(slots=True)
class Asked:
    """A whole request: one or several completions, as one object or as a list."""

    asks: list[Ask]
    batch: bool
    stream: bool


def read_json(data: bytes, content_type: str) -> dict[str, Any]:
    """The request's object. Raises Refused in the shape of a schema error."""
    shape = {"type": "dataclass_type", "loc": ("body",), "msg": "Input should be a dictionary or an instance of "
             "GenerateReqInput"}  # fmt: skip
    if not data:
        raise _schema({"type": "missing", "loc": ("body",), "msg": "Field required", "input": None})
    if not content_type.startswith("application/json"):
        raise _schema({**shape, "input": data[:200]})
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise _schema({"type": "json_invalid", "loc": ("body", exc.pos), "msg": "JSON decode error"}) from exc
    if not isinstance(body, dict):
        raise _schema({**shape, "input": body})
    return body


def read_generate(body: dict[str, Any], config: SimulatorConfig, encode: Any) -> Asked:
    """Checks the body of /generate. encode: text to ids. Raises Refused."""
    prompts, batch = _prompts(body, config, encode)
    params = body.get("sampling_params") or {}
    per_prompt = params if isinstance(params, list) else [params] * len(prompts)
    for one in per_prompt:
        _check_contract(one)
    copies = max(1, int(per_prompt[0].get("n") or 1)) if per_prompt else 1
    if copies > 1:
        prompts, per_prompt, batch = prompts * copies, per_prompt * copies, True
    rids = _rids(body.get("rid"), len(prompts), fresh=copies > 1)
    asks = [_ask(rid, ids, one, body, config) for rid, ids, one in zip(rids, prompts, per_prompt, strict=True)]
    return Asked(asks, batch, bool(body.get("stream")))


def _ask(rid: str, ids: list[int], params: dict, body: dict, config: SimulatorConfig) -> Ask:
    _check_ranges(params, config)
    ids, max_new_tokens = fit(ids, params.get("max_new_tokens"), config)
    return Ask(
        rid, ids, max_new_tokens,
        min_new_tokens=params.get("min_new_tokens") or 0,
        ignore_eos=bool(params.get("ignore_eos")),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        return_prompt_token_ids=bool(body.get("return_prompt_token_ids")),
    )  # fmt: skip


def fit(ids: list[int], asked: int | None, config: SimulatorConfig) -> tuple[list[int], int]:
    """The prompt and the allowance as the server takes them: refused, cut (auto-truncate) or silently clipped."""
    context, count, cut = config.context_length, len(ids), config.allow_auto_truncate
    if count >= context:
        if not cut:
            raise refuse(f"The input ({count} tokens) is longer than the model's context length "
                                 f"({context} tokens).")  # fmt: skip
        ids = ids[:context]
    if asked is not None and len(ids) + asked > context:
        if not cut:
            raise refuse(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {count + asked} tokens: {count} tokens from the input messages and {asked} tokens for "
                f"the completion. Please reduce the number of tokens in the input messages or the completion to fit "
                f"within the limit.")  # fmt: skip
        asked = max(0, context - len(ids))
    longest = config.max_prompt_tokens
    if len(ids) > longest:
        if not cut:
            raise refuse(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({longest} "
                                 f"tokens). Use a shorter input or enable --allow-auto-truncate.")  # fmt: skip
        ids = ids[:longest]
    wanted = DEFAULT_MAX_NEW_TOKENS if asked is None else asked
    room = min(config.max_request_tokens - len(ids) - 1, config.max_total_num_tokens - len(ids) - 2)
    return ids, max(0, min(wanted, room))


def refuse(message: str) -> Refused:
    """A 400 that blames a value."""
    return Refused(400, bodies.value_error(message))


def _prompts(body: dict[str, Any], config: SimulatorConfig, encode: Any) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None:
        if config.skip_tokenizer_init:
            raise refuse("The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
                                 "Please provide input_ids or re-initialize the engine with "
                                 "skip_tokenizer_init=False.")  # fmt: skip
        batch = isinstance(text, list)
        return [encode(one) for one in (text if batch else [text])], batch
    if ids is None:
        raise refuse("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list):
        raise _bad_ids(f"must be list or null; got {type(ids).__name__}", ids)
    if not ids:
        raise refuse("input_ids cannot be empty.")
    if isinstance(ids[0], bool):
        raise Refused(400, {"error": f"invalid type: boolean `{str(ids[0]).lower()}`, expected a sequence"})
    if not isinstance(ids[0], int | list):
        raise _bad_ids(f"elements must be int or list; got {type(ids[0]).__name__}", ids)
    batch = isinstance(ids[0], list)
    for place, row in enumerate(ids if batch else [ids]):
        if not isinstance(row, list):
            raise _bad_ids(f"row {place}: must be list; got {type(row).__name__}", ids)
        try:
            array("q", row)
        except (TypeError, OverflowError) as exc:
            raise _bad_ids(f"contains non-int64 element: {exc}", ids) from exc
    return (ids if batch else [ids]), batch


def _rids(rid: Any, count: int, fresh: bool) -> list[str]:
    if rid is None or fresh:
        return [uuid4().hex for _ in range(count)]
    if isinstance(rid, list) and all(isinstance(one, str) for one in rid) and len(rid) == count:
        if repeated := sorted({one for one in rid if rid.count(one) > 1}):
            raise refuse(f"Duplicate request IDs detected within the request: {repeated}")
        return rid
    if not isinstance(rid, str):
        raise _schema({"type": "string_type", "loc": ("body", "rid", "str"), "msg": "Input should be a valid string",
                       "input": rid})  # fmt: skip
    return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]


def _check_contract(params: Any) -> None:
    """Names and types of sampling_params: the 400 whose `error` is a string."""
    if not isinstance(params, dict):
        raise _schema({"type": "dict_type", "loc": ("body", "sampling_params"), "msg": "Input should be a valid "
                       "dictionary", "input": params})  # fmt: skip
    for name, value in params.items():
        kind = _KINDS.get(name)
        if kind is None:
            known = ", ".join(f"`{one}`" for one in _KINDS)
            raise Refused(400, {"error": f"unknown field `{name}`, expected one of {known}"})
        values = value if kind == "ids" and isinstance(value, list) else [value]
        allowed = _ALLOWED.get("i64" if kind == "ids" else kind)
        for one in values:
            if value is None or allowed is None:
                continue
            if not isinstance(one, allowed) or (isinstance(one, bool) and bool not in allowed):
                raise Refused(400, {"error": f"{_typed(one)}, expected {'i64' if kind == 'ids' else kind}"})


def _typed(value: Any) -> str:
    match value:
        case None:
            return "invalid type: null"
        case bool():
            return f"invalid type: boolean `{str(value).lower()}`"
        case str():
            return f'invalid type: string "{value}"'
        case float():
            return f"invalid type: floating point `{value}`"
        case int():
            return f"invalid type: integer `{value}`"
        case list():
            return "invalid type: sequence"
        case _:
            return "invalid type: map"


def _check_ranges(params: dict[str, Any], config: SimulatorConfig) -> None:
    """Values of sampling_params: the 400 whose `error` is an object."""
    def value(name: str, default: float) -> float:
        given = params.get(name)
        return default if given is None else given

    longest = value("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    checks = (
        (value("temperature", 1) >= 0, "temperature must be a non-negative finite number, got {temperature}."),
        (0 < value("top_p", 1) <= 1, "top_p must be in (0, 1], got {top_p}."),
        (value("top_k", -1) == -1 or value("top_k", -1) >= 1, "top_k must be -1 (disable) or at least 1, got {top_k}."),
        *((-2 <= value(f"{name}_penalty", 0) <= 2, f"{name}_penalty must be in [-2, 2], got {{{name}_penalty}}.")
          for name in ("frequency", "presence")),
        (0 < value("repetition_penalty", 1) <= 2,
         "repetition_penalty must be in (0, 2] (1.0 = no penalty), got {repetition_penalty}."),
        (0 <= value("min_p", 0) <= 1, "min_p must be in [0, 1], got {min_p}."),
        (longest >= 0, "max_new_tokens must be at least 0, got {max_new_tokens}."),
        (0 <= value("min_new_tokens", 0) <= longest,
         f"min_new_tokens must be in [0, max_new_tokens({longest})], got {{min_new_tokens}}."),
    )  # fmt: skip
    for good, message in checks:
        if not good:
            raise refuse(message.format_map(params))
    for key in params.get("logit_bias") or ():
        if not 0 <= int(key) < config.vocab_size:
            raise refuse(f"logit_bias must has keys in [0, {config.vocab_size - 1}], got {key}.")


def _bad_ids(message: str, given: Any) -> Refused:
    return _schema({"type": "value_error", "loc": ("body", "input_ids"), "msg": f"Value error, {message}",
                    "input": given if len(repr(given)) < 200 else "..."})  # fmt: skip


def _schema(detail: dict[str, Any]) -> Refused:
    return Refused(400, bodies.schema_error(f"1 validation error:\n  {detail}"))

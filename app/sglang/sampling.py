"""Sampling parameters as they are sent: every one explicit, each of the type and range that no server dies of.

Invariant: what `sampling_body` returns is taken by every version of SGLang that we know, and the same meaning gives
the same value, so it can be part of a recipe's fingerprint. An unknown name is a 400 from new servers and a 500 from
old ones; a float for max_new_tokens, NaN, or a foreign token id kills an old one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from app.errors import UsageError

JSONObject = dict[str, Any]
LARGEST_INT = 2**31 - 1

# SGLang's own defaults, said aloud: `/generate` does not read the model's generation_config, and its default of 128
# new tokens cuts silently. None means "as if absent" to every version.
_DEFAULTS: JSONObject = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "n": 1,
}
#: What looks at the answer so far, in order of the names above.
_LOOK_BACK = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "stop", "stop_regex",
    "sampling_seed", "json_schema", "regex", "ebnf", "structural_tag",
)  # fmt: skip
# Not in every version, so sent only when asked for.
_OPTIONAL = ("sampling_seed", "logit_bias", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag")
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "max_length": "max_new_tokens",
}
# name: (lowest, highest). Beyond what 32-bit floats hold probabilities become NaN: with top_p beside it, a bias of
# 1e308 or a repetition penalty of 1e-300 killed a 0.5.23 (tests/real/test_deaths.py).
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
}
_LOGIT_BIAS = (-100.0, 100.0)
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


def sampling_body(options: Mapping[str, Any], *, vocab_size: int | None = None) -> JSONObject:
    """Every sampling parameter, explicit and of the right type; the same meaning always gives the same value.

    options: SGLang's names, max_new_tokens among them. Raises UsageError for what a server would refuse, or die of:
    an unknown name, a float where an int belongs, NaN, a token id outside the vocabulary.
    """
    unknown = sorted(options.keys() - _DEFAULTS.keys() - set(_OPTIONAL) - {"max_new_tokens"})
    if unknown:
        meant = _OTHER_NAMES.get(unknown[0])
        hint = f"did you mean {meant}?" if meant else f"known: {_known_names()}."
        raise UsageError(f"SGLang has no sampling parameter {unknown[0]!r}; {hint}")
    given = {name: value for name, value in options.items() if value is not None}
    body = {"max_new_tokens": _whole("max_new_tokens", given.get("max_new_tokens"), 1, LARGEST_INT)}
    body |= _DEFAULTS | given
    _check_numbers(body)
    for name in _FLAGS:
        if type(body[name]) is not bool:
            _refuse(name, body[name], "must be true or false")
    _check_stops(body, vocab_size)
    _check_optional(body, vocab_size)
    return body


def disagreement(body: JSONObject, said: Mapping[str, Any]) -> str | None:
    """How parameters that somebody names for an answer differ from these; None: as far as they go, they are the same.

    Names that are none of SGLang's say nothing, nor does `n` (how many were asked at once), nor a seed where we have
    none. max_new_tokens is not compared.
    """
    known = (*body, *(name for name in _OPTIONAL if name != "sampling_seed"))
    given = {name: said[name] for name in known if said.get(name) is not None and name not in ("n", "max_new_tokens")}
    try:
        theirs = sampling_body({**body, **given})
    except UsageError as exc:
        return str(exc)
    differs = next((name for name in theirs if theirs[name] != body.get(name)), None)
    return f"{differs} {theirs[differs]}; this run has {body.get(differs)}" if differs else None


def looks_back(body: JSONObject) -> str | None:
    """The first parameter under which an answer asked for in stages would be another one, None if there is none: those
    that look at what the answer has so far begin anew with each request. body: from `sampling_body`."""
    return next((name for name in _LOOK_BACK if body.get(name) != _DEFAULTS.get(name)), None)


def refuse_stages(body: JSONObject) -> None:
    """Raises UsageError for parameters that `looks_back` finds."""
    if name := looks_back(body):
        raise UsageError(
            f"--stage-tokens would change what is generated: {name} depends on all of an answer, and each stage is "
            f"a request of its own; leave out one of the two."
        )


def _check_numbers(body: JSONObject) -> None:
    for name, (low, high) in _RANGES.items():
        body[name] = _real(name, body[name], low, high)
    if type(body["top_k"]) is not int or body["top_k"] != -1:  # -1: all
        _whole("top_k", body["top_k"], 1, LARGEST_INT)
    _whole("min_new_tokens", body["min_new_tokens"], 0, body["max_new_tokens"])
    if body["n"] != 1 or type(body["n"]) is not int:
        _refuse("n", body["n"], "must be 1; ask for several completions with --samples")


def _check_stops(body: JSONObject, vocab_size: int | None) -> None:
    for name in ("stop", "stop_regex"):
        texts = body.get(name)
        if texts is None:
            continue
        body[name] = texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not 1 <= len(texts) <= 32 or not all(_is_text(text) for text in texts):
            _refuse(name, texts, "must be one to 32 texts that are not empty")
    ids = body["stop_token_ids"]
    if ids is not None and (not isinstance(ids, list) or not ids or ids_problem(ids, vocab_size)):
        _refuse("stop_token_ids", ids, "must be a list of token ids of the model")


def _check_optional(body: JSONObject, vocab_size: int | None) -> None:
    if "sampling_seed" in body:
        _whole("sampling_seed", body["sampling_seed"], 0, LARGEST_INT)
    constraints = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if name in body]
    if len(constraints) > 1:
        _refuse(constraints[1], "…", f"can't be combined with {constraints[0]}")
    for name in constraints:
        if not _is_text(body[name]):
            _refuse(name, body[name], "must be a text that is not empty")
    if "logit_bias" in body:
        body["logit_bias"] = _logit_bias(body["logit_bias"], vocab_size)


def _logit_bias(bias: object, vocab_size: int | None) -> dict[str, float]:
    if not isinstance(bias, dict) or not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in bias):
        _refuse("logit_bias", bias, "must be an object of token ids, as text, and numbers")
    if ids_problem([int(key) for key in bias], vocab_size):
        _refuse("logit_bias", bias, "has a token id outside the vocabulary")
    return {key: _real("logit_bias", value, *_LOGIT_BIAS) for key, value in bias.items()}


def _whole(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        _refuse(name, value, f"must be a whole number from {low} to {high}")
    return value


def _real(name: str, value: object, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:  # which NaN is not
        _refuse(name, value, f"must be a number from {low:g} to {high:g}")
    return float(value)


def _is_text(value: object) -> bool:
    """Text that is not empty and that UTF-8 can hold."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _refuse(name: str, value: object, must: str) -> NoReturn:
    raise UsageError(f"Sampling parameter {name} {must}; it is {str(value)[:60]!r}.")


def _known_names() -> str:
    return ", ".join(sorted([*_DEFAULTS, *_OPTIONAL, "max_new_tokens"]))


def ids_problem(ids: Sequence[Any], vocab_size: int | None) -> str:
    """What is wrong with a list of token ids, or "". One id outside the vocabulary kills a server with all it holds."""
    if not ids:
        return ""
    if set(map(type, ids)) != {int}:
        return "something in it is not a whole number"
    size = LARGEST_INT if vocab_size is None else vocab_size
    low, high = min(ids), max(ids)
    return "" if low >= 0 and high < size else f"ids from {low} to {high}, but the vocabulary goes from 0 to {size - 1}"

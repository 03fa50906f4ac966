"""Which differences between servers change answers. Another model, other weights, another number format: held. Pure.

Guarded fields are those that make another distribution of answers; `--allow-drift` accepts one, `--require` states what
one must be. The rest of a server's identity (SGLang's version, context, tokenizer folder, speculative decoding that
accepts what the model itself would have drawn) changes numerics at most: it is recorded with each answer and told once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from app.errors import UsageError

GUARDED = (
    "model", "weight_version", "revision", "dtype", "quantization", "kv_cache_dtype", "json_model_override_args",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
)  # fmt: skip
#: Told once, and part of the fingerprint that stands in every record.
RECORDED = (
    "version", "tokenizer_path", "context_length", "speculative_algorithm", "speculative_draft_model",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
_NONE_MEANS_NONE = ("revision", "quantization")  # where a server tells of itself at all
_LOSSLESS = 1.0  # a speculative threshold below it accepts tokens that the model would not have drawn


def guarded(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The guarded part of what a server said of itself, without what it does not tell."""
    told = {name: identity[name] for name in GUARDED if identity.get(name) is not None}
    if "model" in told:
        told["model"] = _model(told["model"])
    if identity.get("version") is not None:
        told |= {name: "none" for name in _NONE_MEANS_NONE if name not in told}
    if identity.get("speculative_algorithm") is None:
        told |= {name: _LOSSLESS for name in told if name.startswith("speculative_accept_threshold")}
    return told


def drift(run: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How a server differs from the run's, in one line; None if it does not. Untold fields do not differ."""
    both = [(name, run[name], now[name]) for name in GUARDED if name in run and name in now]
    changes = [f"{name} {ours} → {theirs}" for name, ours, theirs in both if not _same(name, ours, theirs)]
    return ", ".join(changes) or None


def _model(path: str) -> str:
    """Hosts keep the same model in different folders: its last name; a name of the hub (owner/name) as it is."""
    path = path.rstrip("/")
    return path if path.count("/") == 1 and path[0] not in "/.~" else path.rsplit("/", 1)[-1]


def _same(name: str, ours: Any, theirs: Any) -> bool:
    """One host may have in a folder what another one takes from the hub."""
    if name == "model" and ("/" in ours) != ("/" in theirs):
        return ours.rsplit("/", 1)[-1] == theirs.rsplit("/", 1)[-1]
    return ours == theirs


def unmet(required: Mapping[str, str], identity: Mapping[str, Any]) -> str | None:
    """Which of the required values a server does not have, in one line; None if it has all."""
    told = {**identity, **guarded(identity)}
    wrong = [
        f"{name}={value}, " + ("which it does not tell" if told.get(name) is None else f"and it has {told[name]}")
        for name, value in required.items() if str(told.get(name)).lower() != value.lower()
    ]  # fmt: skip
    return f"it does not meet --require {'; '.join(wrong)}" if wrong else None


def objection(run: Mapping[str, Any], required: Mapping[str, str], identity: Mapping[str, Any]) -> str | None:
    """Why this run may not use a server, in a sentence; None if it may. run: its guarded fields."""
    if change := drift(run, guarded(identity)):
        return f"it serves something else than this run was started with: {change}"
    return unmet(required, identity)


def news(first: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    """How a server that the run may use differs from its first one, in one line; None if it does not."""
    changes = [drift(guarded(first), guarded(identity))]
    changes += [
        f"{name} {first.get(name)} → {identity.get(name)}"
        for name in RECORDED if first.get(name) != identity.get(name)
    ]  # fmt: skip
    return ", ".join(filter(None, changes)) or None


def requirements(texts: Iterable[str]) -> dict[str, str]:
    """`--require FIELD=VALUE`, parsed. Raises UsageError."""
    required: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and value) or name not in (*GUARDED, *RECORDED):
            raise UsageError(
                f"--require {text} is no FIELD=VALUE of a server (as kv_cache_dtype=auto); "
                f"fields are {', '.join((*GUARDED, *RECORDED))}."
            )
        if required.setdefault(name, value) != value:
            raise UsageError(f"--require says {name} twice, {required[name]} and {value}; say it once.")
    return required


def allowed(names: Iterable[str]) -> list[str]:
    """`--allow-drift FIELD`, checked. Raises UsageError."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in GUARDED:
            raise UsageError(f"--allow-drift {name} is no guarded field; those are {', '.join(GUARDED)}.")
    return names

"""What an SGLang server tells us, parsed: what it says of itself, its load, and what it generated.

Invariant: a Generation holds only what a server may truly have made from what we sent; everything else is a Fault.
What a server says of itself may be missing in part or whole (old versions, routers): then the field is None. Read
from bodies that 0.5.6, 0.5.17 and 0.5.23 gave (tests/data/sglang/client_*). Pure; nothing here waits or sends.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from app.identity import fingerprint
from app.records import FinishReason
from app.sglang.faults import Fault, FaultKind, RequestFacts, fault_from_response, fault_of_abort
from app.sglang.sampling import ids_problem

JSONObject = dict[str, Any]


class Readiness(StrEnum):
    """What a probe says of an endpoint: evidence, never a verdict."""

    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    PAUSED = "paused"  #: somebody called /pause_generation; what runs there waits
    AWAY = "away"
    UNKNOWN = "unknown"  #: no evidence either way: the probe took long, which a long prefill is reason enough for


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointInfo:
    """What an endpoint says of itself; None where it doesn't say. The raw bodies hold API keys: they stop here."""

    url: str
    model: str | None = None  #: model_path
    served_model_name: str | None = None
    version: str | None = None
    weight_version: str | None = None
    revision: str | None = None
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool | None = None  #: True: answers hold no text, and stop strings are refused
    context_length: int | None = None  #: prompt and answer together
    max_total_num_tokens: int | None = None  #: KV slots of one data-parallel rank
    page_size: int | None = None  #: slots of the pool that are given out together
    max_req_input_len: int | None = None  #: longest prompt that the KV pool lets in
    max_running_requests: int | None = None  #: over all data-parallel ranks
    max_queued_requests: int | None = None  #: None also if there is no limit
    dp_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_accept_threshold_single: float | None = None
    speculative_accept_threshold_acc: float | None = None
    json_model_override_args: str | None = None
    schedule_conservativeness: float | None = None
    router: bool | None = None  #: True: sglang-router, with any number of servers behind it
    deterministic: bool | None = None  #: --enable-deterministic-inference: without a seed, equal prompts, equal answers

    @property
    def identity(self) -> JSONObject:
        """What may change answers, and what tells servers apart; app/drift.py says which of it may differ in a run."""
        return {name: getattr(self, name) for name in _IDENTITY}

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the identity."""
        return fingerprint(self.identity)

    @property
    def kv_tokens(self) -> int | None:
        """KV slots over all data-parallel ranks: what can be in flight."""
        return None if self.max_total_num_tokens is None else self.max_total_num_tokens * (self.dp_size or 1)

    @property
    def reserved_tokens(self) -> int:
        """Slots of every request's context that speculative decoding keeps for its drafts."""
        if self.speculative_algorithm is None:
            return 0
        tree = (self.speculative_eagle_topk or 0) * (self.speculative_num_steps or 0)
        return max(tree, self.speculative_num_draft_tokens or 0)

    def drops(self, sampling: JSONObject) -> str | None:
        """What of these parameters would not reach a model there, in a sentence: a router hands on what it knows."""
        names = [name for name in _UNKNOWN_TO_ROUTERS if self.router and sampling.get(name) is not None]
        return f"it is sglang-router, which drops {' and '.join(names)} without a word" if names else None

    @property
    def usable_context(self) -> int | None:
        """What prompt and answer can use together: the context, or the KV pool of a rank where that is smaller."""
        sizes = [size for size in (self.context_length, self._pool_context) if size is not None]
        return min(sizes) - self.reserved_tokens if sizes else None

    @property
    def _pool_context(self) -> int | None:
        """The pool, without what is lost to begun pages of a prompt and an answer."""
        pool = self.max_total_num_tokens
        return None if pool is None else max(0, pool - 2 * ((self.page_size or 1) - 1))


#: Seen at sglang-router 0.3.2. It drops `spaces_between_special_tokens`, too, which touches no id.
_UNKNOWN_TO_ROUTERS = ("logit_bias", "stop_regex", "structural_tag")
_IDENTITY = (
    "model", "version", "weight_version", "revision", "tokenizer_path", "context_length", "dtype", "quantization",
    "kv_cache_dtype", "speculative_algorithm", "speculative_draft_model", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc", "json_model_override_args",
)  # fmt: skip


def endpoint_info(url: str, model_info: JSONObject, server_info: JSONObject, models: JSONObject) -> EndpointInfo:
    """Joins the bodies of /model_info, /server_info and /v1/models; {} stands for one that was not to be had."""
    card = next(iter(_objects(models.get("data"))), {})
    said = server_info | {name: value for name, value in model_info.items() if value is not None}
    said["model"] = said.get("model_path") or card.get("root")
    said["served_model_name"] = said.get("served_model_name") or card.get("id")
    said["context_length"] = card.get("max_model_len") or server_info.get("context_length")
    said["max_running_requests"] = _max_running_requests(server_info)
    said["speculative_draft_model"] = said.get("speculative_draft_model_path")
    said["router"] = said.get("router_manager")
    said["deterministic"] = said.get("enable_deterministic_inference")
    fields = {name: _typed(said.get(name), type_) for name, type_ in _FIELD_TYPES.items()}
    return EndpointInfo(url=url, **fields)


_FIELD_TYPES = {
    f.name: next(type_ for type_ in (bool, int, float, str) if f.type == (type_ | None))
    for f in dataclasses.fields(EndpointInfo)
    if f.name != "url"
}


def _max_running_requests(server_info: JSONObject) -> int | None:
    """What all ranks run together: the effective figure per rank where given, else the limit that was asked for."""
    per_rank = [
        limit for state in _objects(server_info.get("internal_states"))
        if (limit := _typed(state.get("effective_max_running_requests_per_dp"), int)) is not None
    ]  # fmt: skip
    if not per_rank:
        return _typed(server_info.get("max_running_requests"), int)
    ranks = _typed(server_info.get("dp_size"), int) or 1
    return sum(per_rank) if len(per_rank) == ranks else per_rank[0] * ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What an endpoint has in hand, summed over its data-parallel ranks; None where the version doesn't say."""

    running: int
    waiting: int
    used_tokens: int  #: KV slots in use
    capacity_tokens: int | None = None  #: KV slots there are
    token_usage: float | None = None  #: 0 to 1, of the fullest rank
    gen_throughput: float | None = None  #: tokens per second
    timestamp: float | None = None  #: Unix time of the stalest rank's figures: old while running means a hang
    retracted: int | None = None  #: requests pushed back into the queue by a full KV pool, now


#: A pool may be told fuller than it is by what is on its way in or out; by more is a lie.
_OVERFULL = 1.1


def loads_from_v1(body: object) -> Loads | None:
    """From GET /v1/loads (since 0.5.10). None also for figures that cannot be: who tells those tells nothing."""
    ranks = _objects(body.get("loads")) if isinstance(body, dict) else []
    if not ranks:
        return None
    queues = [rank.get("queues") if isinstance(rank.get("queues"), dict) else {} for rank in ranks]
    running, waiting = _sum(ranks, "num_running_reqs") or 0, _sum(ranks, "num_waiting_reqs") or 0
    used, capacity = _sum(ranks, "num_used_tokens") or 0, _sum(ranks, "max_total_num_tokens")
    if min(running, waiting, used) < 0 or (capacity is not None and not 0 < capacity >= used / _OVERFULL):
        return None
    return Loads(
        running=running,
        waiting=waiting,
        used_tokens=used,
        capacity_tokens=capacity,
        token_usage=max(_numbers(ranks, "token_usage"), default=None),
        gen_throughput=_sum(ranks, "gen_throughput"),
        timestamp=min(_numbers(ranks, "timestamp"), default=None),
        retracted=_sum(queues, "retracted"),
    )


def loads_from_get_load(body: object) -> Loads | None:
    """From GET /get_load (until 0.5.17), whose num_reqs counts the waiting too."""
    ranks = _objects(body)
    if not ranks:
        return None
    waiting = _sum(ranks, "num_waiting_reqs") or 0
    running = (_sum(ranks, "num_reqs") or 0) - waiting
    return Loads(running=max(running, 0), waiting=waiting, used_tokens=_sum(ranks, "num_tokens") or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One true answer: what a response record is made of."""

    output_ids: list[int] = field(repr=False)  #: the stop token included
    text: str = field(repr=False)  #: "" from a server without a tokenizer
    finish_reason: FinishReason
    matched: str  #: the stop id or string as text, "" for length
    num_prompt_tokens: int
    num_output_tokens: int
    meta_info: JSONObject = field(repr=False)  #: as the server gave it


def generation(content: bytes, facts: RequestFacts, vocab_size: int | None = None) -> Generation:
    """The generation in a 200 body. Raises Fault for everything that must not stand in raw_responses.jsonl."""
    body = _generation_object(content, facts)
    meta = _part(body, "meta_info", dict)
    reason, matched = _finish(_part(meta, "finish_reason", dict), facts)
    output_ids = _part(body, "output_ids", list)
    _check_counts(output_ids, meta, facts)
    if problem := ids_problem(output_ids, vocab_size):
        raise Fault(FaultKind.BAD_OUTPUT_IDS, f"the answer's output_ids are not the model's: {problem}")
    if type(matched) is int and output_ids[-1:] != [matched]:
        raise Fault(FaultKind.CONTRACT, f"the answer stopped at token {matched}, but its output_ids do not end with it")
    text = body.get("text")
    return Generation(
        output_ids=output_ids,
        text=text if isinstance(text, str) else "",
        finish_reason=reason,
        matched=str(matched),
        num_prompt_tokens=facts.num_prompt_tokens,
        num_output_tokens=len(output_ids),
        meta_info=meta,
    )


def _generation_object(content: bytes, facts: RequestFacts) -> JSONObject:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise Fault(FaultKind.BAD_BODY, f"the answer is not JSON ({len(content)} bytes)") from exc
    if not isinstance(body, dict):
        raise Fault(FaultKind.BAD_BODY, f"the answer is a JSON {type(body).__name__}, not one object")
    if "error" in body or body.get("object") == "error":
        raise fault_from_response(200, {}, content, facts)
    return body


def _finish(reason: JSONObject, facts: RequestFacts) -> tuple[FinishReason, int | str]:
    """(reason, what stopped it: an id, a text, or "")."""
    kind, matched = reason.get("type"), reason.get("matched")
    if kind == "abort":
        raise fault_of_abort(reason, facts)
    if kind == "length":
        return "length", ""
    if kind != "stop":
        raise Fault(FaultKind.CONTRACT, f"the answer's finish reason is {str(kind)[:40]!r}, neither stop nor length")
    if matched == "NaN happened":
        raise Fault(FaultKind.NAN)
    return "stop", matched if type(matched) in (int, str) else ""


def _check_counts(output_ids: list[Any], meta: JSONObject, facts: RequestFacts) -> None:
    """The server must have read what we sent, whole, and count as many tokens as it returns: not cut, not prefixed."""
    sent, read = facts.num_prompt_tokens, meta.get("prompt_tokens")
    returned, counted = len(output_ids), meta.get("completion_tokens")
    if read is not None and read != sent:
        raise Fault(FaultKind.WRONG_COUNTS, f"{sent} prompt ids were sent, but {read} were read")
    if counted != returned:
        raise Fault(FaultKind.WRONG_COUNTS, f"the answer has {returned} output_ids, but counts {counted}")
    if returned > facts.max_new_tokens:
        raise Fault(FaultKind.WRONG_COUNTS, f"the answer has {returned} output_ids, not {facts.max_new_tokens}")
    weights = {part.get("version") for part in _objects(meta.get("weight_versions"))}
    if len(weights) > 1:
        raise Fault(FaultKind.MIXED_WEIGHTS)


def _part(body: JSONObject, name: str, type_: type) -> Any:
    value = body.get(name)
    if type(value) is not type_:
        found = "absent" if name not in body else f"a {type(value).__name__}"
        raise Fault(FaultKind.CONTRACT, f"the answer's {name} is {found}")
    return value


def _objects(value: object) -> list[JSONObject]:
    """The objects in a JSON list, or nothing."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _typed(value: object, type_: type) -> Any:
    """The value if it is of that type (an int is a fine float), else None."""
    if type_ is float and type(value) is int:
        return float(value)
    return value if type(value) is type_ else None


def _numbers(items: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [value for item in items if type(value := item.get(name)) in (int, float)]


def _sum(items: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The sum of a number over the ranks, or None if no rank gives it."""
    numbers = _numbers(items, name)
    return sum(numbers) if numbers else None

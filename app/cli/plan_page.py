"""What `headrace plan` knows in the end, and how it says it: as lines for people or as JSON."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from app.capacity.plan import HEADROOM_GIB, HEADROOM_LEAST_GIB, Fit, GPUMemory, HostCache, fit, wall_seconds
from app.sglang.launch import Launch

_SHOWN_TOKENS = (1024, 2048, 4000, 4096, 8192, 16384, 32768)
PROMPT_SHARE = 0.25  #: of a request's tokens, where only their sum is known
#: HiCache keeps what was evicted for the next equal prefix; running requests always live in GPU memory.
HICACHE_TRUTH = (
    "HiCache saves prefill where prompts share prefixes; it lets no more requests run, and does next to nothing for "
    "prompts that are all different"
)


@dataclass(slots=True)
class Plan:
    """All that is known and follows; what stays empty is not shown."""

    kv_tokens: int | None = None
    max_running: int | None = None
    throughput: float | None = None  #: tokens per second, over all endpoints
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    lengths_from: str = ""
    completions: int | None = None
    launch: Launch = field(default_factory=Launch)
    advice: list[str] = field(default_factory=list)

    @property
    def own_fit(self) -> Fit | None:
        """For the lengths of this job."""
        if self.kv_tokens is None or self.prompt_tokens is None or self.output_tokens is None:
            return None
        return fit(self.kv_tokens, self.prompt_tokens, self.output_tokens, self.max_running)

    @property
    def fits(self) -> list[Fit]:
        """For requests of some usual lengths."""
        if self.kv_tokens is None:
            return []
        return [
            fit(self.kv_tokens, PROMPT_SHARE * tokens, (1 - PROMPT_SHARE) * tokens, self.max_running)
            for tokens in _SHOWN_TOKENS
        ]

    @property
    def limit(self) -> str:
        """What keeps more requests from running."""
        own = self.own_fit
        if own is None:
            return ""
        if self.max_running is not None and own.flowing >= self.max_running:
            return f"the server's own limit of {self.max_running:,} running requests"
        return "KV tokens"

    @property
    def wall_seconds(self) -> float | None:
        """None unless completions, their length and a rate are known."""
        if not (self.completions and self.output_tokens and self.throughput):
            return None
        return wall_seconds(self.completions, self.output_tokens, self.throughput)


def launch_advice(memory: GPUMemory | None, other: GPUMemory | None) -> list[str]:
    """Sentences about GPUs that have too little left."""
    said = []
    for one in (memory, other):
        left = one.headroom_gib if one else None
        if left is None or left >= HEADROOM_GIB:
            continue
        at = f"at mem_fraction_static {one.mem_fraction:g}" if one.mem_fraction else "as launched"
        risk = "a long prefill will run out of memory" if left < HEADROOM_LEAST_GIB else "a long prefill may run out"
        said.append(f"{at} only {left:.1f} GiB of a GPU stay free after weights, KV pool and graphs: {risk}; keep 5")
    return said


def cache_advice(plan: Plan, cache: HostCache | None) -> list[str]:
    """Sentences about HiCache's share of the host."""
    if cache is None or not cache.per_rank_gb:
        return [HICACHE_TRUTH] if cache or plan.launch.hierarchical_cache else []
    size, total_gb = f"{cache.per_rank_gb:g}", f"{cache.total_gb:,.0f} GB"
    total = f"hicache_size {size} is per rank: {cache.ranks} ranks take {total_gb} of the host"
    if cache.verdict == "unknown":
        return [f"{total}; --host-free-gb tells whether it has them", HICACHE_TRUTH]
    have = f"{cache.free_gb:,.0f} GB are free"
    if cache.verdict == "impossible":
        verdict = (
            f"{have}: impossible (newer SGLang refuses it, 0.5.10 and older bring the host down); "
            f"safe is {cache.safe_per_rank_gb}"
        )
    elif cache.verdict == "tight":
        verdict = f"{have}: tight; safe is {cache.safe_per_rank_gb}"
    else:
        verdict = f"{have}: safe"
    return [f"{total}, {verdict}", HICACHE_TRUTH]


def lines_of(plan: Plan, memory: GPUMemory | None, other: GPUMemory | None) -> list[str]:
    """The page for people."""
    lines: list[str] = []
    if plan.kv_tokens:
        ceiling = f", at most {plan.max_running:,} running" if plan.max_running else ""
        lines.append(f"{plan.kv_tokens:,} KV tokens{ceiling}")
        lines.append(f"  {'tokens a request':>18}{'fully grown':>13}{'in a flow':>11}")
        for tokens, one in zip(_SHOWN_TOKENS, plan.fits, strict=True):
            lines.append(f"  {tokens:>18,}{one.grown:>13,}{one.flowing:>11,}")
    if own := plan.own_fit:
        lines += [
            "",
            f"This job: {plan.prompt_tokens:,.0f} prompt + {plan.output_tokens:,.0f} answer tokens on average "
            f"({plan.lengths_from})",
            f"  fully grown {own.grown:,} at once, about {own.flowing:,} in a flow; what limits: {plan.limit}",
        ]
        if plan.completions:
            tokens = plan.completions * plan.output_tokens
            lines.append(f"  {plan.completions:,} completions, {tokens:,.0f} tokens: {_time(plan)}")
    for one in (memory, other):
        if one is not None:
            lines.append(_memory_line(one))
    if plan.advice:
        lines += [*([""] if lines else []), *(f"- {sentence}" for sentence in plan.advice)]
    return lines


def _memory_line(one: GPUMemory) -> str:
    at = f"mem_fraction_static {one.mem_fraction:g}: " if one.mem_fraction else ""
    left = f", {one.headroom_gib:.1f} GiB free after graphs" if one.headroom_gib is not None else ""
    each = f"{one.bytes_per_token:,.0f} bytes per token and GPU"
    return f"{at}{one.kv_tokens:,} tokens, {each}, {one.kv_gib:.2f} GiB{left}"


def _time(plan: Plan) -> str:
    if plan.wall_seconds is None:
        return "give --tokens-per-second for the time"
    hours = plan.wall_seconds / 3600
    return f"{hours:.1f} h at {plan.throughput:,.0f} tokens/s" if hours >= 1 else \
        f"{plan.wall_seconds / 60:.0f} min at {plan.throughput:,.0f} tokens/s"  # fmt: skip


def as_json(plan: Plan, memory: GPUMemory | None, other: GPUMemory | None, cache: HostCache | None) -> dict[str, Any]:
    """All of it for scripts; what is not known is null."""
    own = plan.own_fit
    return {
        "kv_tokens": plan.kv_tokens, "max_running_requests": plan.max_running, "tokens_per_second": plan.throughput,
        "fits": [dataclasses.asdict(one) for one in plan.fits],
        "job": None if own is None else {
            "prompt_tokens": plan.prompt_tokens, "output_tokens": plan.output_tokens, "lengths_from": plan.lengths_from,
            **dataclasses.asdict(own), "limit": plan.limit, "completions": plan.completions,
            "wall_seconds": plan.wall_seconds,
        },
        "memory": _memory_json(memory), "memory_tried": _memory_json(other),
        "hicache": None if cache is None else {
            "per_rank_gb": cache.per_rank_gb, "ranks": cache.ranks, "total_gb": cache.total_gb,
            "most_per_rank_gb": cache.most_per_rank_gb, "safe_per_rank_gb": cache.safe_per_rank_gb,
            "verdict": cache.verdict,
        },
        "advice": plan.advice,
    }  # fmt: skip


def _memory_json(memory: GPUMemory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {**dataclasses.asdict(memory), "bytes_per_token": round(memory.bytes_per_token),
            "headroom_gib": memory.headroom_gib}  # fmt: skip

"""`headrace plan`: what fits, how long it takes, and what a launch line risks; from a live endpoint or from numbers."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.capacity.plan import (
    HEADROOM_GIB,
    HEADROOM_LEAST_GIB,
    Busy,
    Fit,
    GPUMemory,
    HostCache,
    fit,
    scheduling_advice,
    wall_seconds,
)
from app.cli.talk import show
from app.errors import OK, USAGE, UsageError
from app.lanes import expected_output_tokens
from app.settings import RunSettings, settings_of
from app.sglang.launch import Launch, launch_from_command

_SHOWN_TOKENS = (1024, 2048, 4000, 4096, 8192, 16384, 32768)
_PROMPT_SHARE = 0.25  #: of a request's tokens, where only their sum is known
_DEFAULT_ALLOWANCE: int = RunSettings.model_fields["max_new_tokens"].default
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
            fit(self.kv_tokens, _PROMPT_SHARE * tokens, (1 - _PROMPT_SHARE) * tokens, self.max_running)
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


def plan_command(values: Mapping[str, Any]) -> int:
    """`headrace plan`. USAGE if what was planned cannot be."""
    numbers = _checked(values)
    plan = Plan(
        kv_tokens=numbers["kv_tokens"], max_running=numbers["max_running_requests"],
        throughput=numbers["tokens_per_second"], completions=numbers["rows"],
    )  # fmt: skip
    if numbers["launch"]:
        try:
            plan.launch = launch_from_command(numbers["launch"])
        except ValueError as exc:
            raise UsageError(f"--launch: {exc}.") from exc
        plan.kv_tokens = plan.kv_tokens or plan.launch.kv_tokens
        plan.max_running = plan.max_running or plan.launch.max_running_requests
    if numbers["endpoints"]:
        _ask_endpoints(plan, numbers["endpoints"], numbers["api_key"])
    _set_lengths(plan, numbers)
    if plan.kv_tokens is None and numbers["hicache_size"] is None and plan.launch.hicache_size_gb is None:
        raise UsageError("Nothing to plan with: give --endpoint URL, or --kv-tokens N (SGLang logs it at its start).")
    memory, other = _memory(plan, numbers)
    cache = _host_cache(plan, numbers)
    plan.advice += _launch_advice(memory, other) + _cache_advice(plan, cache)
    if numbers["as_json"]:
        show(json.dumps(_as_json(plan, memory, other, cache), ensure_ascii=False))
    else:
        show("\n".join(_lines(plan, memory, other)))
    return USAGE if cache is not None and cache.verdict == "impossible" else OK


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    numbers = dict(values)
    if numbers["inputs"] and not numbers["tokenizer"]:
        raise UsageError("Lengths of DATA are measured in tokens: give --tokenizer DIR.")
    if numbers["avg_tokens"] and numbers["avg_prompt_tokens"] and numbers["avg_prompt_tokens"] >= numbers["avg_tokens"]:
        raise UsageError("--avg-tokens is prompt and answer together: it must be more than --avg-prompt-tokens.")
    return numbers


def _ask_endpoints(plan: Plan, urls: list[str], api_key: str | None) -> None:
    """Capacity, launch settings and load of live endpoints. Raises UsageError if one cannot be asked."""
    from app.sglang.client import SGLangClient
    from app.sglang.faults import Fault
    from app.urls import normalise

    async def ask():
        async with SGLangClient(SecretStr(api_key) if api_key else None) as client:
            return [
                (url, await client.info(url), await client.launch(url), await client.loads(url))
                for url in dict.fromkeys(map(normalise, urls))
            ]

    try:
        told = asyncio.run(ask())
    except Fault as fault:
        raise UsageError(f"{fault.detail}; start it, or plan with numbers (--kv-tokens N).") from fault
    silent = [url for url, info, _, _ in told if info.kv_tokens is None]
    if silent and plan.kv_tokens is None:
        raise UsageError(f"{silent[0]} does not tell its KV tokens (a router, perhaps); give --kv-tokens N.")
    if not silent:
        plan.kv_tokens = sum(info.kv_tokens for _, info, _, _ in told)
    limits = [info.max_running_requests for _, info, _, _ in told]
    if plan.max_running is None and None not in limits:
        plan.max_running = sum(limits)
    plan.launch = told[0][2]
    rates = [loads.gen_throughput or 0.0 for _, _, _, loads in told if loads]
    plan.throughput = plan.throughput or sum(rates) or None
    for url, info, launch, loads in told:
        if loads is None or not info.kv_tokens:
            continue
        busy = Busy(
            use=loads.used_tokens / info.kv_tokens, waiting=loads.waiting,
            retracted=loads.retracted or 0, conservativeness=launch.conservativeness,
        )  # fmt: skip
        if sentence := scheduling_advice(busy):
            plan.advice.append(f"{url}: {sentence}")


def _set_lengths(plan: Plan, numbers: Mapping[str, Any]) -> None:
    """Prompt and answer lengths of the job: measured where there is something to measure, else as given or assumed."""
    allowance = numbers["max_new_tokens"] or _DEFAULT_ALLOWANCE
    if numbers["like"]:
        plan.prompt_tokens, plan.output_tokens, count = _lengths_of_run(numbers["like"])
        plan.lengths_from = f"as the {count:,} answers of {numbers['like']}"
        if numbers["max_new_tokens"]:
            plan.output_tokens = min(plan.output_tokens, allowance)
    if numbers["avg_tokens"]:
        plan.prompt_tokens = numbers["avg_prompt_tokens"] or _PROMPT_SHARE * numbers["avg_tokens"]
        plan.output_tokens = numbers["avg_tokens"] - plan.prompt_tokens
        plan.lengths_from = "as given"
    if numbers["inputs"]:
        rows, prompt = _lengths_of_input(numbers)
        plan.completions = plan.completions or rows * numbers["samples"]
        plan.prompt_tokens = prompt
        if plan.output_tokens is None:
            plan.output_tokens = float(expected_output_tokens(allowance))
            plan.lengths_from = "prompts measured, answers as SGLang assumes them; better --like OUT"
        else:
            plan.lengths_from = f"prompts measured, answers {plan.lengths_from}"


def _lengths_of_run(out: Path) -> tuple[float, float, int]:
    """Mean prompt and answer tokens of a run's answers, and their number. Raises UsageError if there are none."""
    from app.cli.inspect import existing_run
    from app.offline.redo import responses

    rundir, _ = existing_run(out)
    count = prompt = output = 0
    for dataset in rundir.datasets_on_disk():
        for _, line in responses(rundir, dataset):
            count, prompt, output = count + 1, prompt + line["num_prompt_tokens"], output + line["num_output_tokens"]
    if not count:
        raise UsageError(f"--like {out}: no answers there yet.")
    return prompt / count, output / count, count


def _lengths_of_input(numbers: Mapping[str, Any]) -> tuple[int, float]:
    """Rows that would be sent, and their mean prompt tokens."""
    from app.cli.prepare import render_options
    from app.tokenization import Renderer
    from producers.inputs import parse_inputs
    from producers.measure import measure

    settings = settings_of({
        "inputs": list(numbers["inputs"]), "out": Path("."), "endpoints": ["http://localhost"],
        "tokenizer": numbers["tokenizer"], "trust_remote_code": numbers["trust_remote_code"],
    })  # fmt: skip
    found = measure(parse_inputs(settings.inputs), settings, Renderer(render_options(settings, None)))
    rows = sum(one.runnable for one in found)
    if not rows:
        raise UsageError("None of the sampled rows of DATA can be run; `headrace run` says why, row by row.")
    return rows, sum(one.mean * one.runnable for one in found) / rows


def _memory(plan: Plan, numbers: Mapping[str, Any]) -> tuple[GPUMemory | None, GPUMemory | None]:
    """The server's memory, and the same at --try-mem-fraction; None where too little is known."""
    launch = plan.launch
    kv_tokens = numbers["kv_tokens"] or launch.kv_tokens
    kv_gib = numbers["kv_gib"] or launch.kv_gib
    if not kv_tokens or not kv_gib:
        if numbers["try_mem_fraction"]:
            raise UsageError("--try-mem-fraction needs --kv-tokens and --kv-gib (the log's `KV size`), or --endpoint.")
        return None, None
    memory = GPUMemory(
        kv_tokens=kv_tokens, kv_gib=kv_gib, mem_fraction=numbers["mem_fraction"] or launch.mem_fraction,
        free_gib=numbers["gpu_free_gib"] or launch.free_gib, weights_gib=numbers["weights_gib"] or launch.weights_gib,
        graph_gib=numbers["graph_gib"] if numbers["graph_gib"] is not None else launch.graph_gib,
    )  # fmt: skip
    if not numbers["try_mem_fraction"]:
        return memory, None
    other = memory.at_fraction(numbers["try_mem_fraction"])
    if other is None:
        raise UsageError("--try-mem-fraction needs --mem-fraction and --gpu-free-gib too, or --endpoint.")
    return memory, other


def _host_cache(plan: Plan, numbers: Mapping[str, Any]) -> HostCache | None:
    size = numbers["hicache_size"] or plan.launch.hicache_size_gb
    free = numbers["host_free_gb"]
    if size is None and free is None:
        return None
    return HostCache(size or 0.0, numbers["tp"] or plan.launch.tp_size or 1, free)


def _launch_advice(memory: GPUMemory | None, other: GPUMemory | None) -> list[str]:
    said = []
    for one in (memory, other):
        left = one.headroom_gib if one else None
        if left is None or left >= HEADROOM_GIB:
            continue
        at = f"at mem_fraction_static {one.mem_fraction:g}" if one.mem_fraction else "as launched"
        risk = "a long prefill will run out of memory" if left < HEADROOM_LEAST_GIB else "a long prefill may run out"
        said.append(f"{at} only {left:.1f} GiB of a GPU stay free after weights, KV pool and graphs: {risk}; keep 5")
    return said


def _cache_advice(plan: Plan, cache: HostCache | None) -> list[str]:
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


def _as_json(plan: Plan, memory: GPUMemory | None, other: GPUMemory | None, cache: HostCache | None) -> dict[str, Any]:
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


def _lines(plan: Plan, memory: GPUMemory | None, other: GPUMemory | None) -> list[str]:
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

"""`headrace plan`: what fits, how long it takes, and what a launch line risks; from a live endpoint or from numbers."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.capacity.plan import GPUMemory, HostCache
from app.cli.inspect import Answers, answers_of, load_advice
from app.cli.plan_page import PROMPT_SHARE, Plan, as_json, cache_advice, launch_advice, lines_of
from app.cli.talk import show
from app.errors import OK, USAGE, UsageError
from app.lanes import expected_output_tokens
from app.settings import RunSettings, settings_of
from app.sglang.launch import launch_from_command

_DEFAULT_ALLOWANCE: int = RunSettings.model_fields["max_new_tokens"].default


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
    like = answers_of(numbers["like"]) if numbers["like"] else None
    if like is not None and numbers["max_new_tokens"]:
        like.sampling = {**like.sampling, "max_new_tokens": numbers["max_new_tokens"]}
    if numbers["endpoints"]:
        _ask_endpoints(plan, numbers["endpoints"], numbers["api_key"], like)
    _set_lengths(plan, numbers, like)
    if plan.kv_tokens is None and numbers["hicache_size"] is None and plan.launch.hicache_size_gb is None:
        raise UsageError("Nothing to plan with: give --endpoint URL, or --kv-tokens N (SGLang logs it at its start).")
    memory, other = _memory(plan, numbers)
    cache = _host_cache(plan, numbers)
    plan.advice += launch_advice(memory, other) + cache_advice(plan, cache)
    if numbers["as_json"]:
        show(json.dumps(as_json(plan, memory, other, cache), ensure_ascii=False))
    else:
        show("\n".join(lines_of(plan, memory, other)))
    return USAGE if cache is not None and cache.verdict == "impossible" else OK


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    numbers = dict(values)
    if numbers["inputs"] and not numbers["tokenizer"]:
        raise UsageError("Lengths of DATA are measured in tokens: give --tokenizer DIR.")
    if numbers["avg_tokens"] and numbers["avg_prompt_tokens"] and numbers["avg_prompt_tokens"] >= numbers["avg_tokens"]:
        raise UsageError("--avg-tokens is prompt and answer together: it must be more than --avg-prompt-tokens.")
    return numbers


def _ask_endpoints(plan: Plan, urls: list[str], api_key: str | None, like: Answers | None) -> None:
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
        if sentence := load_advice(info, loads, launch.conservativeness, like):
            plan.advice.append(f"{url}: {sentence}")


def _set_lengths(plan: Plan, numbers: Mapping[str, Any], like: Answers | None) -> None:
    """Prompt and answer lengths of the job: measured where there is something to measure, else as given or assumed."""
    allowance = numbers["max_new_tokens"] or _DEFAULT_ALLOWANCE
    if like is not None:
        plan.prompt_tokens, plan.output_tokens = like.prompt_tokens, like.output_tokens
        plan.lengths_from = f"as the {like.count:,} answers of {numbers['like']}"
        if numbers["max_new_tokens"]:
            plan.output_tokens = min(plan.output_tokens, allowance)
    if numbers["avg_tokens"]:
        plan.prompt_tokens = numbers["avg_prompt_tokens"] or PROMPT_SHARE * numbers["avg_tokens"]
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

"""The bodies a server sends, key for key as SGLang 0.5.23 sends them (recorded: tests/data/sglang/recorded-0.5.23)."""

from datetime import UTC, datetime
from typing import Any

from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.engine import Engine, Request

# errors: three shapes of 400, one of 5xx


def value_error(message: str) -> dict[str, Any]:
    """A value that is well-formed and not acceptable (400)."""
    return {"error": {"message": message}}


def schema_error(message: str) -> dict[str, Any]:
    """A body that is no request at all (400)."""
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def bad_request(message: str) -> dict[str, Any]:
    """A chat that its template or its checks refuse (400)."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def status_error(code: int, message: str) -> dict[str, Any]:
    """A request that the scheduler ended with a status, as 503 for a full queue."""
    return {"object": "error", "message": message, "type": str(code), "param": None, "code": code}


def stream_error(code: int, message: str) -> dict[str, Any]:
    """An error inside a stream, which has been answered 200 already."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "retryable": code >= 500}}


QUEUE_FULL = status_error(503, "The request queue is full.")
STARTING = status_error(503, "The server is starting.")


# /generate


def finish_reason(request: Request, stop_id: int | None) -> dict[str, Any] | None:
    """How a request ended; None while it runs. stop_id: the id it stopped at, if it did."""
    match request.outcome:
        case "done" if stop_id is not None:
            return {"type": "stop", "matched": stop_id}
        case "done":
            return {"type": "length", "length": request.max_new_tokens}
        case "aborted":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "aborted_waiting":
            return {"type": "abort", "message": "Abort in waiting queue"}
        case "queue_full":
            return {"type": "abort", "status_code": 503, "message": QUEUE_FULL["message"]}
    return None


def meta_info(
    request: Request, reason: dict[str, Any] | None, made: int, weight_version: str, wall: Any, metrics: bool
) -> dict[str, Any]:
    """`meta_info`. wall: engine time to Unix time. A request that never ran has neither prompt_tokens nor timings."""
    sent = wall(request.finished) if reason else wall(request.prefilled)
    versions = [{"version": weight_version, "start": 0, "end": made}]
    latency = sent - wall(request.arrived)
    if request.outcome in ("aborted_waiting", "queue_full"):
        return {"id": request.rid, "finish_reason": reason, "weight_version": weight_version, "e2e_latency": latency,
                "weight_versions": versions, "completion_tokens": 0,
                "response_sent_to_client_ts": sent}  # fmt: skip
    began, prefilled = wall(request.admitted), wall(request.prefilled)
    info = {"id": request.rid, "finish_reason": reason, "prompt_tokens": request.prompt_tokens,
            "weight_version": weight_version, "num_retractions": request.num_retractions}  # fmt: skip
    if metrics:
        info |= {"storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0, "forward_entry_time": began,
                 "prefill_finished_time": prefilled, "queue_time": began - wall(request.arrived)}  # fmt: skip
    info |= {"reasoning_tokens": 0, "completion_tokens": made, "cached_tokens": 0}
    if reason:
        info["weight_versions"] = versions
    info |= {"cached_tokens_details": None, "dp_rank": None}
    if reason:
        info["e2e_latency"] = latency
        if metrics:
            info |= _finished_metrics(request, made, wall)
        info["response_sent_to_client_ts"] = sent
    return info


def _finished_metrics(request: Request, made: int, wall: Any) -> dict[str, float]:
    arrived, prefilled, finished = wall(request.arrived), wall(request.prefilled), wall(request.finished)
    info = {"request_received_ts": arrived, "first_token_latency": prefilled - arrived,
            "api_server_dispatch_finish_ts": arrived, "request_finished_ts": finished}  # fmt: skip
    if made > 1:
        info["decode_throughput"] = (made - 1) / max(finished - prefilled, 1e-6)
    return info


# what a server says of itself


def model_info(config: SimulatorConfig, model: str, weight_version: str) -> dict[str, Any]:
    """/model_info, without the embedding section that no text model uses."""
    return {
        "model_path": model, "served_model_name": model, "tokenizer_path": config.tokenizer_path or model,
        "is_generation": True, "preferred_sampling_params": None, "weight_version": weight_version,
        "load_format": "auto", "reasoning_parser": None, "tool_call_parser": None, "disaggregation_mode": "null",
        "has_image_understanding": False, "has_audio_understanding": False, "model_type": "simulated",
        "architectures": ["SimulatedForCausalLM"],
    }  # fmt: skip


def server_info(config: SimulatorConfig, model: str, weight_version: str, engine: Engine, status: str) -> dict:
    """/server_info: the arguments a client may read, and the live sizes."""
    arguments = {
        "model_path": model, "tokenizer_path": config.tokenizer_path or model, "served_model_name": model,
        "skip_tokenizer_init": config.skip_tokenizer_init, "context_length": config.context_length,
        "dtype": config.dtype, "quantization": config.quantization, "kv_cache_dtype": config.kv_cache_dtype,
        "revision": None, "json_model_override_args": "{}",
        "mem_fraction_static": 0.8, "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests, "max_total_tokens": config.max_total_num_tokens,
        "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "schedule_policy": "fcfs",
        "schedule_conservativeness": config.schedule_conservativeness, "retraction_policy": config.retraction_policy,
        "page_size": 1, "tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "nnodes": 1, "device": "cpu",
        "random_seed": config.seed, "watchdog_timeout": 300, "api_key": None, "weight_version": weight_version,
        "chat_template": None, "reasoning_parser": None, "tool_call_parser": None, "sampling_defaults": "model",
        "preferred_sampling_params": None, "allow_auto_truncate": config.allow_auto_truncate, "stream_interval": 1,
        "incremental_streaming_output": False, "enable_metrics": config.enable_metrics, "disable_radix_cache": True,
        "enable_hierarchical_cache": False, "hicache_ratio": 2.0, "hicache_size": 0, "enable_hisparse": False,
        "speculative_algorithm": None, "speculative_num_steps": None, "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None, "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0, "enable_deterministic_inference": False,
        "enable_priority_scheduling": False, "disaggregation_mode": "null",
    }  # fmt: skip
    live = {
        "world_size": 1, "effective_max_running_requests_per_dp": config.max_running_requests,
        "last_gen_throughput": engine.throughput() * config.speed,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "startup_available": 0.0,
                         "token_capacity": config.max_total_num_tokens, "token_capacity_swa": None, "graph": {}},
    }  # fmt: skip
    return {
        **arguments, "launch_command": "headrace simulate", "status": status,
        "max_total_num_tokens": config.max_total_num_tokens, "max_req_input_len": config.max_prompt_tokens,
        "hicache_object_layout": {"enabled": False}, "kv_events": None, "startup_time": {},
        "internal_states": [{**arguments, **live}], "version": config.version, "frontend": "python",
    }  # fmt: skip


def models(config: SimulatorConfig, model: str, created: int) -> dict[str, Any]:
    """/v1/models; max_model_len is the effective context length."""
    return {"object": "list", "data": [{
        "id": model, "object": "model", "created": created, "owned_by": "sglang", "root": model, "parent": None,
        "max_model_len": config.context_length,
    }]}  # fmt: skip


def loads(config: SimulatorConfig, engine: Engine, now: float) -> dict[str, Any]:
    """/v1/loads. now: Unix time."""
    used, waiting, capacity = engine.used_tokens, len(engine.waiting), config.max_total_num_tokens
    uncached = sum(r.prompt_tokens + r.made for r in engine.waiting)
    load = {
        "timestamp": now, "dp_rank": 0, "num_running_reqs": len(engine.running), "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": uncached, "num_used_tokens": used, "num_total_tokens": used + uncached,
        "num_active_tokens": used + uncached, "num_prealloc_ready_tokens": 0, "max_total_num_tokens": capacity,
        "max_running_requests": config.max_running_requests, "token_usage": round(used / capacity, 4),
        "gen_throughput": round(engine.throughput() * config.speed, 2), "cache_hit_rate": 0.0, "utilization": 0.0,
        "total_prefill_uncached_tokens": engine.counters.prefilled_tokens, "total_prefill_busy_us": 0,
        "decode_moments": [0.0] * 6,
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": capacity},
        "disaggregation": {"mode": "null", "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0,
                           "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0,
                           "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0,
                           "kv_transfer_latency_ms": 0.0},
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }  # fmt: skip
    stamp = datetime.fromtimestamp(now, UTC).isoformat()
    return {"timestamp": stamp, "version": config.version, "accelerator": None, "num_accelerators": 1, "loads": [load]}


def metrics(config: SimulatorConfig, engine: Engine, model: str) -> str:
    """/metrics: the few names that a client of capacity reads."""
    counters = engine.counters
    rows = (
        ("num_running_reqs", "gauge", len(engine.running)), ("num_queue_reqs", "gauge", len(engine.waiting)),
        ("num_used_tokens", "gauge", engine.used_tokens),
        ("token_usage", "gauge", engine.used_tokens / config.max_total_num_tokens),
        ("max_total_num_tokens", "gauge", config.max_total_num_tokens),
        ("gen_throughput", "gauge", engine.throughput() * config.speed),
        ("new_token_ratio", "gauge", engine.new_token_ratio),
        ("num_retracted_requests_total", "counter", counters.retractions),
        ("generation_tokens_total", "counter", counters.generated_tokens),
        ("num_requests_total", "counter", counters.completed),
        ("num_aborted_requests_total", "counter", counters.aborted),
    )  # fmt: skip
    return "".join(f'# TYPE sglang:{name} {kind}\nsglang:{name}{{model_name="{model}"}} {float(value)}\n'
                   for name, kind, value in rows)  # fmt: skip


def chat_completion(pairs: list[tuple[dict[str, Any], list[int]]], model: str, created: int, with_ids: bool) -> dict:
    """/v1/chat/completions from answers of /generate, each with its prompt ids."""
    choices = []
    for index, (answer, prompt_ids) in enumerate(pairs):
        reason = answer["meta_info"]["finish_reason"]
        message = {"role": "assistant", "content": answer.get("text", ""), "reasoning_content": None}
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": reason["type"],
                  "matched_stop": reason.get("matched")}  # fmt: skip
        if with_ids:
            choice |= {"prompt_token_ids": prompt_ids, "response_token_ids": answer["output_ids"]}
        choices.append(choice)
    sent, made = len(pairs[0][1]), sum(len(answer["output_ids"]) for answer, _ in pairs)
    usage = {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made,
             "prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}  # fmt: skip
    weights = {name: pairs[0][0]["meta_info"][name] for name in ("weight_version", "weight_versions")}
    return {"id": pairs[0][0]["meta_info"]["id"], "object": "chat.completion", "created": created, "model": model,
            "choices": choices, "usage": usage, "metadata": weights}  # fmt: skip

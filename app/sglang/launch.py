"""How a server was started, as far as it decides what it can hold: from /server_info, or from a launch line. Pure."""

import shlex
from dataclasses import dataclass
from typing import Any

from app.sglang.wire import JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of a server; None where not known. Memory in GiB of one GPU, host cache in GB of one rank."""

    mem_fraction: float | None = None
    tp_size: int | None = None
    hierarchical_cache: bool = False
    hicache_size_gb: float | None = None  #: None: a ratio decides
    conservativeness: float | None = None
    max_running_requests: int | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    weights_gib: float | None = None
    free_gib: float | None = None
    graph_gib: float | None = None


def launch_of(server_info: JSONObject) -> Launch:
    """From the body of /server_info; what it does not hold is None."""
    memory = _memory(server_info)
    graph = memory.get("graph")
    graphs = [_number(value) or 0.0 for value in graph.values()] if isinstance(graph, dict) else [_number(graph)]
    size = _number(server_info.get("hicache_size"))
    return Launch(
        mem_fraction=_number(server_info.get("mem_fraction_static")),
        tp_size=_whole(server_info.get("tp_size")),
        hierarchical_cache=server_info.get("enable_hierarchical_cache") is True,
        hicache_size_gb=size or None,
        conservativeness=_number(server_info.get("schedule_conservativeness")),
        max_running_requests=_whole(server_info.get("max_running_requests")),
        kv_tokens=_whole(server_info.get("max_total_num_tokens")),
        kv_gib=_number(memory.get("kvcache")),
        weights_gib=_number(memory.get("weight")),
        free_gib=_number(memory.get("startup_available")),
        graph_gib=None if graphs == [None] else sum(graphs),
    )


#: Flags of sglang.launch_server that a plan reads, each with the field and the type of its value.
_FLAGS = {
    "--mem-fraction-static": ("mem_fraction", float),
    "--tp": ("tp_size", int),
    "--tp-size": ("tp_size", int),
    "--tensor-parallel-size": ("tp_size", int),
    "--hicache-size": ("hicache_size_gb", float),
    "--schedule-conservativeness": ("conservativeness", float),
    "--max-running-requests": ("max_running_requests", int),
    "--max-total-tokens": ("kv_tokens", int),
}


def launch_from_command(text: str) -> Launch:
    """From a command line. Raises ValueError naming the flag whose value cannot be read."""
    fields: dict[str, Any] = {}
    words = shlex.split(text)
    pairs = [word.partition("=")[::2] if "=" in word else (word, "") for word in words]
    for at, (flag, value) in enumerate(pairs):
        if flag == "--enable-hierarchical-cache":
            fields["hierarchical_cache"] = True
        if flag not in _FLAGS:
            continue
        name, type_ = _FLAGS[flag]
        value = value or (words[at + 1] if at + 1 < len(words) else "")
        try:
            fields[name] = type_(value)
        except ValueError:
            raise ValueError(f"{flag} {value!r} is no number") from None
    return Launch(**fields)


def _memory(server_info: JSONObject) -> JSONObject:
    states = server_info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else {}
    memory = first.get("memory_usage") if isinstance(first, dict) else {}
    return memory if isinstance(memory, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None

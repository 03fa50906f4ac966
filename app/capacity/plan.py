"""What fits, how long it takes, and what a launch line risks: arithmetic for `headrace plan`, pure.

GB are 1e9 bytes where SGLang's flags mean that (`--hicache-size`, host memory), GiB where its logs do although they
write GB (`memory_usage` of /server_info). Facts are those of SGLang 0.5.6 to 0.5.23.
"""

import math
from dataclasses import dataclass

from app.capacity.stages import Suggestion

GIB = 2**30
#: Share of the pool that is in use on average while an endpoint is kept saturated (docs/operating/capacity.md).
SATURATED_USE = 0.9
#: SGLang refuses a host pool that leaves less than this (10 GiB).
_HOST_KEPT_GB = 10 * GIB / 1e9
#: Share of the free host memory that we leave beside that: page cache, pinned buffers, everybody else.
_HOST_MARGIN = 0.1
#: GPU memory that should be free once graphs are captured: activations of a long prefill go there.
HEADROOM_GIB, HEADROOM_LEAST_GIB = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests of one length an endpoint holds."""

    tokens: int  #: prompt and answer of a finished request
    grown: int  #: all fully grown at once: never too many, and a third of the pool stays empty
    flowing: int  #: at all stages of growth, as in a running queue: what saturation looks like


def fit(kv_tokens: int, prompt_tokens: float, output_tokens: float, max_running: int | None = None) -> Fit:
    """Requests with so many tokens each in a pool of so many KV tokens; at most the server's own running limit."""
    final = prompt_tokens + output_tokens
    mean = prompt_tokens + output_tokens / 2
    most = math.inf if max_running is None else max_running
    grown = min(kv_tokens / final, most)
    flowing = min(max(SATURATED_USE * kv_tokens / mean, kv_tokens / final), most)
    return Fit(round(final), int(grown), int(flowing))


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUMemory:
    """One GPU's memory as SGLang accounts for it, in GiB."""

    kv_tokens: int
    kv_gib: float
    mem_fraction: float | None = None  #: --mem-fraction-static
    free_gib: float | None = None  #: before weights were loaded
    weights_gib: float | None = None
    graph_gib: float | None = None  #: captured graphs

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token on one GPU."""
        return self.kv_gib * GIB / self.kv_tokens

    @property
    def headroom_gib(self) -> float | None:
        """What is left after weights, KV pool and graphs; None if not all of them are known."""
        if self.free_gib is None or self.weights_gib is None:
            return None
        return self.free_gib - self.weights_gib - self.kv_gib - (self.graph_gib or 0.0)

    def at_fraction(self, fraction: float) -> "GPUMemory | None":
        """The same server with another --mem-fraction-static; None if free memory or fraction are not known.

        SGLang keeps (1 - fraction) of the free memory out of the pool, so the pool changes by free × the difference.
        """
        if self.free_gib is None or self.mem_fraction is None:
            return None
        kv_gib = self.kv_gib + self.free_gib * (fraction - self.mem_fraction)
        tokens = int(kv_gib * GIB / self.bytes_per_token)
        return GPUMemory(
            kv_tokens=max(0, tokens), kv_gib=kv_gib, mem_fraction=fraction, free_gib=self.free_gib,
            weights_gib=self.weights_gib, graph_gib=self.graph_gib,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostCache:
    """What `--hicache-size` (GB, of each rank) means for a host."""

    per_rank_gb: float
    ranks: int
    free_gb: float | None

    @property
    def total_gb(self) -> float:
        """All ranks of the host together."""
        return self.per_rank_gb * self.ranks

    @property
    def most_per_rank_gb(self) -> float | None:
        """What newer SGLang accepts; older ones check one rank alone and bring the host down."""
        return None if self.free_gb is None else max(0.0, (self.free_gb - _HOST_KEPT_GB) / self.ranks)

    @property
    def safe_per_rank_gb(self) -> int | None:
        """What leaves the host its air, whole GB."""
        if self.free_gb is None:
            return None
        return max(0, int(((1 - _HOST_MARGIN) * self.free_gb - _HOST_KEPT_GB) / self.ranks))

    @property
    def verdict(self) -> str:
        """safe, tight, impossible, or unknown without the host's free memory."""
        if self.free_gb is None:
            return "unknown"
        if self.per_rank_gb > self.most_per_rank_gb:
            return "impossible"
        return "safe" if self.per_rank_gb <= self.safe_per_rank_gb else "tight"


def wall_seconds(completions: int, output_tokens: float, tokens_per_second: float) -> float:
    """Time to generate so many answers of a mean length at a rate over all endpoints."""
    return completions * output_tokens / tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """How a server is doing now."""

    use: float  #: share of its KV tokens in use, 0 to 1
    waiting: int
    retracted: int = 0
    retracted_share: float = 0.0  #: retractions for each answer so far
    conservativeness: float | None = None  #: --schedule-conservativeness


#: A server that has requests waiting while less of its pool is in use is too careful (SGLang's own tuning guide).
USE_WASTED = 0.9
#: One that retracts so often is too bold: what it retracts is prefilled again.
RETRACTS_OFTEN = 0.05


def scheduling_advice(busy: Busy, stages: Suggestion | None = None) -> str | None:
    """One sentence on `--schedule-conservativeness`, and on stages where they are worth it, or None where the figures
    give no reason."""
    now = f" (now {busy.conservativeness:g})" if busy.conservativeness is not None else ""
    often = busy.retracted_share > RETRACTS_OFTEN
    if busy.retracted or often:
        seen = f"{busy.retracted_share:.0%} of the answers were retracted" if often else \
            f"{busy.retracted} requests are retracted now: if that goes on"  # fmt: skip
        return f"{seen}, restart it with --schedule-conservativeness 1.3{now}"
    if busy.waiting and busy.use < USE_WASTED:
        return (
            f"{busy.waiting} requests wait while {busy.use:.0%} of the KV pool is in use: --schedule-conservativeness "
            f"0.3{now} at the server lets more of them run" + (f", and so does the run's {stages}" if stages else "")
        )
    return None

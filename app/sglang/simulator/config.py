"""Everything that can be chosen about a simulated server, in one record that never changes while it runs.

Names follow SGLang's own server arguments where there is one. Times are divided by `speed`, so that a test may play
an hour of serving in a second; what a *client* waits for on a broken server (freeze, down, load) is not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from app.sglang.simulator.faults import Faults


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig:
    """A server's model, size, speed and answers. Raises ValueError for settings that contradict each other."""

    # the model it says it serves
    version: str = "0.5.23"  #: what it calls itself; decides only how it dumps tools for the chat template
    model_path: str = "simulated/teacher"
    tokenizer_path: str = ""  #: "" = model_path
    weight_version: str = "default"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    vocab_size: int = 163_840  #: an id outside [0, vocab_size) kills the server, as in reality
    eos_id: int = 163_586
    id_low: int = 0  #: generated ids stand in [id_low, id_high); keep special ids out of it
    id_high: int = 163_584
    context_length: int = 32_768
    seed: int = 0  #: another seed, model or weight version gives other answers to the same prompts

    # how long its answers are (tokens, the stop id included)
    output_lengths: Literal["lognormal", "fixed", "geometric"] = "lognormal"
    output_mean: float = 200.0
    output_sigma: float = 0.6  #: of the logarithm; lognormal only

    #: (first ids, last ids) around an answer, one pair of these by its prompt: a reasoning to close, a tool call. They
    #: are no ids of the model's, so what was cut inside them cannot be gone on with.
    frames: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    # how much it holds
    max_total_num_tokens: int = 200_000  #: the KV pool
    max_running_requests: int = 256
    max_queued_requests: int | None = None  #: None = without limit, as SGLang's default
    admission: Literal["reserve", "free_space"] = "reserve"  #: SGLang's rule, or whatever fits now
    schedule_conservativeness: float = 1.0  #: scales the reserve
    retraction_policy: Literal["length", "newest"] = "length"  #: victims: shortest output first, or newest first

    prefix_cache: bool = False  #: what ended stays in the free part of the pool, for requests that go on with it

    # how fast it is
    step_seconds: float = 0.0026  #: a decode step, before ...
    step_seconds_per_request: float = 0.0  #: ... this for each running request ...
    step_seconds_per_token: float = 42e-9  #: ... and this for each token in the pool
    prefill_seconds: float = 0.0  #: a prefill of some prompts together, before its tokens
    prefill_tokens_per_second: float = 95_000.0
    speed: float = 1.0
    instant: bool = False  #: answer at once: no queue, no pool, no time

    # how it answers
    behind_router: bool = False  #: as through sglang-router 0.3.2: most of what it says of itself is not to be had
    api_key: str = ""
    enable_metrics: bool = True  #: adds timing fields to meta_info, as the flag does
    allow_auto_truncate: bool = False  #: cut what is too long instead of refusing it
    skip_tokenizer_init: bool = False  #: no `text` in answers, no text accepted
    health_seconds: float = 0.05  #: /health takes about 1 s at a real server, up to 20 s when it is busy
    stream_seconds: float = 0.05  #: between the chunks of a stream
    disconnect_seconds: float = 4.0  #: how long a request of a client that left goes on
    keep_alive_seconds: float = 5.0
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)  #: ids to text
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False)  #: text to ids
    tokenizer_dir: str = ""  #: a folder with tokenizer.json: sets decode, encode and the chat template

    faults: Faults = field(default_factory=Faults)  #: those it starts with

    def __post_init__(self) -> None:
        if not 0 <= self.id_low < self.id_high <= self.vocab_size:
            raise ValueError(f"ids [{self.id_low}, {self.id_high}) are not inside the vocabulary of {self.vocab_size}")
        if self.id_low <= self.eos_id < self.id_high or not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} must be in the vocabulary and outside [id_low, id_high)")
        if self.max_total_num_tokens < 16 or self.context_length < 16:
            raise ValueError("max_total_num_tokens and context_length must be at least 16")

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request: what context and pool allow."""
        return min(self.context_length - 1, self.max_total_num_tokens - 1)

    @property
    def max_prompt_tokens(self) -> int:
        """`max_req_input_len`: SGLang keeps five tokens for the answer."""
        return self.max_request_tokens - 5

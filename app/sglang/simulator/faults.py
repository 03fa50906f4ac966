"""What goes wrong, on demand. One record holds every fault; it can be replaced at any moment, in part or whole.

Two kinds: faults of one *answer* (a fraction of the requests gets them, drawn without a clock so that a run can be
repeated) and faults of the *server* (crash, health that lies, slowness).
"""

import dataclasses
from dataclasses import dataclass, field
from random import Random
from typing import Any


def _fraction(what: str) -> Any:
    return field(default=0.0, metadata={"answer": what})


#: What /v1/loads says of the tokens in use, and of the pool, as factors of the pool; see `Faults.loads`.
LOADS_LIES = {"negative": (-1, 1), "huge": (1000, 1), "none": (0, 1), "no_pool": (0, 0)}


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Fractions are 0..1 of the completions asked for, drawn in the order of the fields; their sum stays within 1."""

    # answers
    hang: float = _fraction("never answered")
    reset: float = _fraction("the connection is closed without a byte, once the request was read")
    queue_full: float = _fraction("503, the request queue is full")
    loading: float = _fraction("503, the server is starting")
    internal_error: float = _fraction("500, plain text")
    unauthorized: float = _fraction("401")
    abort: float = _fraction("200 with finish_reason abort and a part of the output")
    wrong_prompt_tokens: float = _fraction("prompt_tokens one too low")
    wrong_completion_tokens: float = _fraction("completion_tokens one too high")
    no_output_ids: float = _fraction("output_ids is absent, as up to SGLang 0.4.10")
    prefixed_output_ids: float = _fraction("output_ids begins with the last prompt ids, as in SGLang 0.5.2")
    no_finish_reason: float = _fraction("finish_reason is null")
    nan: float = _fraction("finish_reason stop, matched 'NaN happened'")
    bad_ids: float = _fraction("an id outside the vocabulary in output_ids")
    not_json: float = _fraction("200 with an HTML page")
    error_object: float = _fraction("200 with an error object")
    list_body: float = _fraction("200 with the answer inside a list")
    cut_body: float = _fraction("the connection is closed in the middle of the body")
    truncated_prompt: float = _fraction("the prompt is cut to half without a word, as with --allow-auto-truncate")
    answer_faults_left: int = -1  #: how many answers may still be spoilt; -1 = no limit

    # the server dies
    crash_now: bool = False
    crash_after_completions: int = 0  #: once it has answered so many since it came up; 0 = never
    crash_above_running: int = 0  #: when more than so many run at once; 0 = never
    crash_on_kv_full: bool = False  #: when the pool is full, instead of retracting
    crash_on_token: int = -1  #: when a prompt holds this id (a poisoned row); -1 = never
    refuse_on_token: int = -1  #: 400 for a prompt that holds this id, as a row that is to blame; -1 = never
    refuse_above_requests: int = 0  #: 503 queue full while so many are there, whatever it says of itself; 0 = never
    refuse_above_new_tokens: int = -1  #: 400 for a larger max_new_tokens, as a gateway's limit; -1 = never
    crashes_left: int = -1  #: how many crashes may still happen; -1 = no limit
    freeze_seconds: float = 5.0  #: every connection stays open and silent for so long, then is closed without a byte
    down_seconds: float = 1.0  #: then the port refuses for so long; -1 = for ever
    load_seconds: float = 0.0  #: then it accepts, and says 503 on /health and /ready for so long
    model_after_restart: str = ""  #: "" = the same model
    weight_version_after_restart: str = ""
    swap_now: bool = False  #: the model after a restart, at once, with no connection lost

    # the server lies or is slow
    slow: float = 1.0  #: every step takes so many times as long
    health: str = "honest"  #: "honest" | "ok" (200 whatever happens) | "bad" (503 though it works) | "slow"
    health_slow_seconds: float = 20.0
    loads: str = "honest"  #: of tokens in use: "honest" | "negative" | "huge" | "none" | "no_pool" (a pool of 0)
    tokenize: str = "honest"  #: "honest" | "other" (as if its template wrote one more token before the last)

    def __post_init__(self) -> None:
        if self.health not in ("honest", "ok", "bad", "slow"):
            raise ValueError(f'health {self.health!r} is none of "honest", "ok", "bad", "slow"')
        if self.loads not in ("honest", *LOADS_LIES):
            raise ValueError(f'loads {self.loads!r} is none of "honest", {", ".join(LOADS_LIES)}')
        if self.tokenize not in ("honest", "other"):
            raise ValueError(f'tokenize {self.tokenize!r} is none of "honest", "other"')

    def updated(self, changes: dict[str, Any]) -> "Faults":
        """These faults with some replaced. Raises ValueError for an unknown name or a value of another type."""
        known = {f.name: f.type for f in dataclasses.fields(self)}
        for name, value in changes.items():
            default = getattr(_DEFAULTS, name, None)
            if name not in known:
                raise ValueError(f"unknown fault {name!r}; known are {', '.join(known)}")
            if not isinstance(value, (int, float) if isinstance(default, float) else type(default)):
                raise ValueError(f"fault {name} takes a {type(default).__name__}, not {value!r}")
        return dataclasses.replace(self, **changes)

    def draw(self, random: Random) -> str:
        """The fault of one answer: a field's name, or "" for a good answer."""
        if self.answer_faults_left == 0:
            return ""
        chance = random.random()
        for name in ANSWER_FAULTS:
            chance -= getattr(self, name)
            if chance < 0:
                return name
        return ""


ANSWER_FAULTS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Faults) if "answer" in f.metadata)
_DEFAULTS = Faults()

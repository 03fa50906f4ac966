"""Why a row or completion gets no sample: the closed list that `rejected.jsonl` may use.

Each reason belongs to one stage, the arrow at which the row left the stream.
"""

from enum import StrEnum


class Stage(StrEnum):
    """The arrow at which a row was rejected."""

    READ = "read"
    RENDER = "render"
    GENERATE = "generate"
    SAMPLE = "sample"


class Reason(StrEnum):
    """Closed list of rejection reasons; `STAGE_OF` says where each one happens."""

    # read
    UNREADABLE = "unreadable"  #: the record is no JSON, no UTF-8, or torn
    UNKNOWN_SHAPE = "unknown_shape"  #: nothing in it that we know as a prompt
    TOO_LARGE = "too_large"  #: the record is larger than --max-row-bytes
    EMPTY_PROMPT = "empty_prompt"  #: nothing to answer: no text in it
    INVALID_UNICODE = "invalid_unicode"  #: text that no UTF-8 can hold (a lone surrogate)
    UNSUPPORTED_CONTENT = "unsupported_content"  #: images, audio, or parts that are not text
    BAD_TOOL_CALL = "bad_tool_call"  #: a tool call or tool list that is not valid JSON
    # render
    TEMPLATE_ERROR = "template_error"  #: the chat template refused the conversation
    TOO_LONG = "too_long"  #: prompt + max_new_tokens is beyond every endpoint's context, or its KV pool
    CONTROL_TOKENS = "control_tokens"  #: says control tokens that this tokenizer cannot write as text
    IDS_OUT_OF_VOCABULARY = "ids_out_of_vocabulary"  #: the tokenizer made an id the model does not have
    # generate
    REFUSED = "refused"  #: every endpoint that could take it answers 400 and blames this prompt
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"  #: three charged attempts failed while the endpoint served others
    CRASHES_ENDPOINT = "crashes_endpoint"  #: kills an endpoint when it runs there alone
    # sample
    EMPTY_OUTPUT = "empty_output"  #: no token, or nothing but the stop token
    OVER_MAX_SAMPLE_TOKENS = "over_max_sample_tokens"  #: longer than --max-sample-tokens
    TRUNCATED = "truncated"  #: finish reason length, and --truncated drop
    UNCLOSED_THINKING = "unclosed_thinking"  #: cut inside its reasoning, and --unclosed-thinking drop
    REPETITION = "repetition"  #: a loop longer than --max-repeat


STAGE_OF: dict[Reason, Stage] = {
    **dict.fromkeys(
        (Reason.UNREADABLE, Reason.UNKNOWN_SHAPE, Reason.TOO_LARGE, Reason.EMPTY_PROMPT, Reason.INVALID_UNICODE,
         Reason.UNSUPPORTED_CONTENT, Reason.BAD_TOOL_CALL), Stage.READ),
    **dict.fromkeys((Reason.TEMPLATE_ERROR, Reason.TOO_LONG, Reason.CONTROL_TOKENS, Reason.IDS_OUT_OF_VOCABULARY),
                    Stage.RENDER),
    **dict.fromkeys((Reason.REFUSED, Reason.ATTEMPTS_EXHAUSTED, Reason.CRASHES_ENDPOINT), Stage.GENERATE),
    **dict.fromkeys((Reason.EMPTY_OUTPUT, Reason.OVER_MAX_SAMPLE_TOKENS, Reason.TRUNCATED, Reason.UNCLOSED_THINKING,
                     Reason.REPETITION), Stage.SAMPLE),
}  # fmt: skip


class Rejected(Exception):
    """Raised by reading and rendering when a row can get no sample. `detail` is one sentence for a person."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"

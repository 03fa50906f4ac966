"""What can go wrong with one request, who owns it, and what follows from it: one closed list, one table.

Invariant: every answer that is not a whole, true generation, and every exception of the network, becomes exactly one
Fault. What decides is type, status and JSON field, and the facts that we hold about the request ourselves; never the
wording of a message. Nothing here waits, sends or logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

#: SGLang refuses at its door at once. A 503 after this long is about a request that it had taken in.
DOOR_SECONDS = 30.0
_QUOTE_LIMIT = 300


class Owner(StrEnum):
    """Whose fault it is, and so who pays: the row is rejected, the endpoint is judged, or we stop."""

    ROW = "row"
    ENDPOINT = "endpoint"
    OURS = "ours"


class FaultKind(StrEnum):
    """The closed list. `VERDICTS` says what each one means for row, endpoint and run."""

    # the row
    BAD_IDS = "bad_ids"
    TOO_LONG = "too_long"
    REFUSED = "refused"
    # the endpoint: nothing was sent
    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect_timeout"
    # the endpoint: the request may have run
    RESET = "reset"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    STALLED = "stalled"
    GATEWAY = "gateway"
    SERVER_ERROR = "server_error"
    GIVEN_UP = "given_up"
    OUT_OF_MEMORY = "out_of_memory"
    ABORTED = "aborted"
    # the endpoint: slow down
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    # the endpoint: answers that would be a lie in the files
    BAD_BODY = "bad_body"
    CONTRACT = "contract"
    WRONG_COUNTS = "wrong_counts"
    BAD_OUTPUT_IDS = "bad_output_ids"
    NAN = "nan"
    MIXED_WEIGHTS = "mixed_weights"
    ANOTHER_MODEL = "another_model"
    UNCONFIRMED = "unconfirmed"
    UNUSABLE_VERSION = "unusable_version"
    # ours
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    BAD_PARAMETERS = "bad_parameters"
    BAD_URL = "bad_url"
    LOCAL_RESOURCES = "local_resources"
    MISUSE = "misuse"

    @property
    def sentence(self) -> str:
        """What it is, in words for a person."""
        return VERDICTS[self].sentence


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the table."""

    sentence: str
    owner: Owner
    reached: bool = False  #: the server may have started work on it
    chargeable: bool = False  #: the row may be to blame (if the endpoint goes on serving others)
    pressure: bool = False  #: slow down; no sign of death
    fatal_for_run: bool = False  #: no row can succeed until a person changes something: exit 2


_ROW, _ENDPOINT, _OURS = Owner.ROW, Owner.ENDPOINT, Owner.OURS
VERDICTS: dict[FaultKind, Verdict] = {
    FaultKind.BAD_IDS: Verdict("the prompt has ids that the model does not have", _ROW, chargeable=True),
    FaultKind.TOO_LONG: Verdict("the prompt and its allowance are longer than the endpoint takes", _ROW, chargeable=True),  # noqa: E501
    FaultKind.REFUSED: Verdict("the endpoint refuses this prompt, though it takes our parameters", _ROW, chargeable=True),  # noqa: E501
    FaultKind.UNREACHABLE: Verdict("no connection: refused, unknown host, or TLS", _ENDPOINT),
    FaultKind.CONNECT_TIMEOUT: Verdict("no connection within the time allowed for it", _ENDPOINT),
    FaultKind.RESET: Verdict("the connection was reset", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.DISCONNECTED: Verdict("the connection closed before the whole answer was here", _ENDPOINT, reached=True, chargeable=True),  # noqa: E501
    FaultKind.TIMEOUT: Verdict("no answer within the time allowed for it", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.STALLED: Verdict("the endpoint fell silent with it in hand", _ENDPOINT, reached=True),
    FaultKind.GATEWAY: Verdict("a proxy got no answer from the server behind it", _ENDPOINT, reached=True, chargeable=True),  # noqa: E501
    FaultKind.SERVER_ERROR: Verdict("the server failed over it", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.GIVEN_UP: Verdict("the server's own time limit ended it", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.OUT_OF_MEMORY: Verdict("the scheduler gave this request up", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.ABORTED: Verdict("somebody aborted it at the server", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.QUEUE_FULL: Verdict("the server's queue is full", _ENDPOINT, pressure=True),
    FaultKind.UNAVAILABLE: Verdict("the server is loading, leaving, or has nobody behind it", _ENDPOINT, pressure=True),
    FaultKind.BAD_BODY: Verdict("the answer is not the JSON of a generation", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.CONTRACT: Verdict("the answer lacks what a generation must have", _ENDPOINT, reached=True, chargeable=True),  # noqa: E501
    FaultKind.WRONG_COUNTS: Verdict("the answer contradicts itself", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.BAD_OUTPUT_IDS: Verdict("the answer has ids that the model does not have", _ENDPOINT, reached=True, chargeable=True),  # noqa: E501
    FaultKind.NAN: Verdict("the model's numbers failed (NaN)", _ENDPOINT, reached=True, chargeable=True),
    FaultKind.MIXED_WEIGHTS: Verdict("the weights were changed in the middle of it", _ENDPOINT, reached=True),
    FaultKind.ANOTHER_MODEL: Verdict("another model answers there", _ENDPOINT, reached=True),
    FaultKind.UNCONFIRMED: Verdict("it was gone before it could be asked which model had answered", _ENDPOINT, reached=True),  # noqa: E501
    FaultKind.UNUSABLE_VERSION: Verdict("this version of the server returns no output ids, or wrong ones", _ENDPOINT, reached=True, fatal_for_run=True),  # noqa: E501
    FaultKind.UNAUTHORIZED: Verdict("the endpoint wants another API key", _OURS, fatal_for_run=True),
    FaultKind.NOT_FOUND: Verdict("there is no SGLang at this address", _OURS, fatal_for_run=True),
    FaultKind.BAD_PARAMETERS: Verdict("the endpoint refuses our parameters", _OURS, fatal_for_run=True),
    FaultKind.BAD_URL: Verdict("the address is no http:// or https:// URL", _OURS, fatal_for_run=True),
    FaultKind.LOCAL_RESOURCES: Verdict("this machine can't open another connection", _OURS, pressure=True),
    FaultKind.MISUSE: Verdict("a bug of ours in the use of the HTTP client", _OURS, fatal_for_run=True),
}  # fmt: skip


class Fault(Exception):
    """Why one request gave no generation. `detail` is one sentence without prompt, answer or secrets."""

    def __init__(self, kind: FaultKind, detail: str = "", retry_after_seconds: float | None = None, url: str = ""):
        super().__init__(kind, detail, retry_after_seconds, url)  # all of it, so that it can be pickled
        self.kind = kind
        self.detail = detail or kind.sentence
        self.retry_after_seconds = retry_after_seconds
        self.url = url

    def at(self, url: str) -> "Fault":
        """The same fault, its detail naming where it happened; the first one to know is right."""
        return self if self.url else Fault(self.kind, f"{self.detail}, at {url}", self.retry_after_seconds, url)

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    @property
    def verdict(self) -> Verdict:
        """Its line of the table."""
        return VERDICTS[self.kind]

    @property
    def owner(self) -> Owner:
        """Row, endpoint or ours."""
        return self.verdict.owner

    @property
    def reached(self) -> bool:
        """The server may have started work on it."""
        return self.verdict.reached

    @property
    def chargeable(self) -> bool:
        """The row may be to blame, if the same endpoint goes on serving others."""
        return self.verdict.chargeable

    @property
    def pressure(self) -> bool:
        """Slow down; this is no sign of death."""
        return self.verdict.pressure

    @property
    def fatal_for_run(self) -> bool:
        """No row can succeed until a person changes something."""
        return self.verdict.fatal_for_run


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What we know of a request ourselves, so that a refusal needs no reading between the server's words."""

    num_prompt_tokens: int
    max_new_tokens: int
    context_length: int | None = None  #: what prompt and answer may use together
    max_req_input_len: int | None = None  #: what the KV pool lets a prompt be
    parameters_proven: bool = False  #: a canary with the same parameters passed at this endpoint
    elapsed_seconds: float = 0.0  #: how long the answer took

    @property
    def too_long(self) -> bool:
        """At or over a limit that we know of: at the limit itself, versions differ."""
        over_context = (
            self.context_length is not None and self.num_prompt_tokens + self.max_new_tokens >= self.context_length
        )
        over_pool = self.max_req_input_len is not None and self.num_prompt_tokens >= self.max_req_input_len
        return over_context or over_pool


def fault_from_response(
    status: int, headers: Mapping[str, str], body: bytes, facts: RequestFacts | None = None
) -> Fault:
    """The fault in an answer that is not 200, or in a 200 that holds an error or an abort instead of a generation.

    facts: None for a request without a prompt. Header names are taken as they are looked up, so pass httpx.Headers.
    """
    error = _ErrorBody.parse(status, body)
    kind = _kind_of_status(status, error, facts or RequestFacts(0, 1))
    said = f" ({error.quotable})" if error.quotable else ""
    return Fault(kind, f"{kind.sentence}: HTTP {status}{said}", _retry_after(headers.get("retry-after")))


def fault_of_abort(reason: Mapping[str, Any], facts: RequestFacts) -> Fault:
    """The fault in a finish_reason of type abort: by the status it carries, or else somebody's /abort_request."""
    status = reason.get("status_code")
    if type(status) is int and 400 <= status <= 599:
        scheduler = orjson.dumps({"object": "error", "code": status})
        return fault_from_response(status, {}, scheduler, facts)
    return Fault(FaultKind.ABORTED)


@dataclass(frozen=True, slots=True)
class _ErrorBody:
    """The three shapes of an error: `error` is a string, `error` is an object, or the object itself is the error."""

    scheduler: bool = False  #: SGLang's scheduler (or its schema) speaks: {"object": "error", …}
    upstream: bool = False  #: sglang-router speaks: it got no answer from the server that it chose
    quotable: str = ""  #: the server's words, where they can't repeat our input

    @classmethod
    def parse(cls, status: int, body: bytes) -> "_ErrorBody":
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            return cls()
        if not isinstance(value, dict):
            return cls()
        error = value.get("error")
        words = error.get("message") if isinstance(error, dict) else error
        if error is None and status >= 500:  # below 500 the schema speaks, and repeats what it was sent
            words = value.get("message")
        upstream = isinstance(error, dict) and str(error.get("code")).startswith("call_upstream")
        return cls(value.get("object") == "error", upstream, words[:_QUOTE_LIMIT] if isinstance(words, str) else "")


_BY_STATUS = {
    401: FaultKind.UNAUTHORIZED,
    403: FaultKind.UNAUTHORIZED,
    404: FaultKind.NOT_FOUND,
    405: FaultKind.NOT_FOUND,
    408: FaultKind.QUEUE_FULL,  # a router's queue, waited for too long
    413: FaultKind.TOO_LONG,  # a proxy's limit on the body
    429: FaultKind.QUEUE_FULL,
    502: FaultKind.GATEWAY,
    504: FaultKind.GATEWAY,
}


def _kind_of_status(status: int, error: _ErrorBody, facts: RequestFacts) -> FaultKind:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status < 300:
        return FaultKind.BAD_BODY
    if status < 400:
        return FaultKind.NOT_FOUND  # a redirect: the address is not the server's
    if status < 500:
        return _kind_of_refusal(facts)
    if status == 503:
        return _kind_of_503(error, facts)
    if error.upstream:
        return FaultKind.GATEWAY
    return FaultKind.OUT_OF_MEMORY if error.scheduler else FaultKind.SERVER_ERROR


def _kind_of_refusal(facts: RequestFacts) -> FaultKind:
    if facts.too_long:
        return FaultKind.TOO_LONG
    return FaultKind.REFUSED if facts.parameters_proven else FaultKind.BAD_PARAMETERS


def _kind_of_503(error: _ErrorBody, facts: RequestFacts) -> FaultKind:
    if not error.scheduler:
        return FaultKind.UNAVAILABLE
    return FaultKind.GIVEN_UP if facts.elapsed_seconds >= DOOR_SECONDS else FaultKind.QUEUE_FULL


def _retry_after(value: str | None) -> float | None:
    """Seconds, where the header says seconds; a date there is left alone."""
    if value is None or not value.isascii() or not value.isdigit():
        return None
    return float(min(int(value), 3600))

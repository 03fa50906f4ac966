"""The one HTTP client for SGLang: a prompt's ids go out, a true Generation or a Fault comes back.

Invariants: nothing but a Fault or cancellation leaves these methods; a request that we give up is aborted at the
server that holds it; an API key appears in no log, repr or exception. One client per process and event loop; any
number of requests at once.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import httpx
import orjson
from pydantic import SecretStr

from app import __version__
from app.sglang.faults import Fault, FaultKind, RequestFacts, fault_from_response
from app.sglang.launch import Launch, launch_of
from app.sglang.sampling import LARGEST_INT, ids_problem
from app.sglang.transport import HTTPX_ERRORS, AiohttpTransport, fault_from_exception
from app.sglang.wire import (
    EndpointInfo,
    Generation,
    JSONObject,
    Loads,
    Readiness,
    endpoint_info,
    generation,
    loads_from_get_load,
    loads_from_v1,
)

CONNECT_SECONDS = 5.0
INFO_SECONDS = 5.0
ABORT_SECONDS = 2.0
CANARY_SECONDS = 60.0
#: /health makes the server generate a token, and says 503 itself after 20 s.
HEALTH_SECONDS = 25.0
#: A 503 from memory comes at once: loading, or leaving. A slow one is a probe that waited behind other work.
_AT_ONCE_SECONDS = 1.0
_CANARY_IDS = tuple(range(1, 9))
_CANARY_TOKENS = 4
_MISSING = (400, 404, 405, 501)  #: to a GET without parameters: this version, or this router, doesn't have it
_USER_AGENT = f"headrace/{__version__}"
# Only connecting has a time of its own; the rest is one deadline per request, kept by asyncio.timeout.
_EXTENSIONS = {"timeout": httpx.Timeout(None, connect=CONNECT_SECONDS).as_dict()}
_NOT_OFFERED = (*_MISSING, 422, 500)

_log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO: millions of lines


def new_rid() -> str:
    """A fresh request id, one per attempt. All have one length: SGLang aborts by prefix, so none may be another's."""
    return uuid.uuid4().hex


class SGLangClient:
    """Speaks to any number of endpoints, by normalised URL. Use as `async with`, or call `aclose`.

    api_key: one key for all endpoints, or a mapping from URL to key.
    """

    def __init__(self, api_key: SecretStr | Mapping[str, SecretStr] | None = None, *, keepalive_seconds: float = 2.0):
        self._api_key = api_key
        self._http = httpx.AsyncClient(transport=AiohttpTransport(keepalive_seconds), trust_env=False)
        self._without_abort: set[str] = set()
        self._farewells: set[asyncio.Task[bool]] = set()  # aborts on their way; the loop itself keeps no hold of them

    def __repr__(self) -> str:
        return f"SGLangClient({'with' if self._api_key else 'without'} API key)"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None):
        await self.aclose()

    async def aclose(self) -> None:
        """Let aborts that are on their way out go (for seconds at most), then close all connections."""
        await asyncio.gather(*self._farewells)
        await self._http.aclose()

    async def generate(
        self,
        url: str,
        prompt_token_ids: list[int] | tuple[int, ...],
        sampling: JSONObject,
        *,
        rid: str,
        deadline_seconds: float | None,
        vocab_size: int | None = None,
        limits: EndpointInfo | None = None,
        parameters_proven: bool = False,
    ) -> Generation:
        """One generation. Raises Fault.

        sampling: from `sampling_body`, its max_new_tokens perhaps lowered. rid: from `new_rid`, never used before.
        limits: what the endpoint said of itself, to tell a prompt that is too long from a parameter that is wrong.
        parameters_proven: the canary passed there with these parameters, so a refusal is about the prompt.
        """
        with _at(url):
            _check_prompt(prompt_token_ids, sampling, vocab_size)
            body = orjson.dumps(
                {"input_ids": prompt_token_ids, "sampling_params": sampling, "rid": rid, "stream": False}
            )
            started = time.monotonic()
            response = await self._post_or_abort(url, body, rid, deadline_seconds)
            facts = RequestFacts(
                num_prompt_tokens=len(prompt_token_ids),
                max_new_tokens=sampling["max_new_tokens"],
                context_length=limits.usable_context if limits else None,
                max_req_input_len=limits.max_req_input_len if limits else None,
                parameters_proven=parameters_proven,
                elapsed_seconds=time.monotonic() - started,
            )
            if response.status_code != 200:
                raise fault_from_response(response.status_code, response.headers, response.content, facts)
            return generation(response.content, facts, vocab_size)

    async def abort(self, url: str, rid: str) -> bool:
        """Tell a server to stop working on a request. False if it could not be told; that is logged, never raised.

        Where there is no such path (a router), our going has to be enough: said once for each endpoint.
        """
        try:
            response = await self._request("POST", url, "/abort_request", {"rid": rid}, ABORT_SECONDS)
        except Fault as fault:
            _log.warning("abort_failed %s at %s: %s", rid, url, fault)
            return False
        if response.status_code in (404, 405):
            if url not in self._without_abort:
                self._without_abort.add(url)
                _log.info("abort_unknown %s: what we give up there ends when its connection does", url)
        elif response.status_code != 200:
            _log.warning("abort_failed %s at %s: HTTP %d", rid, url, response.status_code)
        return response.status_code == 200

    async def info(self, url: str) -> EndpointInfo:
        """What the endpoint says of itself. A body it doesn't offer leaves its fields None; any other trouble is a Fault."""  # noqa: E501
        model_info, server_info, models = await asyncio.gather(
            self._get_object(url, "/model_info", "/get_model_info"),
            self._get_object(url, "/server_info", "/get_server_info"),
            self._get_object(url, "/v1/models"),
        )
        return endpoint_info(url, model_info, server_info, models)

    async def launch(self, url: str) -> Launch:
        """How the endpoint was started, as far as it says. Raises Fault."""
        return launch_of(await self._get_object(url, "/server_info", "/get_server_info"))

    async def serves(self, url: str) -> EndpointInfo:
        """Which model and weights the endpoint serves now, and no more: answered from its memory. Raises Fault."""
        return endpoint_info(url, await self._get_object(url, "/model_info", "/get_model_info"), {}, {})

    async def loads(self, url: str) -> Loads | None:
        """What the endpoint has in hand, or None if it can't say. Raises Fault."""
        new = loads_from_v1(await self._get_json(url, "/v1/loads"))
        return new or loads_from_get_load(await self._get_json(url, "/get_load"))

    async def is_ready(self, url: str, *, was_ready: bool = False) -> Readiness:
        """Evidence of a probe that costs the server nothing, or little. Raises Fault only if this machine is short.

        was_ready: it has been ready and not away since, so that a 503 means that it leaves, not that it loads. A paused
        server is not ready, but well: /ping says so.
        """
        not_ready = Readiness.DRAINING if was_ready else Readiness.LOADING
        try:
            response, path = await self._request("GET", url, "/ready", None, INFO_SECONDS), "/ready"
            started = time.monotonic()
            if response.status_code in _MISSING:
                response, path = await self._request("GET", url, "/health", None, HEALTH_SECONDS), "/health"
        except Fault as fault:
            if fault.kind is FaultKind.LOCAL_RESOURCES:
                raise
            return Readiness.AWAY if not fault.reached else Readiness.UNKNOWN
        if response.status_code == 200:
            return Readiness.READY
        at_once = time.monotonic() - started < _AT_ONCE_SECONDS
        if response.status_code != 503 or not at_once:
            return Readiness.UNKNOWN
        return Readiness.PAUSED if path == "/ready" and await self._is_well(url) else not_ready

    async def _is_well(self, url: str) -> bool:
        """Whether /ping, which heeds no pause, says 200. Only where there is /ready: without it (before 0.5.23) it always does."""  # noqa: E501
        try:
            return (await self._request("GET", url, "/ping", None, INFO_SECONDS)).status_code == 200
        except Fault:
            return False

    async def canary(
        self, url: str, sampling: JSONObject, *, vocab_size: int | None = None, timeout_seconds: float = CANARY_SECONDS
    ) -> None:
        """One tiny generation with the run's own parameters. Raises the Fault that keeps the endpoint from serving.

        Proves what no health check does: that it generates, takes our parameters, and returns true output ids.
        """
        tiny = sampling | {"max_new_tokens": min(_CANARY_TOKENS, sampling["max_new_tokens"])}
        if tiny.get("min_new_tokens"):
            tiny["min_new_tokens"] = min(tiny["min_new_tokens"], tiny["max_new_tokens"])
        try:
            await self._canary(url, tiny, vocab_size, timeout_seconds)
        except Fault as fault:
            if fault.kind in (FaultKind.CONTRACT, FaultKind.WRONG_COUNTS):
                advice = f"{fault.detail}; use SGLang 0.5.6 or newer"
                raise Fault(FaultKind.UNUSABLE_VERSION, advice, url=url) from fault
            if fault.kind is not FaultKind.SERVER_ERROR:
                raise
            if not await self._serves_plainly(url, vocab_size, timeout_seconds):
                raise
            await self._canary_again(url, tiny, vocab_size, timeout_seconds)

    async def tokenize(
        self,
        url: str,
        messages: list[JSONObject],
        tools: list[JSONObject] | None = None,
        kwargs: JSONObject | None = None,
    ) -> list[int] | None:
        """The ids that the server's own chat template gives, or None if it can't (before 0.5.14). Raises Fault."""
        body: JSONObject = {"messages": messages}
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": kwargs} if kwargs else {}
        with _at(url):
            response = await self._request("POST", url, "/v1/tokenize", body, CANARY_SECONDS)
            answer = None if response.status_code in _NOT_OFFERED else _json(response)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return ids if isinstance(ids, list) and ids and not ids_problem(ids, None) else None

    async def detokenize(self, url: str, ids: list[int], *, skip_special_tokens: bool) -> str | None:
        """The text of ids as the server's own tokenizer has it, or None if it can't say. Raises Fault."""
        body: JSONObject = {"tokens": ids, "skip_special_tokens": skip_special_tokens}
        with _at(url):
            response = await self._request("POST", url, "/detokenize", body, CANARY_SECONDS)
            answer = None if response.status_code in _NOT_OFFERED else _json(response)
        text = answer.get("text") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    async def _canary(self, url: str, sampling: JSONObject, vocab_size: int | None, timeout_seconds: float) -> None:
        await self.generate(
            url, _CANARY_IDS, sampling, rid=new_rid(), deadline_seconds=timeout_seconds, vocab_size=vocab_size
        )

    async def _canary_again(self, url: str, sampling: JSONObject, vocab_size: int | None, seconds: float) -> None:
        """Before 0.5.23 an unknown parameter is a bare 500, each time; a server that stumbled takes it now."""
        try:
            await self._canary(url, sampling, vocab_size, seconds)
        except Fault as fault:
            if fault.kind is FaultKind.SERVER_ERROR:
                raise Fault(FaultKind.BAD_PARAMETERS, "it serves, but not with our parameters").at(url) from fault
            raise

    async def _serves_plainly(self, url: str, vocab_size: int | None, timeout_seconds: float) -> bool:
        try:
            await self._canary(url, {"max_new_tokens": 1, "temperature": 0.0}, vocab_size, timeout_seconds)
        except Fault:
            return False
        return True

    async def _post_or_abort(self, url: str, body: bytes, rid: str, deadline_seconds: float | None) -> httpx.Response:
        """POST /generate; if the deadline passes or we are cancelled, the server is told before we leave."""
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._send("POST", url, "/generate", body)
        except TimeoutError as exc:
            await self._farewell(url, rid)
            raise Fault(FaultKind.TIMEOUT, f"no answer within {deadline_seconds:g} s") from exc
        except asyncio.CancelledError:
            await self._farewell(url, rid)
            raise

    async def _farewell(self, url: str, rid: str) -> None:
        """Abort, shielded: a second cancellation ends our waiting, not the abort."""
        task = asyncio.ensure_future(self.abort(url, rid))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
        await asyncio.shield(task)

    async def _get_object(self, url: str, *paths: str) -> JSONObject:
        """The JSON object at the first path that the server has, or {}. Raises Fault."""
        for path in paths:
            body = await self._get_json(url, path)
            if isinstance(body, dict):
                return body
        return {}

    async def _get_json(self, url: str, path: str) -> Any:
        """The JSON there, or None if there is none. Raises Fault."""
        with _at(url):
            response = await self._request("GET", url, path, None, INFO_SECONDS)
            return None if response.status_code in _MISSING else _json(response)

    async def _request(
        self, method: str, url: str, path: str, body: JSONObject | None, timeout_seconds: float
    ) -> httpx.Response:
        """Any answer, whatever its status, within the time. Raises Fault."""
        content = b"" if body is None else orjson.dumps(body)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._send(method, url, path, content)
        except TimeoutError as exc:
            raise Fault(FaultKind.TIMEOUT, f"no answer to {path} within {timeout_seconds:g} s") from exc

    async def _send(self, method: str, url: str, path: str, content: bytes) -> httpx.Response:
        headers = {"user-agent": _USER_AGENT}
        if content:
            headers["content-type"] = "application/json"
        if key := self._key_for(url):
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        try:
            # Not `self._http.request`: merging its defaults into each request costs a fifth of the whole call.
            request = httpx.Request(
                method, _address(url, path), headers=headers, content=content, extensions=_EXTENSIONS
            )
            return await self._http.send(request)
        except HTTPX_ERRORS as exc:
            raise fault_from_exception(exc) from exc

    def _key_for(self, url: str) -> SecretStr | None:
        return self._api_key.get(url) if isinstance(self._api_key, Mapping) else self._api_key


@contextmanager
def _at(url: str) -> Iterator[None]:
    """Faults from in here say where they happened."""
    try:
        yield
    except Fault as fault:
        raise fault.at(url) from fault.__cause__


def _check_prompt(prompt_token_ids: Sequence[int], sampling: JSONObject, vocab_size: int | None) -> None:
    """Nothing leaves that could kill a server and everything in flight there."""
    if not prompt_token_ids:
        raise Fault(FaultKind.BAD_IDS, "the prompt has no ids")
    if problem := ids_problem(prompt_token_ids, vocab_size):
        raise Fault(FaultKind.BAD_IDS, f"the prompt's ids are not the model's: {problem}")
    allowance = sampling.get("max_new_tokens")
    if type(allowance) is not int or not 1 <= allowance <= LARGEST_INT:
        raise Fault(FaultKind.BAD_PARAMETERS, f"max_new_tokens must be a whole number from 1 to {LARGEST_INT}")


@lru_cache(maxsize=1024)
def _address(url: str, path: str) -> httpx.URL:
    return httpx.URL(f"{url}{path}")


def _json(response: httpx.Response) -> Any:
    """The JSON of a 200, or None if it is none. Raises Fault for another status."""
    if response.status_code != 200:
        raise fault_from_response(response.status_code, response.headers, response.content)
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None

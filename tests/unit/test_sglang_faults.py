"""app.sglang.faults and the exception table of app.sglang.transport: everything becomes exactly one Fault."""

import errno
import json
import pickle
import ssl
from pathlib import Path

import aiohttp
import httpx
import pytest

from app.sglang.faults import (
    DOOR_SECONDS,
    VERDICTS,
    Fault,
    FaultKind,
    Owner,
    RequestFacts,
    fault_from_response,
    fault_of_abort,
)
from app.sglang.transport import _HTTPX_CLASS, HTTPX_ERRORS, MAPPED, fault_from_exception, httpx_class_of
from app.sglang.wire import generation

DATA = Path(__file__).parents[1] / "data" / "sglang"
ANSWERS = [
    pytest.param(answer, id=f"{recording['version']}-{name}")
    for recording in (json.loads(path.read_text()) for path in sorted(DATA.glob("client_*.json")))
    for name, answer in recording["answers"].items()
]


def subclasses(root: type) -> set[type]:
    """A class and everything below it."""
    return {root}.union(*(subclasses(child) for child in root.__subclasses__()))


def kind_of(status: int, body: object = None, facts: RequestFacts | None = None, **headers: str) -> FaultKind:
    """The kind of fault of an answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return fault_from_response(status, httpx.Headers(headers), content, facts).kind


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_recorded_answer_is_a_generation_or_the_fault_it_should_be(answer):
    """Bodies of real servers, three versions: true answers pass, each other one is one kind of fault."""
    facts = RequestFacts(
        answer["num_prompt_tokens"], answer["max_new_tokens"], answer["context_length"], answer["max_req_input_len"]
    )
    content = answer["body"].encode()
    if answer["expect"] == "generation":
        assert answer["status"] == 200
        assert generation(content, facts).num_prompt_tokens == facts.num_prompt_tokens
        return
    if answer["status"] != 200:
        assert fault_from_response(answer["status"], {}, content, facts).kind == answer["expect"]
        return
    with pytest.raises(Fault) as caught:
        generation(content, facts)
    assert caught.value.kind == answer["expect"]


def test_every_kind_has_a_verdict_and_the_owners_behave_as_owners():
    """The table is complete; only ours (and a server nobody can use) stop a run; pressure is never charged."""
    assert set(VERDICTS) == set(FaultKind)
    for kind, verdict in VERDICTS.items():
        assert verdict.sentence
        assert not (verdict.pressure and verdict.chargeable), kind
        if verdict.fatal_for_run:
            assert verdict.owner is Owner.OURS or kind is FaultKind.UNUSABLE_VERSION
        if verdict.owner is Owner.OURS:
            assert not verdict.chargeable, "a row never pays for us"
        if verdict.owner is Owner.ENDPOINT and not verdict.reached:
            assert not verdict.chargeable, "a row that never arrived is not to blame"


def test_every_aiohttp_exception_becomes_an_httpx_exception():
    """None escapes the transport unmapped, and what happened after sending is never called a failure to connect."""
    for cls in subclasses(aiohttp.ClientError):
        assert issubclass(cls, MAPPED)
        exc = cls.__new__(cls)
        assert issubclass(httpx_class_of(exc), httpx.RequestError)
    assert httpx_class_of(aiohttp.ServerDisconnectedError()) is httpx.RemoteProtocolError
    assert httpx_class_of(aiohttp.ClientPayloadError()) is httpx.RemoteProtocolError
    assert httpx_class_of(aiohttp.ClientOSError(errno.ECONNRESET, "reset")) is httpx.ReadError
    assert httpx_class_of(aiohttp.ConnectionTimeoutError()) is httpx.ConnectTimeout
    assert httpx_class_of(aiohttp.SocketTimeoutError()) is httpx.ReadTimeout
    for cls in (TimeoutError, ConnectionResetError, ssl.SSLError, OSError):
        assert httpx_class_of(cls()) in _HTTPX_CLASS.values()


def test_every_httpx_exception_becomes_one_fault():
    """Each class that httpx can raise has one kind, by its type alone; unknown ones are our bug, not a row's."""
    classes = {c for c in vars(httpx).values() if isinstance(c, type) and issubclass(c, Exception)}
    assert len(classes) > 20
    for cls in classes:
        assert issubclass(cls, HTTPX_ERRORS)
        fault = fault_from_exception(cls.__new__(cls))
        assert fault.kind in FaultKind
    expected = {
        httpx.ConnectError("x"): FaultKind.UNREACHABLE,
        httpx.ConnectTimeout("x"): FaultKind.CONNECT_TIMEOUT,
        httpx.ReadTimeout("x"): FaultKind.TIMEOUT,
        httpx.ReadError("x"): FaultKind.RESET,
        httpx.WriteError("x"): FaultKind.RESET,
        httpx.RemoteProtocolError("x"): FaultKind.DISCONNECTED,
        httpx.LocalProtocolError("x"): FaultKind.MISUSE,
        httpx.DecodingError("x"): FaultKind.BAD_BODY,
    }
    assert {exc: fault_from_exception(exc).kind for exc in expected} == expected


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_a_shortage_of_this_machine_is_ours_however_deep_it_lies(code):
    """EMFILE under a ConnectError burns no attempt and opens no breaker; it is seen by errno, not by words."""
    exc = httpx.ConnectError("All connection attempts failed")
    exc.__cause__ = aiohttp.ClientOSError("failed")
    exc.__cause__.__cause__ = OSError(code, "whatever")
    fault = fault_from_exception(exc)
    assert (fault.kind, fault.owner) == (FaultKind.LOCAL_RESOURCES, Owner.OURS)
    assert (fault.chargeable, fault.reached, fault.fatal_for_run) == (False, False, False)


def test_a_tls_error_is_not_taken_for_an_errno():
    """ssl numbers its errors from 1 as the OS does; they mean something else."""
    exc = httpx.ConnectError("x")
    exc.__cause__ = ssl.SSLError(errno.EMFILE, "[SSL] no")
    assert fault_from_exception(exc).kind is FaultKind.UNREACHABLE


def test_a_refusal_is_the_rows_if_it_passes_a_limit_that_we_know():
    """400 for a prompt over the context or the KV pool is the row's, before and after the canary."""
    over_context = RequestFacts(2040, 9, context_length=2048)
    over_pool = RequestFacts(1000, 8, context_length=2048, max_req_input_len=994)
    for facts in (over_context, over_pool):
        for body in ({"error": {"message": "any words"}}, {"error": "any words"}, {"object": "error"}, b"<html>", None):
            assert kind_of(400, body, facts) is FaultKind.TOO_LONG
    assert VERDICTS[FaultKind.TOO_LONG].owner is Owner.ROW


def test_a_refusal_within_all_limits_is_ours_until_the_parameters_are_proven():
    """The same 400 stops the run before a canary passed with these parameters, and is the row's after it."""
    body = {"error": "unknown field `max_tokens`"}
    unproven = fault_from_response(400, {}, json.dumps(body).encode(), RequestFacts(10, 8, 2048))
    assert (unproven.kind, unproven.fatal_for_run) == (FaultKind.BAD_PARAMETERS, True)
    assert "unknown field `max_tokens`" in unproven.detail
    proven = fault_from_response(400, {}, b"{}", RequestFacts(10, 8, 2048, parameters_proven=True))
    assert (proven.kind, proven.owner, proven.fatal_for_run) == (FaultKind.REFUSED, Owner.ROW, False)


def test_the_schemas_words_are_not_quoted_because_they_repeat_the_prompt():
    """A 400 of the schema holds the input; no detail repeats it."""
    body = {"object": "error", "message": "1 validation error: 'input': [4711, 4712]", "code": 400}
    assert "4711" not in str(fault_from_response(400, {}, json.dumps(body).encode()))


def test_a_full_queue_is_pressure_and_a_late_503_is_about_the_request():
    """SGLang refuses at the door at once; after half a minute it had taken the request in and gave it up."""
    body = {"object": "error", "message": "whatever", "type": "503", "param": None, "code": 503}
    at_once, late = RequestFacts(1, 1, elapsed_seconds=0.1), RequestFacts(1, 1, elapsed_seconds=DOOR_SECONDS)
    assert kind_of(503, body, at_once) is FaultKind.QUEUE_FULL
    assert kind_of(503, body, late) is FaultKind.GIVEN_UP
    assert VERDICTS[FaultKind.QUEUE_FULL].pressure
    assert VERDICTS[FaultKind.GIVEN_UP].chargeable


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, b"", FaultKind.UNAVAILABLE),
        (503, {"error": {"message": "x", "type": "service_unavailable", "code": "no_available_workers"}}, FaultKind.UNAVAILABLE),  # noqa: E501
        (429, {"error": {"message": "x"}}, FaultKind.QUEUE_FULL),
        (408, b"", FaultKind.QUEUE_FULL),
        (500, b"Internal Server Error", FaultKind.SERVER_ERROR),
        (500, {"error": {"message": "x", "code": "call_upstream_request_error"}}, FaultKind.GATEWAY),
        (500, {"object": "error", "message": "Out of memory …", "code": 500}, FaultKind.OUT_OF_MEMORY),
        (502, b"<html>", FaultKind.GATEWAY),
        (504, b"", FaultKind.GATEWAY),
        (413, b"<html>", FaultKind.TOO_LONG),
        (401, {"error": "Unauthorized"}, FaultKind.UNAUTHORIZED),
        (403, {"error": "Forbidden"}, FaultKind.UNAUTHORIZED),
        (404, {"detail": "Not Found"}, FaultKind.NOT_FOUND),
        (302, b"", FaultKind.NOT_FOUND),
        (422, b"", FaultKind.BAD_PARAMETERS),
        (599, b"", FaultKind.SERVER_ERROR),
        (204, b"", FaultKind.BAD_BODY),
    ],
)  # fmt: skip
def test_every_other_status_has_its_kind(status, body, kind):
    """By status and JSON field alone."""
    assert kind_of(status, body) is kind


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("99999999", 3600.0), ("-1", None), ("1.5", None), ("Wed, 21 Oct", None), ("²", None)],
)
def test_retry_after_is_honoured_where_it_says_seconds(value, seconds):
    """A number of seconds is taken, up to an hour; anything else is left alone."""
    assert fault_from_response(429, httpx.Headers({"retry-after": value.encode()}), b"").retry_after_seconds == seconds


def test_an_abort_with_a_status_is_that_status():
    """finish_reason abort with 503 is the full queue, without a status it is somebody's abort."""
    facts = RequestFacts(1, 1)
    assert fault_of_abort({"type": "abort", "status_code": 503}, facts).kind is FaultKind.QUEUE_FULL
    assert fault_of_abort({"type": "abort", "status_code": 500}, facts).kind is FaultKind.OUT_OF_MEMORY
    assert fault_of_abort({"type": "abort", "status_code": None}, facts).kind is FaultKind.ABORTED
    assert fault_of_abort({"type": "abort", "status_code": True}, facts).kind is FaultKind.ABORTED


def test_a_fault_says_where_it_happened_once_and_survives_pickling():
    """The first to know the URL is right; a copy in another process is the same fault."""
    fault = Fault(FaultKind.TIMEOUT, "no answer", 3.0).at("http://a:1").at("http://b:2")
    assert fault.detail == "no answer, at http://a:1"
    copy = pickle.loads(pickle.dumps(fault))
    assert (copy.kind, copy.detail, copy.retry_after_seconds, copy.url) == (fault.kind, fault.detail, 3.0, "http://a:1")

"""The client against small real servers: what it sends, what it learns, how it leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import SecretStr

from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind, Owner
from app.sglang.sampling import sampling_body
from app.sglang.wire import EndpointInfo, Readiness

SAMPLING = sampling_body({"max_new_tokens": 8, "temperature": 0.5})
RECORDED = {
    path.stem.removeprefix("client_"): json.loads(path.read_text())["says"]
    for path in (Path(__file__).parents[1] / "data" / "sglang").glob("client_*.json")
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """A server with these handlers by path; 404 in SGLang's words elsewhere."""

    async def dispatch(request: web.Request) -> web.StreamResponse:
        handler = routes.get(request.path)
        return await handler(request) if handler else web.json_response({"detail": "Not Found"}, status=404)

    runner = web.ServerRunner(web.Server(dispatch, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


def says(body: object, status: int = 200, **headers: str) -> Handler:
    """Always the same answer."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body if isinstance(body, str) else json.dumps(body), status=status, headers=headers)

    return handler


def true_answer(sent: dict, output_ids: list[int] | None = None) -> dict:
    """What a good server answers to a request."""
    ids = output_ids or list(range(100, 100 + sent["sampling_params"]["max_new_tokens"]))
    meta = {"id": sent["rid"], "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": len(sent["input_ids"]), "completion_tokens": len(ids)}  # fmt: skip
    return {"text": "t", "output_ids": ids, "meta_info": meta}


async def good(request: web.Request) -> web.Response:
    """A good server's /generate."""
    return web.json_response(true_answer(await request.json()))


def run(routes: dict[str, Handler], use: Callable[[SGLangClient, str], Awaitable[object]], **kwargs: object) -> object:
    """Serve, use a client on it, give back what came of it."""

    async def main() -> object:
        async with serving(routes) as url, SGLangClient(**kwargs) as client:
            return await use(client, url)

    return asyncio.run(main())


def fault_of(routes: dict[str, Handler], use: Callable[[SGLangClient, str], Awaitable[object]]) -> Fault:
    """The fault that comes of it."""
    with pytest.raises(Fault) as caught:
        run(routes, use)
    return caught.value


def generate(client: SGLangClient, url: str, ids: tuple[int, ...] = (1, 2, 3), **kwargs: object) -> Awaitable[object]:
    """One generation as a worker asks for it."""
    return client.generate(url, ids, SAMPLING, **({"rid": new_rid(), "deadline_seconds": 20.0} | kwargs))


def test_what_is_sent_is_what_was_meant():
    """Ids, every sampling parameter, our rid, no streaming; and the ids come back as they were returned."""
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.headers, await request.json()))
        return web.json_response(true_answer(seen[-1][1]))

    made = run({"/generate": record}, lambda client, url: generate(client, url, rid="r1"))
    headers, body = seen[0]
    assert body == {"input_ids": [1, 2, 3], "sampling_params": SAMPLING, "rid": "r1", "stream": False}
    assert headers["Content-Type"] == "application/json"
    assert "Accept-Encoding" not in headers
    assert "Authorization" not in headers
    assert made.output_ids == list(range(100, 108))


def test_rids_are_fresh_and_none_is_the_beginning_of_another():
    """SGLang aborts by prefix."""
    rids = {new_rid() for _ in range(1000)}
    assert len(rids) == 1000
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize("ids", [(), (1, 2, 1000), (-1,), (1.0,), (True,), (2**65,)])
def test_a_prompt_that_could_kill_a_server_is_not_sent(ids):
    """An empty prompt or one id outside the vocabulary is the row's fault, before anything leaves."""
    arrived = []

    async def record(request: web.Request) -> web.Response:
        arrived.append(request)
        return web.Response()

    fault = fault_of({"/generate": record}, lambda client, url: generate(client, url, ids, vocab_size=1000))
    assert (fault.kind, fault.owner, arrived) == (FaultKind.BAD_IDS, Owner.ROW, [])


@pytest.mark.parametrize("allowance", [0, -1, 1.5, True, None, "8", 2**31, 2**65])
def test_an_allowance_that_is_no_count_is_not_sent(allowance):
    """A float killed servers up to 0.5.17; more than 64 bits no JSON of ours can hold."""
    sampling = SAMPLING | {"max_new_tokens": allowance}

    async def ask(client: SGLangClient, url: str) -> object:
        return await client.generate(url, [5], sampling, rid=new_rid(), deadline_seconds=5)

    fault = fault_of({"/generate": says("reached", 500)}, ask)
    assert fault.kind is FaultKind.BAD_PARAMETERS
    assert "whole number" in fault.detail


@pytest.mark.parametrize("allowance", [0, 1.5, "8", None])
def test_an_allowance_that_could_kill_a_server_is_not_sent(allowance):
    """Old servers die of max_new_tokens 1.5."""
    sampling = SAMPLING | {"max_new_tokens": allowance}
    fault = fault_of({}, lambda c, url: c.generate(url, [1], sampling, rid=new_rid(), deadline_seconds=9.0))
    assert fault.kind is FaultKind.BAD_PARAMETERS


def test_limits_of_the_endpoint_tell_a_long_prompt_from_a_bad_parameter():
    """The same 400: with a known context it is the row's, without it is ours, after a canary the row's again."""
    refuse = {"/generate": says({"error": {"message": "x"}}, 400)}
    small = EndpointInfo(url="", context_length=10)
    assert fault_of(refuse, lambda c, u: generate(c, u, limits=small)).kind is FaultKind.TOO_LONG
    assert fault_of(refuse, generate).kind is FaultKind.BAD_PARAMETERS
    assert fault_of(refuse, lambda c, u: generate(c, u, parameters_proven=True)).kind is FaultKind.REFUSED


def test_a_full_queue_says_when_to_come_back():
    """503 with Retry-After: pressure, not death."""
    full = {"object": "error", "message": "The request queue is full.", "code": 503}
    fault = fault_of({"/generate": says(full, 503, **{"Retry-After": "7"})}, generate)
    assert (fault.kind, fault.pressure, fault.retry_after_seconds) == (FaultKind.QUEUE_FULL, True, 7.0)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_giving_up_tells_the_server_with_the_same_rid(how):
    """Cancelled or out of time: /abort_request arrives with the rid of the request, with the key, and then we leave."""

    async def main() -> None:
        arrived, aborted = asyncio.Event(), []

        async def hang(request: web.Request) -> web.Response:
            await request.read()
            arrived.set()
            await asyncio.Event().wait()

        async def abort(request: web.Request) -> web.Response:
            aborted.append((await request.json(), request.headers["Authorization"]))
            return web.Response()

        async with (
            serving({"/generate": hang, "/abort_request": abort}) as url,
            SGLangClient(SecretStr("k")) as client,
        ):
            deadline = 0.2 if how == "deadline" else None
            task = asyncio.ensure_future(generate(client, url, rid="r7", deadline_seconds=deadline))
            await arrived.wait()
            if how == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(Fault) as caught:
                    await task
                assert caught.value.kind is FaultKind.TIMEOUT
            assert aborted == [({"rid": "r7"}, "Bearer k")]

    asyncio.run(main())


def test_a_second_cancellation_ends_the_wait_but_not_the_abort():
    """Impatience of the caller leaves no orphan at the server: closing the client waits for the abort."""

    async def main() -> None:
        arrived, aborting, let_go, aborted = asyncio.Event(), asyncio.Event(), asyncio.Event(), []

        async def hang(request: web.Request) -> web.Response:
            arrived.set()
            await asyncio.Event().wait()

        async def abort(request: web.Request) -> web.Response:
            aborting.set()
            await let_go.wait()  # cancelled if the client hangs up
            aborted.append(await request.json())
            return web.Response()

        routes = {"/generate": hang, "/abort_request": abort, "/ready": says("")}
        async with serving(routes) as url, SGLangClient() as bystander:
            client = SGLangClient()
            task = asyncio.ensure_future(generate(client, url, rid="r8"))
            await arrived.wait()
            task.cancel()
            await aborting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            closing = asyncio.ensure_future(client.aclose())
            for _ in range(3):  # round trips, in which a hang-up would have arrived
                await bystander.is_ready(url)
            let_go.set()
            await closing
            assert aborted == [{"rid": "r8"}]

    asyncio.run(main())


def test_an_abort_that_nobody_takes_is_logged_and_raises_nothing(caplog):
    """The failure is said, with no key in it."""
    broken = {"/abort_request": says("", 500)}
    told = run(broken, lambda client, url: client.abort(url, "r9"), api_key=SecretStr("hunter2"))
    assert told is False
    assert "abort_failed r9" in caplog.text
    assert "hunter2" not in caplog.text


def test_that_a_router_has_no_abort_is_said_once_and_is_no_failure(caplog):
    """A run with many give-ups behind it fills no log."""
    caplog.set_level("INFO")

    async def many(client: SGLangClient, url: str) -> list[bool]:
        return [await client.abort(url, f"r{number}") for number in range(3)]

    assert run({}, many) == [False] * 3
    assert caplog.text.count("abort_unknown") == 1
    assert "abort_failed" not in caplog.text


def test_an_api_key_is_sent_where_it_belongs_and_shown_nowhere(caplog):
    """One key per URL; never in repr, log or fault."""
    seen = []

    async def guarded(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def main() -> Fault:
        async with serving({"/generate": guarded}) as one, serving({"/generate": guarded}) as two:
            async with SGLangClient({one: SecretStr("hunter2")}) as client:
                assert "hunter2" not in repr(client)
                for url in (one, two):
                    with pytest.raises(Fault) as caught:
                        await generate(client, url)
                return caught.value

    caplog.set_level(logging.DEBUG)
    fault = asyncio.run(main())
    assert seen == ["Bearer hunter2", None]
    assert (fault.kind, fault.owner, fault.fatal_for_run) == (FaultKind.UNAUTHORIZED, Owner.OURS, True)
    assert "hunter2" not in f"{fault!r}{fault}{caplog.text}"


def test_requests_are_not_logged_one_by_one(caplog):
    """httpx tells of each request at INFO; a run has millions."""
    caplog.set_level(logging.INFO)
    run({"/generate": good}, generate)
    assert "HTTP Request" not in caplog.text


def test_cookies_are_not_kept():
    """A load balancer's cookie would pin every request to one server."""
    seen = []

    async def sticky(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Cookie"))
        response = web.json_response(true_answer(await request.json()))
        response.set_cookie("server", "1")
        return response

    async def twice(client: SGLangClient, url: str) -> None:
        await generate(client, url)
        await generate(client, url)

    run({"/generate": sticky}, twice)
    assert seen == [None, None]


@pytest.mark.parametrize("version", sorted(RECORDED))
@pytest.mark.parametrize("era", ["new", "old"])
def test_info_is_read_from_the_paths_that_a_version_has(version, era):
    """/model_info or /get_model_info, /server_info or /get_server_info: the same view."""
    prefix = "/" if era == "new" else "/get_"
    said = RECORDED[version]
    routes = {f"{prefix}{name}": says(said[name]["body"]) for name in ("model_info", "server_info")}
    info = run(routes | {"/v1/models": says(said["v1_models"]["body"])}, lambda client, url: client.info(url))
    assert (info.version, info.context_length) == (version, said["v1_models"]["body"]["data"][0]["max_model_len"])


@pytest.mark.parametrize("status", [400, 404, 501])
def test_an_endpoint_that_tells_nothing_has_an_info_of_nones(status):
    """A bare router: no fault, only nothing known."""
    paths = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models")
    info = run({path: says({"error": "x"}, status) for path in paths}, lambda client, url: client.info(url))
    assert {name for name in EndpointInfo.__slots__ if getattr(info, name) is not None} == {"url"}


@pytest.mark.parametrize(("status", "kind"), [(500, FaultKind.SERVER_ERROR), (503, FaultKind.UNAVAILABLE), (401, FaultKind.UNAUTHORIZED)])  # noqa: E501
def test_half_an_info_is_a_fault_not_another_server(status, kind):
    """If one body can't be had just now, there is no fingerprint rather than a wrong one."""
    routes = {"/model_info": says({"model_path": "m"}), "/server_info": says("", status)}
    assert fault_of(routes, lambda client, url: client.info(url)).kind is kind


def test_loads_come_from_whichever_path_there_is():
    """/v1/loads, else /get_load, else None."""
    busy = {version: said["busy"]["body"] for version, said in RECORDED.items() if "busy" in said}
    load = lambda client, url: client.loads(url)  # noqa: E731
    assert run({"/v1/loads": says(busy["0.5.23"])}, load).running == 16
    assert run({"/get_load": says(busy["0.5.6.post2"])}, load).running == 2
    assert run({}, load) is None


@pytest.mark.parametrize(
    ("routes", "was_ready", "expected"),
    [
        ({"/ready": says("")}, False, Readiness.READY),
        ({"/ready": says("", 503)}, False, Readiness.LOADING),
        ({"/ready": says("", 503)}, True, Readiness.DRAINING),
        ({"/ready": says("", 503), "/ping": says("", 503)}, True, Readiness.DRAINING),
        ({"/ready": says("", 503), "/ping": says("")}, True, Readiness.PAUSED),
        ({"/ready": says("", 503), "/ping": says("")}, False, Readiness.PAUSED),
        ({"/health": says("")}, False, Readiness.READY),
        ({"/health": says("", 503)}, False, Readiness.LOADING),
        ({"/health": says("", 503)}, True, Readiness.DRAINING),
        ({"/health": says("", 503), "/ping": says("")}, True, Readiness.DRAINING),  # before 0.5.23 it says 200 always
        ({"/ready": says("", 500)}, True, Readiness.UNKNOWN),
        ({}, True, Readiness.UNKNOWN),
    ],
)
def test_readiness_is_evidence_from_ready_or_health(routes, was_ready, expected):
    """503: it loads, or, once ready, leaves; with /ping well it is paused. Anything odd proves nothing."""
    assert run(routes, lambda client, url: client.is_ready(url, was_ready=was_ready)) is expected


def test_a_slow_503_of_health_proves_nothing(monkeypatch):
    """/health waits behind a long prefill and then says 503: the server is fine."""
    monkeypatch.setattr("app.sglang.client._AT_ONCE_SECONDS", 0.0)
    readiness = run({"/health": says("", 503)}, lambda client, url: client.is_ready(url, was_ready=True))
    assert readiness is Readiness.UNKNOWN


def test_nobody_there_is_away():
    """A refused connection."""

    async def main() -> Readiness:
        async with serving({}) as url:
            pass
        async with SGLangClient() as client:
            return await client.is_ready(url)

    assert asyncio.run(main()) is Readiness.AWAY


def test_a_good_server_passes_the_canary_with_the_runs_own_parameters():
    """One tiny real generation: the run's parameters, only shorter."""
    seen = []

    async def record(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(true_answer(seen[-1]))

    sampling = sampling_body({"max_new_tokens": 4096, "min_new_tokens": 100, "temperature": 0.25})
    run({"/generate": record}, lambda client, url: client.canary(url, sampling, vocab_size=1000))
    [sent] = seen
    assert sent["sampling_params"] == sampling | {"max_new_tokens": 4, "min_new_tokens": 4}


@pytest.mark.parametrize("lie", ["none", "prefixed", "null"])
def test_a_version_with_no_or_wrong_output_ids_is_refused_with_the_reason(lie):
    """Up to 0.4.10 there are none, 0.5.2 puts the prompt's tail before them."""

    async def old(request: web.Request) -> web.Response:
        sent = await request.json()
        body = true_answer(sent)
        if lie == "none":
            del body["output_ids"]
        else:
            body["output_ids"] = None if lie == "null" else sent["input_ids"][-5:] + body["output_ids"]
        return web.json_response(body)

    fault = fault_of({"/generate": old}, lambda client, url: client.canary(url, SAMPLING))
    assert (fault.kind, fault.fatal_for_run) == (FaultKind.UNUSABLE_VERSION, True)
    assert "output_ids" in fault.detail
    assert "0.5.6" in fault.detail


def test_parameters_that_make_an_old_server_fail_are_found_out():
    """Before 0.5.23 a parameter it doesn't know is a bare 500: if it serves without, the parameters are the reason."""

    async def old(request: web.Request) -> web.Response:
        sent = await request.json()
        if "sampling_seed" in sent["sampling_params"]:
            return web.Response(text="Internal Server Error", status=500)
        return web.json_response(true_answer(sent))

    sampling = SAMPLING | {"sampling_seed": 7}
    fault = fault_of({"/generate": old}, lambda client, url: client.canary(url, sampling))
    assert (fault.kind, fault.fatal_for_run) == (FaultKind.BAD_PARAMETERS, True)
    broken = {"/generate": says("Internal Server Error", 500)}
    fault = fault_of(broken, lambda client, url: client.canary(url, sampling))
    assert (fault.kind, fault.fatal_for_run) == (FaultKind.SERVER_ERROR, False)


def test_one_bare_500_is_not_taken_for_refused_parameters():
    """A server that stumbles over the canary, serves plainly, and takes the same parameters a moment later is fine."""
    stumbles = iter([True, False, False])

    async def stumbling(request: web.Request) -> web.Response:
        if next(stumbles):
            return web.Response(text="Internal Server Error", status=500)
        return web.json_response(true_answer(await request.json()))

    assert run({"/generate": stumbling}, lambda client, url: client.canary(url, SAMPLING)) is None
    assert list(stumbles) == []


def test_the_servers_template_tokenizes_or_it_does_not():
    """/v1/tokenize since 0.5.14; before it, None."""
    seen = []

    async def tokenizer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"tokens": [5, 6], "count": 2, "max_model_len": 9})

    messages = [{"role": "user", "content": "hi"}]
    ask = lambda client, url: client.tokenize(url, messages, [{"x": 1}], {"thinking": True})  # noqa: E731
    assert run({"/v1/tokenize": tokenizer}, ask) == [5, 6]
    assert seen == [{"messages": messages, "tools": [{"x": 1}], "chat_template_kwargs": {"thinking": True}}]
    for answer in (says({"detail": "Not Found"}, 404), says({"error": "x"}, 400), says({"tokens": "x"}), says([])):
        assert run({"/v1/tokenize": answer}, ask) is None

"""The HTTP interface of the simulated server: routes, keys, and what each path answers.

Invariant: nothing is answered while the service is frozen, whatever the path.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from app.sglang.simulator import bodies
from app.sglang.simulator.answers import SPOILERS, answer
from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.engine import Request
from app.sglang.simulator.faults import LOADS_LIES
from app.sglang.simulator.replies import (
    HEADERS,
    cut,
    json_bytes,
    json_reply,
    open_stream,
    refused_stream,
    reset,
    send_event,
    silence,
)
from app.sglang.simulator.requests import Ask, Asked, Refused, fit, read_generate, read_json
from app.sglang.simulator.service import Service

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_REFUSALS = {
    "queue_full": (503, bodies.QUEUE_FULL),
    "loading": (503, bodies.STARTING),
    "unauthorized": (401, {"error": "Unauthorized"}),
}
_INSTEAD = ("hang", "reset", "internal_error", "not_json", *_REFUSALS)  # faults that need no answer to spoil


class Api:
    """All handlers of one server, over its service."""

    def __init__(self, service: Service) -> None:
        self.service, self.config = service, service.config
        self._created = int(time.time())
        routes = self._all_routes()
        self._routes = {**routes, **self._through_router()} if self.config.behind_router else routes

    def _all_routes(self) -> dict[str, dict[str, Handler]]:
        def service() -> tuple[SimulatorConfig, str, str]:
            return self.config, self.service.model.name, self.service.model.weight_version

        def server_info() -> Any:
            status = "starting" if self.service.loading else "ready"
            return bodies.server_info(*service(), self.service.engine_now, status)

        generate, tokenize = {"POST": self._generate, "PUT": self._generate}, {"POST": self._tokenize}
        model_info, health = _get(lambda: bodies.model_info(*service())), {"GET": self._health}
        return {
            "/": _get(lambda: "SGLang is running"),
            "/generate": generate,
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/tokenize": tokenize, "/tokenize": tokenize, "/detokenize": {"POST": self._detokenize},
            "/abort_request": {"POST": self._abort_request},
            "/pause_generation": {"POST": self._pause}, "/continue_generation": {"POST": self._continue},
            "/update_weight_version": {"POST": self._rename_weights},
            "/health": health, "/health_generate": health, "/ready": {"GET": self._ready}, "/ping": {"GET": self._ping},
            "/model_info": model_info, "/get_model_info": model_info,
            "/server_info": _get(server_info), "/get_server_info": _get(server_info),
            "/v1/loads": _get(self._loads),
            "/v1/models": _get(lambda: bodies.models(self.config, self.service.model.name, self._created)),
            "/metrics": {"GET": self._metrics},
            "/_sim/stats": {"GET": self._stats},
            "/_sim/faults": {"GET": self._faults, "POST": self._faults},
        }  # fmt: skip

    def _through_router(self) -> dict[str, dict[str, Handler]]:
        """Recorded from sglang-router 0.3.2 (tests/data/sglang/router_0.3.2.json)."""

        async def no_messages(_: web.BaseRequest) -> web.Response:
            return web.Response(status=422, text="Failed to deserialize the JSON body into the target type")

        card = {"id": self.service.model.name, "object": "model", "owned_by": "local"}
        return {
            "/model_info": {}, "/server_info": {}, "/v1/loads": {}, "/ready": {}, "/ping": {}, "/metrics": {},
            "/abort_request": {},
            "/get_server_info": _get(lambda: {"router_manager": True, "routers_count": 1, "workers_count": 1}),
            "/v1/models": _get(lambda: {"object": "list", "data": [card]}), "/v1/tokenize": {"POST": no_messages},
            "/detokenize": {},
        }  # fmt: skip

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.service.frozen:
            return await silence()
        path = request.path
        if not self._allowed(path, request.headers.get("Authorization", "")):
            return json_reply({"error": "Unauthorized"}, 401)
        methods = self._routes.get(path)
        if not methods:
            return json_reply({"detail": "Not Found"}, 404)
        handler = methods.get(request.method)
        if handler is None:
            return json_reply({"detail": "Method Not Allowed"}, 405)
        try:
            return await handler(request)
        except Refused as refused:
            self.service.counts["refused_400"] += refused.status == 400
            return json_reply(refused.body, refused.status)

    def _allowed(self, path: str, authorization: str) -> bool:
        if not self.config.api_key or path.startswith(("/health", "/ready", "/metrics", "/_sim/")):
            return True
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and key == self.config.api_key

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        if self.service.loading:
            return json_reply(bodies.STARTING, 503)
        try:
            asked = read_generate(body, self.config, self.service.model.encode)
            self._check_rids(asked.asks)
        except Refused as refused:
            if body.get("stream") is True and refused.status == 400 and isinstance(refused.body.get("error"), dict):
                return await refused_stream(request, refused.body["error"]["message"])
            raise
        self._check_limits(asked.asks)
        fault = self.service.draw_fault()
        return await self._spoilt(request, asked, fault) if fault else await self._answered(request, asked, "")

    async def _spoilt(self, request: web.BaseRequest, asked: Asked, fault: str) -> web.StreamResponse:
        match fault:
            case "hang":
                return await silence()
            case "reset":
                reset(request)
                return await silence()
            case "internal_error":
                return web.Response(text="Internal Server Error", status=500, headers=HEADERS)
            case "not_json":
                return web.Response(text="<html>It works!</html>", content_type="text/html", headers=HEADERS)
            case "truncated_prompt":
                for ask in asked.asks:
                    ask.ids = ask.ids[: max(1, len(ask.ids) // 2)]
        if fault in _REFUSALS:
            status, body = _REFUSALS[fault]
            return json_reply(body, status)
        return await self._answered(request, asked, fault)

    def _loads(self) -> dict[str, Any]:
        body = bodies.loads(self.config, self.service.engine_now, self._told_at())
        if self.service.faults.loads != "honest":
            used, pool = LOADS_LIES[self.service.faults.loads]
            capacity = self.config.max_total_num_tokens
            body["loads"][0] |= {"num_used_tokens": used * capacity, "max_total_num_tokens": pool * capacity}
        return body

    def _check_limits(self, asks: list[Ask]) -> None:
        """What a gateway before the server, or a row, makes it refuse."""
        faults = self.service.faults
        if 0 < faults.refuse_above_requests < len(self.service.requests) + len(asks):
            self.service.counts["queue_full"] += 1
            raise Refused(503, bodies.QUEUE_FULL)
        for ask in asks:
            blames_row = faults.refuse_on_token >= 0 and faults.refuse_on_token in ask.ids
            if blames_row or 0 <= faults.refuse_above_new_tokens < ask.max_new_tokens:
                raise Refused(400, bodies.value_error("The request is not acceptable."))

    def _check_rids(self, asks: list[Ask]) -> None:
        for ask in asks:
            if ask.rid in self.service.requests:
                raise Refused(400, bodies.value_error(f"Duplicate request ID detected: {ask.rid}"))

    async def _answered(self, request: web.BaseRequest, asked: Asked, fault: str) -> web.StreamResponse:
        await self.service.running.wait()
        requests = [self.service.submit(ask) for ask in asked.asks]
        if asked.stream:
            return await self._stream(request, requests[0])
        found = [self._spoil(one, fault) for one in await self._finished(requests)]
        body = orjson.dumps(found if asked.batch else found[0])
        return await cut(request, body) if fault == "cut_body" else json_bytes(body)

    async def _finished(self, requests: list[Request]) -> list[Request]:
        """Waits for all. A refused one refuses and ends the whole batch; a client that leaves ends them later."""
        try:
            for one in requests:
                await one.payload.future
                if one.outcome == "queue_full":
                    self._give_up(requests)
                    raise Refused(503, bodies.QUEUE_FULL)
        except asyncio.CancelledError:
            for one in requests:
                self.service.abandon(one)
            raise
        return requests

    def _give_up(self, requests: list[Request]) -> None:
        for one in requests:
            if not one.payload.future.done():
                self.service.abort(one.rid)

    def _spoil(self, request: Request, fault: str) -> Any:
        body = answer(self.service, request)
        spoiler = SPOILERS.get(fault)
        return spoiler(body, request.payload, self.config.vocab_size) if spoiler else body

    async def _stream(self, request: web.BaseRequest, one: Request) -> web.StreamResponse:
        """Server-sent events, each with all ids so far."""
        stream = await open_stream(request)
        try:
            while not one.payload.future.done():
                await asyncio.wait([one.payload.future], timeout=self.config.stream_seconds)
                if not one.payload.future.done() and self.service.engine.made(one):
                    await send_event(stream, answer(self.service, one))
        except (asyncio.CancelledError, ConnectionResetError):
            self.service.abandon(one)
            raise
        await send_event(stream, answer(self.service, one))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """OpenAI's form, not streamed."""
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        ids = body.get("input_ids") or self.service.model.chat_ids(body)
        ids, allowed = fit(ids, body.get("max_completion_tokens") or body.get("max_tokens"), self.config)
        count = max(1, body.get("n") or 1)
        asked = read_generate({"input_ids": [ids] * count, "sampling_params": {"max_new_tokens": allowed}},
                              self.config, None)  # fmt: skip
        fault = self.service.draw_fault()
        if fault in _INSTEAD:
            return await self._spoilt(request, asked, fault)
        finished = await self._finished([self.service.submit(ask) for ask in asked.asks])
        pairs = [(answer(self.service, one), one.payload.ask.ids) for one in finished]
        return json_reply(bodies.chat_completion(
            pairs, body.get("model") or self.service.model.name, int(time.time()), bool(body.get("return_token_ids"))
        ))  # fmt: skip

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        if ("messages" in body) == ("prompt" in body):
            raise Refused(400, bodies.schema_error("Exactly one of 'prompt' or 'messages' must be provided."))
        model = self.service.model
        ids = model.chat_ids(body) if "messages" in body else model.encode(str(body["prompt"]))
        if self.service.faults.tokenize == "other":
            ids = [*ids[:-1], self.config.eos_id, *ids[-1:]]
        return json_reply({"tokens": ids, "count": len(ids), "max_model_len": self.service.model.tokenizer_length})

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        return json_reply({"text": self.service.model.text(body["tokens"], False)})

    async def _abort_request(self, request: web.BaseRequest) -> web.Response:
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        self.service.counts["abort_requests"] += 1
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            self.service.abort("")
        elif rid in self.service.requests:  # a known rid; then every rid that begins with it
            self.service.abort(rid)
        return web.Response(headers=HEADERS)

    async def _pause(self, request: web.BaseRequest) -> web.Response:
        """Simplified: what `retract` pushes back into the queue keeps its place here."""
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        self.service.pause(abort=body.get("mode", "abort") == "abort")
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.BaseRequest) -> web.Response:
        self.service.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _rename_weights(self, request: web.BaseRequest) -> web.Response:
        body = read_json(await request.content.read(), request.headers.get("Content-Type", ""))
        if body.get("abort_all_requests", True):
            self.service.abort("")
        name = self.service.model.weight_version = body["new_version"]
        return json_reply({"success": True, "message": f"Weight version updated to {name}", "new_version": name})

    async def _health(self, _: web.BaseRequest) -> web.Response:
        mode = self.service.faults.health
        if mode == "ok":
            return web.Response(headers=HEADERS)
        if mode == "bad" or self.service.draining or self.service.loading:
            return web.Response(status=503, headers=HEADERS)
        paused, slow = self.service.paused, self.service.faults.health_slow_seconds
        await asyncio.sleep(slow if mode == "slow" or paused else self.config.health_seconds)
        return web.Response(status=503 if paused else 200, headers=HEADERS)

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        bad = self._is_unwell() or (self.service.paused and self.service.faults.health != "ok")
        return web.Response(status=503 if bad else 200, headers=HEADERS)

    async def _ping(self, _: web.BaseRequest) -> web.Response:
        return web.Response(status=503 if self._is_unwell() else 200, headers=HEADERS)

    def _told_at(self) -> float:
        """Unix time of its figures; a paused scheduler writes none."""
        return self.service.wall(self.service.now())

    def _is_unwell(self) -> bool:
        """Whether it loads or leaves, or is made to say so."""
        mode = self.service.faults.health
        return mode != "ok" and (mode == "bad" or self.service.draining or self.service.loading)

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text=bodies.metrics(self.config, self.service.engine_now, self.service.model.name),
                            headers=HEADERS)  # fmt: skip

    async def _stats(self, request: web.BaseRequest) -> web.Response:
        return json_reply(self.service.stats(detail="detail" in request.query))

    async def _faults(self, request: web.BaseRequest) -> web.Response:
        if request.method == "POST":
            changes = read_json(await request.content.read(), "application/json")
            try:
                self.service.set_faults(changes)
            except ValueError as exc:
                raise Refused(400, bodies.value_error(str(exc))) from exc
        return json_reply(self.service.faults)


def _get(make: Callable[[], Any]) -> dict[str, Handler]:
    async def handler(_: web.BaseRequest) -> web.Response:
        return json_reply(make())

    return {"GET": handler}

"""A translator between a simulated SGLang server and peers that it would not suit: the same request and answer, with
the ids where vLLM has them (`prompt_token_ids` beside `choices`, `token_ids` in a choice), and `/chat/completions`
without `/v1` too. While the server is away it cuts each connection, so a peer meets an endpoint that is away. Part of
this benchmark alone.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web


@contextmanager
def vllm_dialect(server: str) -> Iterator[str]:
    """The URL of a translator before the server of that URL, in a thread of its own for the length of a `with`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dialect", daemon=True)
    thread.start()
    translator = _Translator(server)
    try:
        yield asyncio.run_coroutine_threadsafe(translator.start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(translator.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class _Translator:
    def __init__(self, server: str) -> None:
        self._server = server

    async def start(self) -> str:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        return site.name

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read() or None
        headers = {"Content-Type": "application/json"}
        try:
            path = f"/v1{request.path}" if request.path.startswith("/chat/") else request.path
            async with self._session.request(request.method, self._server + path, data=body, headers=headers) as answer:
                return web.json_response(translated(await answer.json()), status=answer.status)
        except aiohttp.ClientConnectionError:
            request.transport.abort()
            return await asyncio.get_running_loop().create_future()  # ends with the connection


def translated(answer: dict) -> dict:
    """An answer of SGLang's as vLLM would give it."""
    choices = answer.get("choices", ())
    for choice in choices:
        if "response_token_ids" in choice:
            answer["prompt_token_ids"] = choice.pop("prompt_token_ids")
            choice["token_ids"] = choice.pop("response_token_ids")
    return answer

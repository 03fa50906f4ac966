"""How bytes leave the simulated server, or don't: JSON, event streams, silence, resets, half a body."""

import asyncio
import socket
import struct
from typing import Any

import orjson
from aiohttp import web

from app.sglang.simulator import bodies

HEADERS = {"Server": "uvicorn", "Vary": "Origin"}


def json_reply(body: Any, status: int = 200) -> web.Response:
    return json_bytes(orjson.dumps(body), status)


def json_bytes(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=HEADERS)


async def silence() -> web.StreamResponse:
    """Never returns; ends with the connection."""
    return await asyncio.get_running_loop().create_future()


def reset(request: web.BaseRequest) -> None:
    """Closes the connection with a TCP reset."""
    if request.transport is not None:
        raw = request.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()


async def cut(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """Promises the whole body, sends half of it, closes."""
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return await silence()


async def open_stream(request: web.BaseRequest) -> web.StreamResponse:
    stream = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
    stream.enable_chunked_encoding()
    await stream.prepare(request)
    return stream


async def send_event(stream: web.StreamResponse, body: Any) -> None:
    await stream.write(b"data: " + orjson.dumps(body) + b"\n\n")


async def refused_stream(request: web.BaseRequest, message: str) -> web.StreamResponse:
    """A stream is answered 200 before it is looked at: the refusal is an event."""
    stream = await open_stream(request)
    await send_event(stream, bodies.stream_error(400, message))
    await stream.write(b"data: [DONE]\n\n")
    return stream

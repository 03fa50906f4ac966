"""The life of a simulated server process: it listens, drains, freezes, dies and comes back on the same port.

Invariant: while it is frozen no byte leaves any connection; while it is down the port refuses, and stays ours (bound,
not listening), so that the same URL answers again later.
"""

import asyncio
import socket

from aiohttp import web

from app.sglang.simulator.api import Api
from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.service import Service


class Simulator:
    """One simulated SGLang server. `start` and `stop` it in one event loop; `service` is what it simulates."""

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self.config = config or SimulatorConfig()
        self.service: Service
        self.url = ""
        self._listener: asyncio.Server | None = None
        self._port: socket.socket  # bound all the while; what listens is a copy of it
        self._dying: asyncio.Task[None] | None = None
        self._loading: asyncio.TimerHandle

    # life

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> str:
        """Listens; returns the base URL. port 0: any free one. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self.service = Service(self.config, self._die)
        self._web = web.Server(
            Api(self.service).handle, handler_cancellation=True, access_log=None,
            keepalive_timeout=self.config.keep_alive_seconds, loop=loop,
        )  # fmt: skip
        self._port = _bound(host, port)
        await self._come_up()
        self.url = f"http://{host}:{self._port.getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        """Closes everything at once."""
        if self._dying is not None:
            self._dying.cancel()
            await asyncio.gather(self._dying, return_exceptions=True)
        self._loading.cancel()
        await self.refuse()
        self.service.close()
        self._port.close()

    async def drain(self) -> None:
        """As after SIGTERM: unhealthy at once, still serving, over when nothing is in flight."""
        self.service.draining = True
        while in_flight := [request.payload.future for request in self.service.requests.values()]:
            await asyncio.wait(in_flight)
        await asyncio.sleep(0.05)  # the last answers leave

    async def refuse(self) -> None:
        """Closes all connections and refuses new ones; what runs goes on until it notices."""
        self._stop_listening()
        for _ in range(3):  # a connection taken just before is not known to anyone until the next turn of the loop
            self._close_connections()
            await asyncio.sleep(0)

    async def accept(self) -> None:
        """Listens again on the same port."""
        if self._listener is None:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._web, sock=self._port.dup(), backlog=4096)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._port.shutdown(socket.SHUT_RDWR)  # refuses from now on, and stays bound

    def _close_connections(self) -> None:
        for connection in self._web.connections:
            if connection.transport is not None:
                connection.transport.close()

    def _die(self) -> None:
        """A crash: nothing is answered from now on."""
        self._loading.cancel()
        self._dying = asyncio.get_running_loop().create_task(self._crash_and_return())

    async def _crash_and_return(self) -> None:
        faults = self.service.faults
        await asyncio.sleep(faults.freeze_seconds)
        await self.refuse()
        if faults.down_seconds < 0:
            return
        await asyncio.sleep(faults.down_seconds)
        self.service.restart()
        await self._come_up()

    async def _come_up(self) -> None:
        """Accepts at once, is ready when it has loaded."""
        seconds = self.service.faults.load_seconds
        self.service.loading = seconds > 0
        await self.accept()
        self._loading = asyncio.get_running_loop().call_later(seconds, setattr, self.service, "loading", False)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that keeps its port when it stops listening: Linux lets go of ports that it chose itself."""
    if port == 0:
        with _bound_once(host, 0) as chosen:
            return _bound_once(host, chosen.getsockname()[1])
    return _bound_once(host, port)


def _bound_once(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound

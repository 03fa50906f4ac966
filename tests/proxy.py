"""A TCP proxy between our processes and a server, by which tests cut, freeze, delay and refuse what passes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_BLOCK_BYTES = 1 << 16


class Proxy:
    """Listens on a port of this host and passes everything on. Safe to steer from any thread."""

    def __init__(self, upstream: str):
        """upstream: `http://host:port`, `redis://host:port` or `unix:///path`."""
        self._upstream = urlsplit(upstream)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing, self._delay_seconds = False, 0.0
        self._transports: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.accepted = 0  #: connections so far
        self.port = 0

    @property
    def url(self) -> str:
        """Its own address, with the upstream's scheme (`redis` for a socket) and path."""
        if self._upstream.scheme == "unix":
            return f"redis://127.0.0.1:{self.port}/0"
        return f"{self._upstream.scheme}://127.0.0.1:{self.port}{self._upstream.path}"

    def cut(self) -> None:
        """Close every connection at once, with a reset; new ones are welcome."""
        self._call(self._cut)

    def freeze(self) -> None:
        """Pass nothing more, and close nothing, until `thaw`."""
        self._call(self._flowing.clear)

    def thaw(self) -> None:
        """Pass on what was held up."""
        self._call(self._flowing.set)

    def delay(self, seconds: float) -> None:
        """Hold up every block of bytes for so long, from now on."""
        self._delay_seconds = seconds

    def refuse(self) -> None:
        """Cut everything and accept no connection until `accept`."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Accept connections again."""
        self._refusing = False

    def _call(self, action) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        done.wait(10)

    def _cut(self) -> None:
        for writer in self._transports:
            writer.transport.abort()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more; whoever is connected is cut off."""
        self._server.close()
        self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._transports.add(writer)
        try:
            if self._refusing:
                return
            far_reader, far_writer = await self._connect()
            self._transports.add(far_writer)
            try:
                await self._both(self._pass(reader, far_writer), self._pass(far_reader, writer))
            finally:
                self._transports.discard(far_writer)
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):  # cancelled by `close` alone; asyncio's streams would report it
            pass
        finally:
            self._transports.discard(writer)
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.scheme == "unix":
            return await asyncio.open_unix_connection(self._upstream.path)
        return await asyncio.open_connection(self._upstream.hostname, self._upstream.port)

    async def _both(self, *directions) -> None:
        """Until one of them ends: a connection closed on one side is closed on the other."""
        tasks = [asyncio.ensure_future(direction) for direction in directions]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BLOCK_BYTES):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()

    def run(self, ready: threading.Event) -> None:
        """The proxy's thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.start())
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self.close())
        self._loop.close()

    def stop(self) -> None:
        """End the thread's loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)


def proxy(upstream: str):
    """A running proxy to `upstream`, for the length of a `with`."""
    return running(Proxy(upstream))


@contextmanager
def running(made: Proxy) -> Iterator[Proxy]:
    """Run a proxy in a thread of its own."""
    ready = threading.Event()
    thread = threading.Thread(target=made.run, args=(ready,), name="proxy", daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield made
    finally:
        made.stop()
        thread.join(10)


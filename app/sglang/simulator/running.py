"""Three ways to have a simulated server: in this event loop (`Simulator`), in a thread of its own for tests
(`running_simulator`), or as the only thing this process does (`serve`).
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.faults import Faults
from app.sglang.simulator.server import Simulator


class RunningSimulator:
    """A server in a thread. Its methods may be called from any other thread."""

    def __init__(self, simulator: Simulator, loop: asyncio.AbstractEventLoop) -> None:
        self._simulator, self._loop = simulator, loop
        self.url = simulator.url
        self.config = simulator.config

    def stats(self, detail: bool = True) -> dict[str, Any]:
        """Everything counted since the start; see `Service.stats`. Answers also while the server is frozen or down."""
        return self._call(lambda: self._simulator.service.stats(detail))

    def faults(self, **changes: Any) -> Faults:
        """Replaces some faults and returns all. Raises ValueError for unknown ones."""
        return self._call(lambda: self._simulator.service.set_faults(changes))

    def crash(self) -> None:
        """Crashes it now, by the faults' freeze, down and load times."""
        self._call(lambda: self._simulator.service.crash("on demand"))

    def refuse(self) -> None:
        """Closes all connections and refuses new ones until `accept`; the process lives and forgets nothing."""
        self._wait_for(self._simulator.refuse())

    def accept(self) -> None:
        """Listens again on the same port."""
        self._wait_for(self._simulator.accept())

    def drain(self, on: bool = True) -> None:
        """As after SIGTERM (health says 503, requests are served), without ever exiting; or the end of that."""
        self._call(lambda: setattr(self._simulator.service, "draining", on))

    def _call(self, what: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return what()

        return self._wait_for(call())

    def _wait_for(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=10)


@contextmanager
def running_simulator(config: SimulatorConfig | None = None, port: int = 0) -> Iterator[RunningSimulator]:
    """A server in a thread for the length of a `with`. Raises OSError if the port is taken."""
    loop = uvloop.new_event_loop()
    simulator = Simulator(config)
    thread = threading.Thread(target=loop.run_forever, name="simulated-sglang", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(simulator.start(port), loop).result(timeout=10)
        try:
            yield RunningSimulator(simulator, loop)
        finally:
            asyncio.run_coroutine_threadsafe(simulator.stop(), loop).result(timeout=10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


def serve(
    config: SimulatorConfig | None = None,
    port: int = 30000,
    host: str = "127.0.0.1",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGTERM (drains first) or SIGINT (at once). on_ready gets the URL. OSError: port taken."""
    uvloop.run(_serve(Simulator(config), port, host, on_ready))


async def _serve(simulator: Simulator, port: int, host: str, on_ready: Callable[[str], None] | None) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()

    async def drain() -> None:
        await simulator.drain()
        over.set()

    tasks = []
    loop.add_signal_handler(signal.SIGTERM, lambda: tasks.append(loop.create_task(drain())))
    loop.add_signal_handler(signal.SIGINT, over.set)
    url = await simulator.start(port, host)
    if on_ready is not None:
        on_ready(url)
    try:
        await over.wait()
    finally:
        await simulator.stop()

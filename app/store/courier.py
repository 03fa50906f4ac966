"""One courier per worker: whatever its thousand tasks want from Redis travels together.

Commands handed over while a pipeline is under way leave with the next one, so a row costs a fraction of a round trip.
Every command sent through it may be repeated: while Redis is away the courier keeps them and tries again.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from hiredis import pack_command
from redis.exceptions import NoScriptError, RedisError, ResponseError

from app.store.connection import AWAY, OutOfMemoryError, connect_async
from app.store.scripts import SHAS, SOURCES

log = logging.getLogger(__name__)
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_PER_PIPELINE = 500
_ANSWER_SECONDS = 30.0


class Courier:
    """Sends commands in pipelines; lives on one event loop."""

    def __init__(self, url: str):
        self._connection = connect_async(url)
        self._waiting: list[tuple[tuple, asyncio.Future]] = []
        self._travelling: asyncio.Task | None = None
        self._knows_scripts = False  #: whether this Redis has our scripts: not at first, nor after it was away
        self.away_since: float | None = None  #: loop time since which Redis does not answer

    async def command(self, *command: object) -> object:
        """Send one Redis command, wait for its reply. Raises RedisError for a command that Redis refuses."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((command, future))
        if self._travelling is None:
            self._travelling = loop.create_task(self._travel())
        return await future

    async def script(self, name: str, keys: Sequence[str], args: Sequence) -> object:
        """Run a Lua script by name. Scripts are loaded before the first command, so the order of commands holds."""
        command = ("EVALSHA", SHAS[name], len(keys), *keys, *args)
        try:
            return await self.command(*command)
        except NoScriptError:
            return await self.command("EVAL", SOURCES[name], *command[2:])

    async def close(self) -> None:
        """Close the connections; what still waits is cancelled."""
        if self._travelling is not None:
            self._travelling.cancel()
            await asyncio.gather(self._travelling, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        await self._connection.disconnect()

    async def _travel(self) -> None:
        await asyncio.sleep(0)  # whoever is ready in this turn of the loop comes along
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST_PER_PIPELINE], self._waiting[_MOST_PER_PIPELINE:]
            refused = await self._deliver(batch)
            self._waiting[:0] = refused
        self._travelling = None

    async def _deliver(self, batch: list[tuple[tuple, asyncio.Future]]) -> list[tuple[tuple, asyncio.Future]]:
        """Send a batch until Redis answers; returns the commands that a full Redis refused for now."""
        attempt = 0
        while True:
            batch = [(command, future) for command, future in batch if not future.done()]
            try:
                first = [] if self._knows_scripts else [("SCRIPT", "LOAD", text) for text in SOURCES.values()]
                replies = (await self._ask([*first, *(command for command, _ in batch)]))[len(first) :]
                self._knows_scripts = True
            except AWAY as exc:
                self._knows_scripts = False
                await self._pause(attempt, exc)
                attempt += 1
                continue
            full = [item for item, reply in zip(batch, replies, strict=True) if isinstance(reply, AWAY)]
            for (_, future), reply in zip(batch, replies, strict=True):
                if not future.done() and not isinstance(reply, AWAY):
                    _settle(future, reply)
            if full:
                await self._pause(attempt, OutOfMemoryError("maxmemory reached"))
            elif self.away_since is not None:
                log.warning("redis_back after %.1f s", asyncio.get_running_loop().time() - self.away_since)
                self.away_since = None
            return full

    async def _ask(self, commands: list[tuple]) -> list:
        """Replies as Redis gives them, a refusal as its RedisError. redis-py's pipeline costs five times as much."""
        connection, replies = self._connection, []
        async with asyncio.timeout(_ANSWER_SECONDS):
            await connection.send_packed_command(b"".join(map(pack_command, commands)), check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response(timeout=math.inf))
                except ResponseError as refusal:
                    replies.append(refusal)
        return replies

    async def _pause(self, attempt: int, exc: Exception) -> None:
        if self.away_since is None:
            self.away_since = asyncio.get_running_loop().time()
            log.warning("redis_away: %s; what is in hand is kept", exc)
        await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])


def _settle(future: asyncio.Future, reply: object) -> None:
    if isinstance(reply, RedisError):
        future.set_exception(reply)
    else:
        future.set_result(reply)

"""Rows that an endpoint refuses with a 400 although it took our parameters: is it the row, or all of them?

A canary is short. What an endpoint refuses only in real prompts (a gateway's limit on max_new_tokens, say) would reject
row after row; so a refusal counts as the row's own only where the endpoint has answered a row of the same run. Where it
refused three at least, answered none, and works on none either, the run is halted.
"""

import asyncio
from dataclasses import dataclass

from app.capacity.share import parse_share
from app.store.courier import Courier
from app.store.keys import EndpointKeys, RunKeys

#: A server refuses at its door: what is there for longer, and much longer than the last refusal took, was taken.
TAKEN_SECONDS, TAKEN_TIMES = 1.5, 3.0


@dataclass(frozen=True, slots=True)
class Refusals:
    """What an endpoint did with the rows of a run since the run was started."""

    rows: int  #: refused, each counted once a delivery
    taken: int  #: requests that it works on: there for longer than a refusal takes
    has_served: bool  #: it answered one


class RefusalBook:
    """Counts in Redis, over all workers; forgotten when the run is started again."""

    def __init__(self, courier: Courier):
        self._courier = courier
        self._served: set[tuple[str, str]] = set()

    async def served(self, run_id: str, endpoint: str) -> None:
        """An answer came; Redis is told of the first."""
        if (run_id, endpoint) not in self._served:
            self._served.add((run_id, endpoint))
            await self._courier.command("HSET", RunKeys(run_id).refusals, f"{endpoint} served", 1)

    async def refused(self, run_id: str, endpoint: str, seconds: float, *, again: bool) -> Refusals:
        """A refusal came after so many seconds; `again`: of a row that was counted. endpoint: app.urls.endpoint_key."""
        book, shares = RunKeys(run_id).refusals, EndpointKeys(endpoint).lease_info
        rows, told, there, clock = await asyncio.gather(
            self._courier.command("HINCRBY", book, f"{endpoint} refused", 0 if again else 1),
            self._courier.command("HEXISTS", book, f"{endpoint} served"),
            self._courier.command("HVALS", shares),
            self._courier.command("TIME"),
        )
        taken_before = 1000 * (int(clock[0]) - max(TAKEN_SECONDS, TAKEN_TIMES * seconds))
        taken = sum(parse_share(share).granted_ms < taken_before for share in there)
        return Refusals(int(rows), taken, bool(told) or (run_id, endpoint) in self._served)

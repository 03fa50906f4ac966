"""What this worker holds, asserted anew at every heartbeat: claims on keys and leases at endpoints.

Invariant: whatever is held here is known to Redis within one heartbeat, even to a Redis that lost everything.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from app.sglang.faults import Fault
from app.store.courier import Courier
from app.store.keys import EndpointKeys, RunKeys

Result = TypeVar("Result")

HEARTBEAT_SECONDS = 5.0
#: A dead worker's claims and leases end after this long: before its messages return.
HOLD_TTL_MS = 20_000


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one delivery to work on a key."""

    run_id: str
    dataset: str
    key: str
    holder: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A share of an endpoint."""

    id: str
    url: str
    endpoint: str  #: key of the endpoint in Redis
    share: str  #: app.capacity.share.Share as text


@dataclass(slots=True, eq=False)
class Work:
    """A claim being worked on: the asyncio task, its lease while a request is at an endpoint, and that request."""

    task: asyncio.Task
    id: str = ""  #: of the completion, once it is known
    lease: Lease | None = None
    rid: str = ""  #: of that request
    recalled: bool = False  #: we asked the endpoint to abort it
    sent_at: float = 0.0  #: time.monotonic() of the request
    given_up: Fault | None = None
    _request: asyncio.Future | None = None

    async def request(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for a request, which others may give up meanwhile. Raises what it raises, or the Fault they give."""
        self.given_up, self.sent_at = None, time.monotonic()
        self._request = asyncio.ensure_future(coroutine)
        try:
            return await self._request
        except asyncio.CancelledError:
            if self.given_up is None or self.task.cancelling():
                raise
            raise self.given_up from None
        finally:
            self._request = None

    def give_up(self, fault: Fault) -> None:
        """End the request, if one is out: it is aborted at the endpoint, and fails with this fault."""
        if self._request is not None and self.given_up is None:
            self.given_up = fault
            self._request.cancel()


class Holdings:
    """The claims this worker works on, and its leases."""

    def __init__(self, courier: Courier):
        self._courier = courier
        self.claims: dict[Claim, Work] = {}
        self.leases: dict[str, Lease] = {}

    def oldest(self, now: float) -> dict[str, dict[str, str | float]]:
        """Per run the request that is longest under way: {id, endpoint, since}. now: what time it is for the reader."""
        eldest: dict[str, Work] = {}
        for claim, work in self.claims.items():
            first = eldest.get(claim.run_id)
            if work.lease is not None and (first is None or work.sent_at < first.sent_at):
                eldest[claim.run_id] = work
        return {
            run: {"id": work.id, "endpoint": work.lease.url, "since": now - (time.monotonic() - work.sent_at)}
            for run, work in eldest.items()
        }  # fmt: skip

    async def renew(self) -> None:
        """Assert everything held; work whose claim went to somebody else is cancelled."""
        claims: dict[tuple[str, str], list[Claim]] = defaultdict(list)
        for claim in self.claims:
            claims[claim.run_id, claim.dataset].append(claim)
        leases: dict[str, list[Lease]] = defaultdict(list)
        for lease in self.leases.values():
            leases[lease.endpoint].append(lease)
        await asyncio.gather(
            *(self._renew_claims(RunKeys(run), dataset, held) for (run, dataset), held in claims.items()),
            *(self._renew_leases(EndpointKeys(endpoint), held) for endpoint, held in leases.items()),
        )

    async def _renew_claims(self, keys: RunKeys, dataset: str, held: list[Claim]) -> None:
        held = [claim for claim in held if claim in self.claims]  # some ended since; nothing may come between this
        pairs = [word for claim in held for word in (claim.key, claim.holder)]  # and the sending
        lost = await self._courier.script(
            "renew_claims", [keys.claims(dataset), keys.holders(dataset)], [HOLD_TTL_MS, *pairs]
        )
        lost_keys = {key.decode() for key in lost}
        for claim in held:
            if claim.key in lost_keys and claim in self.claims:
                self.claims[claim].task.cancel("the claim went to another worker")

    async def _renew_leases(self, keys: EndpointKeys, held: list[Lease]) -> None:
        pairs = [word for lease in held if lease.id in self.leases for word in (lease.id, lease.share)]
        await self._courier.script("renew_leases", [keys.leases, keys.lease_info], [HOLD_TTL_MS, *pairs])

    def release(self, lease: Lease) -> asyncio.Future | None:
        """Forget a lease here and in Redis; returns what to await to be sure that Redis knows."""
        if self.leases.pop(lease.id, None) is None:
            return None
        keys = EndpointKeys(lease.endpoint)
        return asyncio.ensure_future(
            self._courier.script("release_lease", [keys.leases, keys.lease_info], [lease.id])
        )

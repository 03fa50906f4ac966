"""Who was at an endpoint when it died, and what follows from it: less and less company, at last none.

One death means nothing: a hundred bystanders were there, too. From the second on a task is suspect: the company that it
is sent in is at most half of what it had at the last death, so that it is alone after a few. Two deaths of an endpoint
that it was alone at, as a suspect, and the row is given up; until then nothing is charged to it. A suspect that is
answered is none any more.

A row that kills every endpoint does so at most max(4, 3 + floor(log2 n)) times, where n requests were there at its
second death: from the third on at most n/2, n/4, …, 1 are there, and 1 once more.
"""

from dataclasses import dataclass

from app.store.courier import Courier
from app.store.keys import DEATHS, EndpointKeys

#: Deaths that make a task suspect.
SUSPECT_DEATHS = 2
#: Deaths of an endpoint that a suspect was alone at, after which it is given up.
ALONE_DEATHS = 2
#: A suspect waits so long for the endpoint that died last with it, so that it does not go from one to the next.
HOME_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is known of one task. companies: requests at the endpoint at each death that it was at, itself included."""

    companies: tuple[int, ...] = ()

    @property
    def company(self) -> int:
        """The most requests that may be at an endpoint with it, itself included; 0: any number."""
        if len(self.companies) < SUSPECT_DEATHS:
            return 0
        return max(1, min(self.companies[SUSPECT_DEATHS - 1 :]) // 2)

    @property
    def is_guilty(self) -> bool:
        """Endpoints died of it and of nothing else."""
        return self.companies[SUSPECT_DEATHS:].count(1) >= ALONE_DEATHS

    @property
    def evidence(self) -> str:
        """In words, for rejected.jsonl."""
        others = ", ".join(str(n - 1) for n in self.companies)
        return f"endpoints died {len(self.companies)} times while it was there, beside {others} other requests"


INNOCENT = Suspicion()


def parse_suspicion(text: bytes) -> Suspicion:
    """What Redis holds of a task."""
    return Suspicion(tuple(map(int, text.split(b",")))) if text else INNOCENT


def name_of(run_id: str, key: str) -> str:
    """Of a task among the deaths; a lease's id ends with it."""
    return f"{run_id}:{key}"


async def implicate(courier: Courier, endpoint: str, run_id: str, key: str) -> Suspicion:
    """If that endpoint's breaker is open for a death, count it for all that hold a lease there (once, over all
    workers). Returns what is known of this task then. endpoint: app.urls.endpoint_key."""
    names = EndpointKeys(endpoint)
    keys = [names.open, names.control, names.leases, DEATHS]
    return parse_suspicion(await courier.script("implicate", keys, [name_of(run_id, key)]))

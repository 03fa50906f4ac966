"""Which fault strikes when: a pure function of the seed, so that any seed can be played again.

Faults strike by progress, not by the clock: the k-th one when a share of the rows is on disk. A slow machine sees the
same faults at the same places.
"""

from dataclasses import dataclass
from random import Random

#: What can be done to whom. A stop lasts a while and ends by itself; a kill ends when something starts it again.
ACTIONS = (
    ("kill", "worker"), ("kill", "collector"), ("kill", "producer"), ("kill", "redis"), ("kill", "supervisor"),
    ("kill", "everything"), ("stop", "worker"), ("stop", "collector"), ("stop", "producer"), ("stop", "redis"),
    ("stop", "supervisor"), ("restart", "redis"), ("kick", "redis"), ("crash", "endpoint"), ("refuse", "endpoint"),
    ("cut", "endpoint"), ("freeze", "endpoint"), ("fill", "disk"),
)  # fmt: skip
_LASTING = {"stop", "refuse", "freeze", "fill", "crash"}
_FIRST, _LAST = 0.02, 0.9  # shares of the rows between which faults strike
_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it strikes when `share` of the rows is on disk. victim: which of several, seconds: how long."""

    share: float
    action: str
    target: str
    victim: int
    seconds: float

    @property
    def kind(self) -> str:
        """As it stands in the report."""
        return f"{self.action} {self.target}"


def plan(seed: int, faults: int) -> list[Fault]:
    """The faults of a seed, in order. All kinds come equally often, in random order."""
    random = Random(seed)
    actions: list[tuple[str, str]] = []
    while len(actions) < faults:
        actions += random.sample(ACTIONS, len(ACTIONS))
    shares = sorted(random.uniform(_FIRST, _LAST) for _ in range(faults))
    return [
        Fault(
            round(share, 4), action, target, random.randrange(2),
            round(random.uniform(_LEAST_SECONDS, _MOST_SECONDS), 2) if action in _LASTING else 0.0,
        )
        for share, (action, target) in zip(shares, actions, strict=False)
    ]  # fmt: skip

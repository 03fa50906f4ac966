"""What a lease says of itself in Redis, so that anybody can estimate what its request holds by now.

lease.lua reads and writes the same words: five, and a sixth for a suspect.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A request at an endpoint."""

    lane: str
    prompt_tokens: int
    allowance: int  #: max_new_tokens asked for
    granted_ms: int  #: Redis TIME
    kind: str  #: app.capacity.lengths.kind_of
    company: int = 0  #: of a suspect: most requests that may be there with it, itself included; 0: any number

    def __str__(self) -> str:
        words = f"{self.lane} {self.prompt_tokens} {self.allowance} {self.granted_ms} {self.kind}"
        return f"{words} {self.company}" if self.company else words

    def made(self, now_ms: int, tokens_per_ms: float) -> float:
        """Tokens it has made by now, about."""
        return max(0.0, min(self.allowance - 1, (now_ms - self.granted_ms) * tokens_per_ms))


def parse_share(text: bytes) -> Share:
    """What `str` wrote."""
    lane, prompt, allowance, granted, kind, *company = text.decode().split(" ")
    return Share(lane, int(prompt), int(allowance), int(granted), kind, *map(int, company))

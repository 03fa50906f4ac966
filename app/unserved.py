"""When nobody serves a run's model any more, and somebody serves another: the run ends with exit code 6. Pure."""

from collections.abc import Mapping

from app.errors import RecipeChanged
from app.store.breaker import Breaker, Why

#: If every endpoint serves something else for so long, that is final.
ALL_DIFFER_SECONDS = 10.0


class Unserved:
    """Since when; `away_seconds` counts where some do not answer: they may come back as what they were."""

    def __init__(self, away_seconds: float):
        self._away_seconds = away_seconds
        self._since: float | None = None

    def heed(self, breakers: Mapping[str, Breaker | None], now: float) -> None:
        """One look. breakers: by URL, None where closed. now: any clock. Raises RecipeChanged when the time is over."""
        held = {url: one for url, one in breakers.items() if one is not None and one.why is Why.DIFFERS}
        if not held or None in breakers.values():
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since > (ALL_DIFFER_SECONDS if len(held) == len(breakers) else self._away_seconds):
            said = "; ".join(f"{url}: {one.evidence}" for url, one in held.items())
            raise RecipeChanged(
                f"No endpoint serves the run's model any more: {said}. "
                "Start the same server again and repeat the command, or use another --out."
            )

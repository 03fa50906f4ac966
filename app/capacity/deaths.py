"""What a death teaches of an endpoint: pure functions of what it lived at, what it died at, and the time.

Nobody says why a server died. What can be known is whether the level at which it did, of requests or of KV tokens, was
new to it. A level is *held* as answers are made there: after three for each request in flight it is, and a death there
says nothing about it (a crash by count, a poisoned prompt, an operator). A death at a level not held since the endpoint
came up, or with the pool at its brim, is blamed on that level: the endpoint is kept below it for a minute, since one
death proves little, and let there slowly then; if it dies there again, it is kept below for half an hour, then for an
hour, two ... What is held in the end is blamed no more. A death far below a level at which it was seen alive is not
blamed either, unless that comes again and again.

Invariants: where a number of requests kills an endpoint, each death is blamed on a number of at least that, so it is
never let there again but for a trial, and trials after the first are half an hour and more apart. Where level and death
have nothing to do with each other, what keeps the endpoint below is over within two minutes of the last blamed death.
"""

import dataclasses
from dataclasses import dataclass

#: Share of a fatal level that is used afterwards; if it dies again meanwhile, this share of what it died at then.
DEATH_SHARE, DEATH_SHARE_AGAIN = 0.85, 0.5
#: How long: after the first death at about a level, and after the second; then twice as long each time. Afterwards it
#: grows to double in the first of them, and is void after two.
DOUBT_SECONDS, FEAR_SECONDS = 60.0, 1800.0
_FREE_DOUBLINGS = 2.0
#: Answers per request in flight after which two thirds of the way to that level count as held; the share of a level
#: that must be held, so that a death there says nothing: together about three answers for each.
_HELD_ANSWERS, _HELD_SHARE = 1.5, 0.87
#: While it is kept below a level, and dies all the same: what must be held of where it is, so that this is no cure.
_HELD_SHARE_SPARED = 0.5
#: Of the highest level at which it was seen alive, the share below which a death is none of overload; and how much of
#: that a death leaves.
_ATTRIBUTABLE, _DISTRUST = 0.7, 0.85
#: A death is noticed after the level has fallen: what was there fades by so much a look; the use of the pool slower.
_FADE, _FADE_BRIM, _BRIM = 0.9, 0.99, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Requests at an endpoint, or KV tokens: where it is, and what is known of it."""

    recent: float = 0.0  #: there now, or a moment ago
    held: float = 0.0  #: at which answers were made since the endpoint came up, for long
    top: float = 0.0  #: highest that it outlived since then
    seen: float = 0.0  #: highest at which it was ever seen alive
    fatal: float = 0.0  #: at which it died, not held since; 0: none

    def looked(self, there: float, weight: float, alive: bool = True) -> "Level":
        """After a look. weight: how much of the way to what is there counts as held now."""
        held = self.held + max(0.0, there - self.held) * weight
        return Level(
            recent=max(there, self.recent * _FADE), held=held, fatal=self.fatal if round(held) < self.fatal else 0.0,
            top=max(self.top, self.recent) if alive else self.top, seen=max(self.seen, there) if alive else self.seen,
        )  # fmt: skip

    def died(self, blamed: bool) -> "Level":
        """After a death."""
        return dataclasses.replace(self, fatal=self.recent if blamed else self.fatal, seen=self.seen * _DISTRUST)

    @property
    def is_fatal(self) -> bool:
        """Whether it is about where it died before."""
        return 0 < _ATTRIBUTABLE * self.fatal <= self.recent

    def is_new(self, held_share: float) -> bool:
        """Whether a death now is to be blamed on this level: it was higher than ever, or that share of it not held."""
        unproven = self.recent > self.top or self.held < held_share * self.recent
        return unproven and self.recent >= _ATTRIBUTABLE * self.seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What an endpoint's life and deaths have taught. Times are the caller's clock, in seconds."""

    requests: Level = Level()
    tokens: Level = Level()
    brim: float = 0.0  #: use of the pool, now or a moment ago; 1 while it was about to be full
    died_at: float = 0.0
    deaths: int = 0  #: at about the fatal level, whenever the endpoint was let there
    share: float = DEATH_SHARE  #: of the fatal levels that may be used until that is over
    full_at: float | None = None  #: when it died of a full pool; None: it never did

    @property
    def spared_until(self) -> float:
        """When the endpoint may be led to its fatal levels again."""
        seconds = FEAR_SECONDS * 2.0 ** min(10, self.deaths - 2) if self.deaths > 1 else DOUBT_SECONDS
        return self.died_at + seconds if self.deaths else self.died_at

    def fragility(self, now: float) -> float:
        """1 just after it died of a full pool, half of that every FEAR_SECONDS; 0 if it never did."""
        return 0.0 if self.full_at is None else 2.0 ** ((self.full_at - now) / FEAR_SECONDS)

    def ceilings(self, now: float) -> tuple[float, float]:
        """The most requests and tokens that follow; infinite: none follows."""
        doublings = min(_FREE_DOUBLINGS, max(0.0, now - self.spared_until) / DOUBT_SECONDS)
        share = self.share * 2.0**doublings if doublings < _FREE_DOUBLINGS else float("inf")
        levels = (self.requests.fatal, self.tokens.fatal)
        requests, tokens = (fatal * share if fatal else float("inf") for fatal in levels)
        return max(1.0, requests), tokens


def looked(lessons: Lessons, requests: int, tokens: int | None, brim: float, answers: int, alive: bool) -> Lessons:
    """After a look at an endpoint that is up.

    requests: that run there, and stand in its queue. tokens: in use; None: it does not tell. brim: use of its pool.
    answers: made since the last look. alive: it told of itself, or answered.
    """
    weight = min(1.0, answers / _HELD_ANSWERS / max(1, requests))
    level, in_use = lessons.requests.looked(requests, weight, alive), lessons.tokens
    if tokens is None:  # who is about to die does not tell
        brim = lessons.brim
    else:
        in_use, brim = in_use.looked(tokens, weight), max(brim, lessons.brim * _FADE_BRIM)
    deaths = lessons.deaths if level.fatal or in_use.fatal else 0
    return dataclasses.replace(lessons, requests=level, tokens=in_use, brim=brim, deaths=deaths)


def came_up(lessons: Lessons, requests: int) -> Lessons:
    """After an outage: what it held before, it has to hold anew. requests: how many it may be given before a look."""
    there = min(lessons.requests.recent, requests)
    level = dataclasses.replace(lessons.requests, recent=there, held=0.0, top=0.0)
    tokens = dataclasses.replace(lessons.tokens, recent=0.0, held=0.0, top=0.0)
    return dataclasses.replace(lessons, requests=level, tokens=tokens, brim=0.0)


def died(lessons: Lessons, leases: int, now: float) -> Lessons:
    """After a death. leases: requests that are still counted there. One request alone teaches nothing."""
    requests, tokens = lessons.requests, lessons.tokens
    requests = dataclasses.replace(requests, recent=max(requests.recent, leases))
    if requests.recent < 2:
        return lessons
    spared, full = now < lessons.spared_until, lessons.brim > _BRIM
    share = _HELD_SHARE_SPARED if spared else _HELD_SHARE
    by_requests, by_tokens = requests.is_new(share), full or tokens.is_new(share)
    again = not spared and ((by_requests and requests.is_fatal) or (by_tokens and tokens.is_fatal))
    after = dataclasses.replace(lessons, requests=requests.died(by_requests), tokens=tokens.died(by_tokens))
    if not (by_requests or by_tokens):
        return _discredited(after) if spared and lessons.deaths == 1 else after
    return dataclasses.replace(
        after, died_at=now, full_at=now if full else lessons.full_at, deaths=lessons.deaths + 1 if again else 1,
        share=DEATH_SHARE_AGAIN if spared else DEATH_SHARE,
    )  # fmt: skip


def _discredited(lessons: Lessons) -> Lessons:
    """It died below the fatal levels as well."""
    requests, tokens = (dataclasses.replace(level, fatal=0.0) for level in (lessons.requests, lessons.tokens))
    return dataclasses.replace(lessons, requests=requests, tokens=tokens, deaths=0)

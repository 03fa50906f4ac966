"""What came of a seed, in one line; and whether all that was promised held."""

from collections import Counter
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, Self


@dataclass(slots=True)
class Outcome:
    """A seed's run. Empty `broken`: everything held."""

    seed: int
    rows: int
    seconds: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    starts: int = 0  #: how often the command was given
    lost: int = 0
    doubled: int = 0
    foreign: int = 0
    extra: int = 0  #: requests beyond one for each row
    in_flight: int = 0  #: requests in flight at the faults that may cost some
    recoveries: list[float] = field(default_factory=list)  #: seconds from the end of a fault's doing to the next line
    orphans: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)  #: unexpected exits, a deadline that passed, what `verify` says

    @property
    def broken(self) -> list[str]:
        """Promises that did not hold."""
        wrong = list(self.trouble)
        wrong += [f"{count} {word}" for word in ("lost", "doubled", "foreign") if (count := getattr(self, word))]
        if self.extra > self.in_flight:
            wrong.append(f"{self.extra} extra generations, {self.in_flight} in flight at the faults")
        return wrong + [f"orphan {line}" for line in self.orphans]

    def as_json(self) -> dict[str, Any]:
        """Every field, and what broke."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"broken": self.broken}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Back from `as_json`."""
        own = {name: value for name, value in values.items() if name != "broken"}
        return cls(**own | {name: Counter(own[name]) for name in ("injected", "skipped")})

    def __str__(self) -> str:
        recovered = sorted(self.recoveries) or [0.0]
        return (
            f"seed {self.seed}: {'broken' if self.broken else 'held'} · {self.rows} rows in {self.seconds:.0f} s · "
            f"{self.injected.total()} faults, {self.skipped.total()} skipped, started {self.starts} times · "
            f"{self.lost} lost, {self.doubled} doubled · "
            f"{self.extra} extra generations of {self.in_flight} in flight · "
            f"next line after {median(recovered):.1f} s (median), {recovered[-1]:.1f} s (longest) · "
            f"{len(self.orphans)} orphans"
        )


def table(outcomes: list[Outcome]) -> str:
    """A line a seed."""
    names = ("seed", "held", "seconds", "faults", "skipped", "starts", "lost", "doubled", "extra", "in flight",
             "recovery median", "longest", "orphans")  # fmt: skip
    lines = [
        (one.seed, "no" if one.broken else "yes", round(one.seconds), one.injected.total(), one.skipped.total(),
         one.starts, one.lost, one.doubled, one.extra, one.in_flight, f"{median(one.recoveries or [0.0]):.1f} s",
         f"{max(one.recoveries, default=0.0):.1f} s", len(one.orphans))
        for one in outcomes
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (names, ["---"] * len(names), *lines))


def kinds(outcomes: list[Outcome]) -> str:
    """All faults by kind, over all seeds."""
    total = sum((one.injected for one in outcomes), Counter())
    return ", ".join(f"{count} × {kind}" for kind, count in sorted(total.items()))


def summary(outcomes: list[Outcome]) -> str:
    """All seeds in some lines."""
    held = sum(not one.broken for one in outcomes)
    return (
        f"{held} of {len(outcomes)} seeds held · {sum(one.rows for one in outcomes)} rows · "
        f"{sum(one.injected.total() for one in outcomes)} faults · {sum(one.lost for one in outcomes)} lost, "
        f"{sum(one.doubled for one in outcomes)} doubled · {sum(one.extra for one in outcomes)} extra generations of "
        f"{sum(one.in_flight for one in outcomes)} in flight · longest recovery "
        f"{max((max(one.recoveries, default=0.0) for one in outcomes), default=0.0):.1f} s · "
        f"{sum(len(one.orphans) for one in outcomes)} orphans\nfaults by kind: {kinds(outcomes)}"
    )

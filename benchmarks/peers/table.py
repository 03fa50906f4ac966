"""The figures of benchmarks/peers/compare.py as a table in Markdown."""

from collections.abc import Iterator
from typing import Any

HEAD = ("", "rows/s, middle half", "wall, s", "CPU, ms a row", "memory, MB", "killed at half, same command again",
        "endpoint away for {away_seconds:.0f} s")  # fmt: skip


def lines(found: dict[str, Any]) -> Iterator[str]:
    """One line a peer; those that were not run below, with the reason. found: what --json writes."""
    head = [cell.format(**found) for cell in HEAD]
    yield row(head)
    yield row(["---"] * len(head))
    away = []
    for peer in found["peers"].values():
        if "not_run" in peer:
            away.append(f"{peer['title']}: {peer['not_run']}.")
            continue
        steady = peer["steady"]
        speed = [f"{steady[key]:.1f}" for key in ("rows_per_second", "wall_seconds", "cpu_ms_a_row")]
        ends = [ending(peer[what], found["rows"]) for what in ("killed", "away")]
        yield row([f"{peer['title']} {peer['version']}".strip(), *speed, f"{steady['memory_mb']:.0f}", *ends])
    if away:
        yield from ("", "Not run:", "", *(f"- {line}" for line in away))


def row(cells: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def ending(figures: dict[str, Any], rows: int) -> str:
    """How a play ended, in words."""
    words = []
    if figures["lost"]:
        said = f", {figures['failed']} of them called failed" if figures["failed"] else ""
        words.append(f"**{figures['lost']} of {rows} rows missing**{said}")
    elif not figures["doubled"]:
        words.append("all rows once")
    if figures["doubled"]:
        words.append(f"**{figures['doubled']} rows twice**")
    words.append(_exit(figures["exit"]) if figures["truth"] else f"**{_exit(figures['exit'])}**")
    if "again" in figures:
        left = f"{figures['again']['lost']} missing" if figures["again"]["lost"] else "all rows"
        words.append(f"once more: {left}, {_exit(figures['again']['exit'])}")
    if figures["repeated"]:
        words.append(f"{figures['repeated']} made again")
    return ", ".join(words)


def _exit(code: int | None) -> str:
    return "no end" if code is None else f"exit {code}"

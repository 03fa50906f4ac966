"""The figures of benchmarks/peers/compare.py in Markdown: a table, the settings, and who was not run.

python -m benchmarks.peers.table FILE
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = ("", "rows/s, middle half", "wall, s", "CPU, ms a row", "memory, MB", "killed at half, same command again",
        "endpoint away for {away_seconds:.0f} s")  # fmt: skip


def lines(found: dict[str, Any]) -> Iterator[str]:
    """One row a peer; then, each in one line, what they were set to and why others were not run. found: what --json
    writes."""
    ran = [peer for peer in found["peers"].values() if "not_run" not in peer]
    yield _row([cell.format(**found) for cell in HEAD])
    yield _row(["---"] * len(HEAD))
    for peer in ran:
        steady = peer["steady"]
        speed = [f"{steady[key]:.1f}" for key in ("rows_per_second", "wall_seconds", "cpu_ms_a_row")]
        ends = [ending(peer[what], found["rows"]) for what in ("killed", "away")]
        yield _row([peer["title"], *speed, f"{steady['memory_mb']:.0f}", *ends])
    yield ""
    yield "Set for resume and retries: " + ". ".join(f"{peer['title']}: {peer['settings']}" for peer in ran) + "."
    for peer in found["peers"].values():
        if "not_run" in peer:
            yield f"Not run: {peer['title']}, {peer['not_run']}."


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def ending(figures: dict[str, Any], rows: int) -> str:
    """How a play ended, in words; bold: what nobody wants."""
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
    return "**does not end**" if code is None else f"exit {code}"


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))

"""One seed played: the plan against the scene, until the run is complete; then the proof."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from app.rundir import RAW, REJECTED, TOKENIZED
from tests.acceptance.harness import extra_requests, headrace, ids
from tests.chaos.faults import Scene, end, scene, small_disk
from tests.chaos.plan import Fault, plan
from tests.chaos.report import Outcome

_POLL_SECONDS = 0.05
_COMPLETE = (0, 5)
_DISK_MEGABYTES = 256
_ORPHAN_SECONDS = 20.0  # a stopped process's descendants may take a moment to end
_FILES = (RAW, TOKENIZED, REJECTED)

Ids = dict[str, list[str]]


def write_inputs(folder: Path, rows: int) -> list[Path]:
    """Two datasets, of which one row in a hundred is empty and is rejected."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("lagoon", rows // 3), ("river", rows - rows // 3)):
        path = folder / f"{name}.jsonl"
        with path.open("w") as file:
            for n in range(count):
                content = "" if n % 100 == 99 else f"In {name}, water {n} meets stone {n * 7919 % 1009}. What happens?"
                file.write(json.dumps({"id": n, "messages": [{"role": "user", "content": content}]}) + "\n")
        paths.append(path)
    return paths


def undisturbed(folder: Path, inputs: list[Path]) -> Ids:
    """The ids of each file after a run that nobody disturbed."""
    with scene(folder, inputs) as calm:
        calm.start()
        code = calm.run.process.wait(600)
        assert code in _COMPLETE, calm.run.text()
        return {name: sorted(ids(calm.out, name)) for name in _FILES}


def deadline_of(faults: int, rows: int) -> float:
    """Seconds after which a seed that is not complete is a hang."""
    return 120.0 + 6.0 * faults + rows / 20


def play(seed: int, faults: int, rows: int, inputs: list[Path], expected: Ids, folder: Path) -> Outcome:
    """Play one seed in `folder`; what it says there stays for a look."""
    outcome = Outcome(seed, rows)
    with small_disk(folder / "disk", _DISK_MEGABYTES), scene(folder / "disk", inputs) as attacked:
        began = time.monotonic()
        attacked.start()
        outcome.starts = 1
        _attack(attacked, plan(seed, faults), rows, outcome, began + deadline_of(faults, rows))
        outcome.seconds = time.monotonic() - began
        if not outcome.trouble:
            _prove(attacked, expected, outcome)
        outcome.injected, outcome.skipped = attacked.injected, attacked.skipped
        outcome.in_flight = attacked.in_flight_lost
        if outcome.broken:  # the small disk is gone in a moment
            shutil.copytree(folder / "disk", folder / "left", dirs_exist_ok=True)
    return outcome


def _attack(attacked: Scene, faults: list[Fault], rows: int, outcome: Outcome, deadline: float) -> None:
    """All faults, each when its share of the rows is there; then wait for the end."""
    recovering: list[tuple[float, int]] = []  # (since, lines then) of faults after which no line came yet

    def watch(reached: Callable[[int], bool]) -> bool:
        """Look until it is reached, or the run is complete (False) or in trouble."""
        while not outcome.trouble:
            lines, now = attacked.lines(), time.monotonic()
            outcome.recoveries += [now - since for since, then in recovering if lines > then]
            recovering[:] = [(since, then) for since, then in recovering if lines <= then]
            if (code := attacked.run.process.poll()) in _COMPLETE:
                return False
            if code is not None:
                outcome.trouble.append(f"it ended with exit {code}")
            if now > deadline:
                outcome.trouble.append(f"a hang: {lines} lines at the deadline")
            if reached(lines):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    for fault in faults:
        if not watch(lambda lines, share=fault.share: lines >= share * rows):
            break
        before = attacked.run
        attacked.inject(fault)
        outcome.starts += attacked.run is not before
        recovering.append((time.monotonic(), attacked.lines()))
    else:
        watch(lambda _: False)


def _prove(attacked: Scene, expected: Ids, outcome: Outcome) -> None:
    """Files against the undisturbed ones, `verify`, requests against rows, and nobody left behind."""
    for name in _FILES:
        found, wanted = Counter(ids(attacked.out, name)), Counter(expected[name])
        outcome.lost += len(wanted.keys() - found.keys())
        outcome.foreign += len(found.keys() - wanted.keys())
        outcome.doubled += sum(count - 1 for count in found.values())
    verified = headrace("verify", attacked.out, timeout=300)
    if verified.returncode:
        outcome.trouble.append(f"verify: {verified.stdout[-500:]}{verified.stderr[-500:]}")
    outcome.extra = extra_requests(*attacked.endpoints)
    until = time.monotonic() + _ORPHAN_SECONDS
    while (left := attacked.orphans()) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    outcome.orphans = left
    end(left)

"""Seeds side by side, each in a process and a folder of its own; one that does not end in its time is a hang.

As a program: one seed of a folder that `Seeds` prepared, its outcome into a file.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.belt import ROOT
from tests.chaos.faults import end, marked, unmount
from tests.chaos.play import Ids, deadline_of, play
from tests.chaos.report import Outcome

_EXPECTED, _OUTCOME, _TALK = "expected.json", "outcome.json", "talk.log"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 90.0  # beyond a seed's own deadline, for the proof
_END_SECONDS = 20.0


class Seeds:
    """What all seeds of one folder have in common."""

    def __init__(self, folder: Path, inputs: list[Path], expected: Ids, rows: int, faults: int, limit: float | None):
        self._folder, self._rows, self._faults = folder, rows, faults
        self._limit = limit or deadline_of(faults, rows) + _GRACE_SECONDS
        content = {"inputs": list(map(str, inputs)), "rows": rows, "faults": faults, "expected": expected}
        (folder / _EXPECTED).write_text(json.dumps(content))

    def place(self, seed: int) -> Path:
        """Its folder."""
        return self._folder / f"seed-{seed}"

    def play(self, seeds: list[int], jobs: int) -> Iterator[Outcome]:
        """Outcomes as they come, at most `jobs` seeds at once."""
        waiting, playing = list(reversed(seeds)), {}
        try:
            while waiting or playing:
                while waiting and len(playing) < jobs:
                    seed = waiting.pop()
                    playing[seed] = self._start(seed), time.monotonic()
                for seed, (process, began) in list(playing.items()):
                    took = time.monotonic() - began
                    if process.poll() is not None or took > self._limit:
                        self._end(seed, process)
                        del playing[seed]
                        yield self._outcome(seed, process.returncode, took)
                time.sleep(_POLL_SECONDS)
        finally:
            for seed, (process, _) in playing.items():
                self._end(seed, process)

    def _start(self, seed: int) -> subprocess.Popen:
        place = self.place(seed)
        place.mkdir(parents=True, exist_ok=True)
        (place / _OUTCOME).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.chaos.side_by_side", str(self._folder), str(place), str(seed)]
        with (place / _TALK).open("wb") as talk:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk)

    def _end(self, seed: int, process: subprocess.Popen) -> None:
        """Whatever is left of a seed: its process, its run, its disk."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end(marked(self.place(seed)))
        unmount(self.place(seed) / "disk")

    def _outcome(self, seed: int, code: int, took: float) -> Outcome:
        try:
            return Outcome.of_json(json.loads((self.place(seed) / _OUTCOME).read_text()))
        except FileNotFoundError:
            talk = (self.place(seed) / _TALK).read_text(errors="replace")[-1000:]
            what = f"a hang: no end in {took:.0f} s" if took > self._limit else f"its player ended with exit {code}"
            return Outcome(seed, self._rows, seconds=took, trouble=[f"{what}: {talk}" if talk else what])


def main() -> None:
    """Play one seed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder, place, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    given = json.loads((folder / _EXPECTED).read_text())
    inputs = list(map(Path, given["inputs"]))
    outcome = play(seed, given["faults"], given["rows"], inputs, given["expected"], place)
    (place / _OUTCOME).write_text(json.dumps(outcome.as_json()))


if __name__ == "__main__":
    main()

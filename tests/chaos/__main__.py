"""`python -m tests.chaos`: the seeds one after the other, a line each; exit 1 if a promise did not hold."""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.play import play, undisturbed, write_inputs
from tests.chaos.report import summary


def main() -> int:
    """Play the seeds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends us, the run under attack ends with us
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="where the runs lie; those that broke stay there")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    inputs = write_inputs(folder / "input", options.rows)
    expected = undisturbed(folder / "undisturbed", inputs)
    print(f"undisturbed: {', '.join(f'{len(found)} in {name}' for name, found in expected.items())}", flush=True)
    outcomes = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        place = folder / f"seed-{seed}"
        outcome = play(seed, options.faults, options.rows, inputs, expected, place)
        outcomes.append(outcome)
        print(outcome, *(f"  {line}" for line in outcome.broken), sep="\n", flush=True)
        if not outcome.broken:
            shutil.rmtree(place, ignore_errors=True)
    print(summary(outcomes))
    broken = any(outcome.broken for outcome in outcomes)
    print(f"what broke lies in {folder}" if broken else "all held")
    if not broken:
        shutil.rmtree(folder, ignore_errors=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

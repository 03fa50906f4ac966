"""`python -m tests.chaos`: seeded runs under random faults, a line each; exit 1 if a promise did not hold."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.play import undisturbed, write_inputs
from tests.chaos.report import summary, table
from tests.chaos.side_by_side import Seeds


def main() -> int:
    """Play the seeds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends us, the runs under attack end with us
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    inputs = write_inputs(folder / "input", options.rows)
    expected = undisturbed(folder / "undisturbed", inputs)
    print(f"undisturbed: {', '.join(f'{len(found)} in {name}' for name, found in expected.items())}", flush=True)
    numbers = range(options.first_seed, options.first_seed + options.seeds)
    seeds = Seeds(folder, inputs, expected, options.rows, options.faults, options.limit_seconds)
    outcomes = []
    for outcome in seeds.play(list(numbers), options.jobs):
        outcomes.append(outcome)
        print(outcome, *(f"  {line}" for line in outcome.broken), sep="\n", flush=True)
        if not outcome.broken:
            shutil.rmtree(seeds.place(outcome.seed), ignore_errors=True)
    outcomes.sort(key=lambda outcome: outcome.seed)
    print(table(outcomes), summary(outcomes), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=1))
    broken = any(outcome.broken for outcome in outcomes)
    print(f"what broke lies in {folder}" if broken else "all held")
    if not broken:
        shutil.rmtree(folder, ignore_errors=True)
    return int(broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once (two cores each; of these: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, help="after which a seed is a hang (default: by its faults)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all outcomes as JSON, too")
    parser.add_argument("--folder", type=Path, help="where the runs lie; those that broke stay there")
    options = parser.parse_args()
    if options.jobs > (cores := os.cpu_count() or 1):
        print(f"{options.jobs} seeds at once on {cores} cores: slow seeds may be taken for hangs", file=sys.stderr)
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Rows that kill the server among rows that do not: how many crashes and how long until only they are given up.

    python benchmarks/poison.py [--rows 1000] [--poisoned 3] [--concurrency 100] [--json FILE]

`headrace run` on one and on two simulated endpoints, each a process that comes back a second after it died. The bound
is what workers/suspects.py states for the company of each rejected row at its second death.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.acceptance.harness import TOKENIZER, ids, run, verified  # noqa: E402
from tests.acceptance.poison import deadly_token, server, stats, write_rows  # noqa: E402

SERVER = {"output_mean": 100, "step_seconds": 0.01}


def bound(detail: str) -> int:
    """Crashes that the rejected row may have caused, by the company that its line tells of."""
    companies = [int(n) + 1 for n in re.search(r"beside ([\d, ]+) other", detail)[1].split(", ")]
    return max(4, 3 + companies[1].bit_length() - 1)


def play(folder: Path, endpoints: int, rows: int, poisoned: int, concurrency: int) -> dict:
    """One run; what came of it."""
    out, data = folder / "out", folder / "rows.jsonl"
    write_rows(data, rows, tuple((2 * n + 1) * rows // (2 * poisoned) for n in range(poisoned)))
    deadly = {"crash_on_token": deadly_token(), "freeze_seconds": 0.2, "down_seconds": 1.0}
    with ExitStack() as stack:
        urls = [stack.enter_context(server(SERVER, **deadly)) for _ in range(endpoints)]
        words = [word for url in urls for word in ("--endpoint", url)]
        words += ["--tokenizer", TOKENIZER, "--max-new-tokens", 1024, "--concurrency", concurrency]
        began = time.monotonic()
        with run(out, data, *words) as started:
            code = started.wait(1500)
        seconds = time.monotonic() - began
        time.sleep(2.0)  # the last one may be down still
        crashes = sum(stats(url)["crashes"] for url in urls)
    lines = [json.loads(line) for path in out.glob("*/rejected.jsonl") for line in path.open("rb")]
    found = ids(out)
    return {
        "endpoints": endpoints, "rows": rows, "exit": code, "seconds": round(seconds, 1), "crashes": crashes,
        "bound": sum(bound(line["detail"]) for line in lines), "rejected": [line["reason"] for line in lines],
        "generated": len(found), "twice": len(found) - len(set(found)), "verified": verified(out)["ok"],
        "details": [line["detail"] for line in lines],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--poisoned", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for endpoints in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            results.append(play(Path(folder), endpoints, options.rows, options.poisoned, options.concurrency))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How fast a large run is found again: `python benchmarks/resume.py --rows 1000000 [--folder DIR]`.

Makes a real run of tiny rows by hand (all but the last ten are done), and measures the same `headrace run` three
times: until its first new request reaches a simulated server, with the ledger, and with the ledger deleted; the most
memory of each of its processes; and the ledger's rebuilding alone. About 1.2 KB of disk a row, removed at the end.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson
import psutil

from app.identity import task_key
from app.ledger import Ledger
from app.rundir import RAW, TOKENIZED, RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.running import RunningSimulator
from producers.catalog import read_row
from producers.readers import RawRow
from producers.shapes import ShapeOptions

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "app" / "demo_data" / "tokenizer"
_NEW = 10  #: rows left to do
_CONFIG = SimulatorConfig(id_low=256, id_high=4000, tokenizer_dir=str(TOKENIZER), instant=True)


def start(out: Path, data: Path, url: str, *more: str) -> subprocess.Popen:
    """`headrace run` on it."""
    words = ["run", f"rows={data}", "--endpoint", url, "--tokenizer", TOKENIZER, "--out", out, "--max-new-tokens", 4]
    command = [sys.executable, "-m", "app.cli.main", *map(str, words), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_rows(out: Path, data: Path, rows: int) -> None:
    """Lines of all rows but the last ones, after the pattern of the first, which was really generated."""
    rundir = RunDir(out)
    firsts = {name: rundir.file("rows", name).read_bytes() for name in (RAW, TOKENIZED)}
    first = orjson.loads(firsts[RAW])
    with data.open("rb") as source, rundir.file("rows", RAW).open("ab") as raw, \
            rundir.file("rows", TOKENIZED).open("ab") as samples:  # fmt: skip
        source.readline()
        for number, line in enumerate(source, 2):
            if number > rows - _NEW:
                return
            row, _ = read_row(RawRow(number, orjson.loads(line), line), ShapeOptions())
            key = task_key(first["recipe"], "rows", row, 0, 0)
            for file, pattern in ((raw, firsts[RAW]), (samples, firsts[TOKENIZED])):
                line = pattern.replace(first["row_id"].encode(), row.encode())
                file.write(line.replace(first["key"].encode(), key.encode()))


def resume(what: str, out: Path, data: Path, endpoint: RunningSimulator) -> None:
    """Start the run, wait for its first new request, note what its processes needed, stop it."""
    before, started = endpoint.stats()["requests"], time.perf_counter()
    process, most = start(out, data, endpoint.url), {}
    try:
        while endpoint.stats()["requests"] < before + 2 and process.poll() is None:  # the first is the canary
            note_memory(process.pid, most)
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        process.wait(600)
        total = time.perf_counter() - started
    finally:
        process.kill()
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in most.items())
    took = f"{seconds:>8.1f} s to the first request, {total:.1f} s in all (exit {process.returncode})"
    print(f"{what:<34}{took}; {memory}", flush=True)


def note_memory(pid: int, most: dict[str, int]) -> None:
    """The peak of each process so far."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for one in processes:
            words = one.cmdline()
            name = next((word for word in ("collect", "produce", "worker", "run") if word in words[:5]), "redis")
            if len(words) > 3 and "app.cli.main" in words[2]:
                most[name] = max(most.get(name, 0), one.memory_info().rss)
    except (psutil.Error, IndexError):
        return


def rebuild(out: Path) -> None:
    """The ledger from the files alone, in a process of its own."""
    RunDir(out).ledger.unlink()
    started, cpu = time.perf_counter(), time.process_time()
    with Ledger.open(RunDir(out)) as ledger:
        ledger.catch_up()
        count = sum(one.tokenized or one.samples for one in ledger.counts())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size = RunDir(out).ledger.stat().st_size / 2**20
    took = f"{time.perf_counter() - started:>8.1f} s ({time.process_time() - cpu:.1f} s of CPU) for {count:,} rows"
    print(f"{'rebuilding the ledger':<34}{took}; {most:,.0f} MB; {size:,.0f} MB on disk", flush=True)


def main() -> None:
    """Make, measure, remove."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the files go (default: TMPDIR)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-resume-", dir=arguments.folder))
    try:
        with running_simulator(_CONFIG) as endpoint:
            data, out = folder / "rows.jsonl", folder / "out"
            with data.open("wb") as file:
                file.writelines(b'{"prompt":"row %d"}\n' % n for n in range(arguments.rows))
            start(out, data, endpoint.url, "--limit", "1").wait()
            started = time.perf_counter()
            write_rows(out, data, arguments.rows)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**30
            print(f"{arguments.rows:,} rows, {size:.1f} GB, made in {time.perf_counter() - started:.0f} s")
            rebuild(out)
            resume("input never seen by the ledger", out, data, endpoint)
            add_rows(data, arguments.rows)
            resume("resumed with the ledger", out, data, endpoint)
            add_rows(data, arguments.rows + _NEW)
            RunDir(out).ledger.unlink()
            resume("resumed with the ledger deleted", out, data, endpoint)
    finally:
        shutil.rmtree(folder)


def add_rows(data: Path, rows: int) -> None:
    """Something to do again: the input grew."""
    with data.open("ab") as file:
        file.writelines(b'{"prompt":"more %d"}\n' % n for n in range(rows, rows + _NEW))


if __name__ == "__main__":
    main()

"""How soon a large run begins, and is found again: `python benchmarks/resume.py --rows 1000000 [--folder DIR] [--lay]`.

Begins a run of a thousand rows and one of all of them, from exec to the first request, and stops both there. Then makes
a real run of tiny rows by hand (all but the last ten are done), and measures the same `headrace run` several times:
until its first new request reaches a simulated server, or its end where nothing is left to do; the most memory
of each of its processes; and the ledger's rebuilding alone. About 1.2 KB of disk a row, removed at the end.

--lay: for more rows than the machine has patience. The ledger is laid as a run leaves it, and the two files hold only
their first line: whoever resumes with a ledger reads none of the others. Only such starts are measured.
"""

import argparse
import itertools
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
from app.ledger.schema import HAS_RAW, State, pack_row_id
from app.rundir import RAW, TOKENIZED, RunDir
from app.settings import load_settings
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.simulator.running import RunningSimulator
from producers.bookmarks import InputPass
from producers.catalog import read_row
from producers.inputs import parse_inputs
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


def lay_ledger(out: Path) -> None:
    """What the ledger says once the input was read to its end and all rows but the last ones are done."""
    rundir = RunDir(out)
    settings = load_settings(rundir.private / "settings.json").model_copy(update={"limit": None})
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        over, db, rows = InputPass(parse_inputs(settings.inputs), settings, ledger), ledger._db, 0
        db.execute("CREATE TEMP TABLE laid(row_id BLOB, number INTEGER)")
        for _, chunk in over.chunks():
            some = [(pack_row_id(read_row(raw, ShapeOptions())[0]), raw.number) for _, raw in chunk or ()]
            db.executemany("INSERT INTO laid VALUES(?, ?)", some)
            rows += len(some)
        done = rows - _NEW
        with ledger._transaction():
            for table in ("row", "completion", "tally"):
                db.execute(f"DELETE FROM {table}")
            db.execute("INSERT INTO row SELECT 1, row_id, number, 0, number FROM laid ORDER BY row_id")
            db.execute(
                "INSERT INTO completion SELECT 1, row_id, 0, ?, '', 0 FROM laid WHERE number <= ? ORDER BY row_id",
                (State.TOKENIZED, done),
            )
            db.execute("UPDATE dataset SET rows = ?, rows_final = 1", (rows,))
            ledger._set_meta("seq", rows)
            ledger._add_to_tally(1, {(1, 0, state, ""): done for state in (int(State.TOKENIZED), HAS_RAW)})
        assert rows > 1_000_000 or not ledger.discrepancies()


def resume(
    what: str, out: Path, data: Path, endpoint: RunningSimulator, new: int = 2, *, stop: bool = False
) -> None:  # fmt: skip
    """Start the run, wait for its first new request, note what its processes needed, wait for its end (or stop it).

    new: requests that show it; the first is the canary. 0: there is nothing to do.
    """
    before, started = endpoint.stats()["requests"], time.perf_counter()
    process, most = start(out, data, endpoint.url), {}
    try:
        while (not new or endpoint.stats()["requests"] < before + new) and process.poll() is None:
            note_memory(process.pid, most)
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        if stop:
            process.terminate()
        process.wait(600)
        total = time.perf_counter() - started
    finally:
        process.kill()
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in most.items())
    took = f"{seconds:>8.1f} s to the first request, {total:.1f} s in all (exit {process.returncode})"
    print(f"{what:<34}{took}; {memory}", flush=True)


def begin(folder: Path, data: Path, endpoint: RunningSimulator) -> None:
    """A first run on the first thousand rows, and one on all."""
    few = folder / "few.jsonl"
    with data.open("rb") as file:
        few.write_bytes(b"".join(itertools.islice(file, 1000)))
    for what, path in (("begun, a thousand rows", few), ("begun, all rows", data)):
        resume(what, folder / path.stem, path, endpoint, stop=True)
        shutil.rmtree(folder / path.stem)


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
    parser.add_argument("--lay", action="store_true", help="lay the ledger instead of writing all lines")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-resume-", dir=arguments.folder))
    try:
        with running_simulator(_CONFIG) as endpoint:
            data, out, rows = folder / "rows.jsonl", folder / "out", arguments.rows
            with data.open("wb") as file:
                file.writelines(b'{"prompt":"row %d"}\n' % n for n in range(rows))
            begin(folder, data, endpoint)
            start(out, data, endpoint.url, "--limit", "1").wait()
            started = time.perf_counter()
            lay_ledger(out) if arguments.lay else write_rows(out, data, rows)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**30
            print(f"{rows:,} rows, {size:.1f} GB, made in {time.perf_counter() - started:.0f} s", flush=True)
            if not arguments.lay:
                rebuild(out)
                resume("input never seen by the ledger", out, data, endpoint)
                add_rows(data, rows)
            resume("resumed, ten rows left", out, data, endpoint)
            resume("all done, the same command", out, data, endpoint, new=0)
            add_rows(data, rows + _NEW)
            resume("the input grew by ten rows", out, data, endpoint)
            if not arguments.lay:
                add_rows(data, rows + 2 * _NEW)
                RunDir(out).ledger.unlink()
                resume("the ledger was deleted", out, data, endpoint)
    finally:
        shutil.rmtree(folder)


def add_rows(data: Path, rows: int) -> None:
    """Something to do again: the input grew."""
    with data.open("ab") as file:
        file.writelines(b'{"prompt":"more %d"}\n' % n for n in range(rows, rows + _NEW))


if __name__ == "__main__":
    main()

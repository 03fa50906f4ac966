"""Who takes part, how each is started, and how its files are read: rows made, and rows that it says have failed."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.acceptance.harness import TOKENIZER
from tests.belt import ROOT

CONCURRENCY, MAX_TOKENS = 64, 128
HERE = ROOT / "benchmarks" / "peers"
#: Named in the table, not run, and why not.
NOT_RUN = {
    "SpecForge": "its `regenerate_train_data.py` is in neither archive of specforge 0.2.0 on PyPI (wheel, source), "
    "and its command knows `train`, `export` and `benchmark` alone",
}


@dataclass
class Found:
    """What a peer's files say."""

    made: Counter[str] = field(default_factory=Counter)  #: answers by row
    failed: set[str] = field(default_factory=set)  #: rows it has written down as failed

    def add(self, made: str | None, failed: str | None = None) -> None:
        """One record."""
        if made:
            self.made[made] += 1
        if failed:
            self.failed.add(failed)


@dataclass(frozen=True)
class Job:
    """One start: what it is to ask whom, and where its files go."""

    url: str
    prompts: Path
    out: Path
    python: str


@dataclass(frozen=True)
class Peer:
    """One of those beside each other."""

    title: str  #: in the table; "{}" is where its version goes
    command: Callable[[Job], list[str]]
    read: Callable[[Path], Found]
    settings: str  #: those of resume and retries, as its documentation names them
    package: str = ""  #: on PyPI; its virtual environment has this name. "": runs in ours
    dialect: bool = False  #: needs benchmarks/peers/dialect.py between itself and the endpoint

    def python(self, venvs: Path | None) -> str:
        """Its interpreter. Raises FileNotFoundError, with what to do, where setup.sh has not made one."""
        if not self.package:
            return sys.executable
        if venvs is None:
            raise FileNotFoundError("--venvs is not given")
        path = venvs.absolute() / self.package / "bin" / "python"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: benchmarks/peers/setup.sh {venvs} makes it")
        return str(path)

    def version(self, python: str) -> str:
        """The installed one; "" for what is in this tree. Raises FileNotFoundError if setup could not install it."""
        if not self.package:
            return ""
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if asked.returncode:
            raise FileNotFoundError(f"{python} has no {self.package}: its setup did not get to its end")
        return asked.stdout.strip()


def records(path: Path) -> Iterator[dict]:
    """The whole lines of a JSONL file, compressed or not; nothing where there is none."""
    if not path.exists():
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # torn
        except EOFError:
            return  # a compressed file that was not closed


def _driver(name: str) -> Callable[[Job], list[str]]:
    def command(job: Job) -> list[str]:
        words = [job.python, HERE / name, job.url, job.prompts, job.out / "out.jsonl", CONCURRENCY, MAX_TOKENS]
        return [str(word) for word in words]

    return command


def _elsewhere(job: Job) -> list[str]:
    """datatrove on an endpoint whose name is not the loopback's that it knows."""
    return _driver("datatrove_driver.py")(replace(job, url=job.url.replace("127.0.0.1", "127.1")))


def _headrace(job: Job) -> list[str]:
    words = [job.python, "-m", "app.cli.main", "run", f"rows={job.prompts}", "--endpoint", job.url, "--tokenizer",
             TOKENIZER, "--out", job.out, "--concurrency", CONCURRENCY, "--max-new-tokens", MAX_TOKENS]  # fmt: skip
    return [str(word) for word in words]


def _speculators(job: Job) -> list[str]:
    words = [job.python, "-m", "speculators", "regenerate-responses", "--endpoint", f"{job.url}/v1/chat/completions",
             "--model", TOKENIZER, "--dataset", job.prompts, "--outfile", job.out / "out.jsonl",
             "--concurrency", CONCURRENCY, "--max-tokens", MAX_TOKENS, "--sampling-params", '{"temperature": 1.0}',
             "--resume"]  # fmt: skip
    return [str(word) for word in words]


def _plain(out: Path) -> Found:
    found = Found()
    for record in records(out / "out.jsonl"):
        found.add(record.get("id"), record.get("failed"))
    return found


def _of_headrace(out: Path) -> Found:
    found = Found()
    for record in records(out / "rows" / "raw_responses.jsonl"):
        found.add(record["source_id"])
    for record in records(out / "rows" / "rejected.jsonl"):
        found.add(None, record["source_id"])
    return found


def _of_flexllm(out: Path) -> Found:
    found = Found()
    for record in records(out / "out.jsonl"):
        row = record["metadata"]["id"]
        found.add(row) if record["status"] == "success" else found.add(None, row)
    return found


def _of_speculators(out: Path) -> Found:
    found = Found()
    for record in records(out / "out.jsonl"):
        found.add(record["primary_id"])
    for record in records(out / "out.errors.jsonl"):
        found.add(None, record["id"])
    return found


def _of_datatrove(out: Path) -> Found:
    found = Found()
    for path in (out / "answers").glob("*.jsonl.gz"):
        for record in records(path):
            found.add(record["id"])
    return found


PEERS = {
    "headrace": Peer("Headrace", _headrace, _of_headrace, "nothing"),
    "evening": Peer(
        "an evening's script", _driver("evening.py"), _plain,
        "three tries a row, after 1 and 2 s",
    ),
    "evening-dialect": Peer(
        "the same through the translator", _driver("evening.py"), _plain, "as before", dialect=True
    ),
    "speculators": Peer(
        "speculators {} (through the translator)", _speculators, _of_speculators,
        "`--resume`; `--max-retries` 3, its default: after 2, 4 and 8 s", "speculators", dialect=True,
    ),
    "datatrove": Peer(
        "datatrove {}, InferenceRunner, endpoint on 127.0.0.1", _driver("datatrove_driver.py"), _of_datatrove,
        "`checkpoints_local_dir`, `records_per_chunk=100`; six attempts a request are built in", "datatrove",
    ),
    "datatrove-elsewhere": Peer(
        "datatrove {}, as to another host (through the translator)", _elsewhere, _of_datatrove, "as before",
        "datatrove", dialect=True,
    ),
    "curator": Peer(
        "curator {}", _driver("curator_driver.py"), _plain,
        "its cache in `working_dir`; `max_retries=10`, without a wait between them, and `require_all_responses=True`, "
        "its defaults",
        "bespokelabs-curator",
    ),
    "distilabel": Peer(
        "distilabel {}", _driver("distilabel_driver.py"), _plain,
        "`use_cache=True` and the client's `max_retries=6`, half a second to 8 s apart, its defaults; "
        "`input_batch_size=64`", "distilabel",
    ),
    "flexllm": Peer(
        "flexllm {}", _driver("flexllm_driver.py"), _of_flexllm,
        "`output_jsonl` as checkpoint; `retry_times=3`, its default: after about 1, 2 and 4 s; `raise_for_errors()` "
        "at the end", "flexllm",
    ),
    "async-batch-llm": Peer(
        "async-batch-llm {}", _driver("async_batch_llm_driver.py"), _plain,
        "`JsonlArtifactStore`, `ResumePolicy.REUSE_SUCCESSES`; `max_attempts=3`, its default: after about 1 and 2 s",
        "async-batch-llm",
    ),
}  # fmt: skip

"""Where everything of a run lies. One place for every path, so that nobody else joins strings."""

from dataclasses import dataclass
from pathlib import Path

from app.filesystems import is_on_network, local_cache

RAW = "raw_responses.jsonl"
TOKENIZED = "tokenized_data.jsonl"
REJECTED = "rejected.jsonl"
SUPERSEDED = "superseded.jsonl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The output directory of one run (OUT)."""

    out: Path

    @property
    def run_json(self) -> Path:
        """Run id, recipe, datasets, versions, servers seen."""
        return self.out / "run.json"

    @property
    def private(self) -> Path:
        """Lock, ledger, private Redis, logs: nothing a reader of the results needs."""
        return self.out / ".headrace"

    @property
    def ledger(self) -> Path:
        """The index of the files; a cache. Where OUT is on a network filesystem it lies on this machine's own disk."""
        folder = local_cache(self.out) if is_on_network(self.out) else self.private
        return folder / "ledger.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the process that owns the directory (`run`)."""
        return self.private / "lock"

    @property
    def writer_lock(self) -> Path:
        """Held by the collector, the only writer of the dataset files."""
        return self.private / "writer.lock"

    @property
    def put_aside(self) -> Path:
        """Fingerprints of lines that `retry` put aside (see app/aside.py)."""
        return self.private / "put-aside"

    @property
    def redis(self) -> Path:
        """The private server's AOF and its noted address."""
        return self.private / "redis"

    @property
    def events(self) -> Path:
        """What happened to the run's parts, a JSON line each (`at`, `event`, …); a log, nothing depends on it."""
        return self.private / "events.jsonl"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.private / "logs"

    def file(self, dataset: str, name: str) -> Path:
        """A dataset's file: RAW, TOKENIZED, REJECTED or SUPERSEDED."""
        return self.out / dataset / name

    def datasets_on_disk(self) -> list[str]:
        """Names of the dataset folders that exist, sorted."""
        if not self.out.is_dir():
            return []
        names = (RAW, TOKENIZED, REJECTED)
        return sorted(
            p.name for p in self.out.iterdir()
            if p.is_dir() and p.name != ".headrace" and any((p / n).exists() for n in names)
        )  # fmt: skip

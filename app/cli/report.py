"""`headrace report`: a page about a run, to look at and to send to somebody."""

from pathlib import Path

from app.cli.inspect import existing_run
from app.cli.talk import say
from app.cli.watching import inventory_of
from app.errors import OK, StorageError, UsageError


def report_command(out: Path, to: Path | None, redis_url: str | None) -> int:
    """`headrace report OUT`."""
    rundir, run_file = existing_run(out)
    path = to or rundir.out / "report.html"
    if path.is_dir():
        raise UsageError(f"--to {path} is a directory; name a file, such as {path / 'report.html'}.")
    try:
        from app.offline.report import gather, page
    except ImportError as exc:
        raise UsageError("`headrace report` needs matplotlib, which is not installed: pip install matplotlib.") from exc
    text = page(gather(rundir, run_file, inventory_of(rundir, run_file, redis_url)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise StorageError(f"Cannot write {path}: {exc.strerror}.") from exc
    say(f"the report lies in {path}")
    return OK

"""The picture of an audit. matplotlib draws it, and is needed for nothing else: who wants no picture needs none."""

from pathlib import Path

from app.errors import StorageError, UsageError
from app.offline.audit import Audit, Lengths

_FORMATS = (".png", ".svg", ".pdf", ".html")
_BINS = 60


def plot(audit: Audit, path: Path) -> None:
    """Draw lengths of prompts and answers, kept and lost, a row of panels per dataset. Raises UsageError for a format
    that is none of .png .svg .pdf .html, or without matplotlib."""
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot {path}: the name ends in one of {' '.join(_FORMATS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib.") from exc
    rows = max(1, len(audit.datasets))
    figure = Figure(figsize=(10, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    for (left, right), one in zip(panels, audit.datasets, strict=False):
        _histogram(left, {"prompts": one.prompt})
        left.set_title(f"{one.dataset}: prompt tokens", fontsize=9)
        _histogram(right, {"kept": one.kept, **one.lost})
        right.set_title(f"{one.dataset}: output tokens, kept and lost", fontsize=9)
    try:
        _save(figure, path)
    except OSError as exc:
        raise StorageError(f"Cannot write {path}: {exc.strerror}.") from exc


def _histogram(panel, parts: dict[str, Lengths]) -> None:
    parts = {name: lengths for name, lengths in parts.items() if lengths.counts}
    if not parts:
        return
    highest = max(max(lengths.counts) for lengths in parts.values())
    width = max(1, -(-highest // _BINS))
    edges = [at * width for at in range(_BINS + 2)]
    panel.hist(
        [list(lengths.counts) for lengths in parts.values()], bins=edges, stacked=True, label=list(parts),
        weights=[list(lengths.counts.values()) for lengths in parts.values()],
    )  # fmt: skip
    panel.set_xlim(0, edges[-1])
    panel.set_ylabel("answers", fontsize=8)
    if len(parts) > 1:
        panel.legend(fontsize=7)


def _save(figure, path: Path) -> None:
    if path.suffix != ".html":
        figure.savefig(path)
        return
    from io import StringIO

    drawn = StringIO()
    figure.savefig(drawn, format="svg")
    path.write_text(f"<!doctype html><meta charset=utf-8><title>Audit</title>{drawn.getvalue()}", encoding="utf-8")

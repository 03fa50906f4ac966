"""What `headrace verify` read and found: for people, and as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Finding:
    """A kind of violation: how often, and where first. line 0: the file as a whole."""

    kind: str
    count: int
    file: str
    line: int
    detail: str


@dataclass(slots=True)
class Report:
    """What was read and what was found."""

    out: str
    lines: dict[str, int] = field(default_factory=dict)  #: per file, relative to OUT
    findings: dict[str, Finding] = field(default_factory=dict)  #: by kind
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """All promises hold."""
        return not self.findings

    def add(self, kind: str, file: str, line: int, detail: str) -> None:
        """Count a violation; keep its place if it is the first of its kind."""
        finding = self.findings.setdefault(kind, Finding(kind, 0, file, line, detail))
        finding.count += 1

    def to_json(self) -> dict[str, Any]:
        """For `verify --json`."""
        return {
            "out": self.out, "ok": self.ok, "lines": self.lines, "seconds": round(self.seconds, 3),
            "violations": [asdict(finding) for finding in self.findings.values()],
        }  # fmt: skip

    def render(self) -> str:
        """For people."""
        total = sum(self.lines.values())
        said = "every promise holds" if self.ok else f"{len(self.findings)} kinds of violation"
        lines = [f"{self.out}: {total:,} lines in {len(self.lines)} files: {said}"]
        for one in self.findings.values():
            place = f"{one.file}, line {one.line}" if one.line else one.file
            lines.append(f"  {one.kind} × {one.count:,}; first in {place}: {one.detail}")
        return "\n".join(lines) + "\n"

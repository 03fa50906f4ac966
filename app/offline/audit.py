"""Bias and quality of a run at a glance, from its files alone, in one reading of each.

Invariant: counts and percentiles are exact; memory grows with the number of different lengths and servers, not with
rows. What only a tokenizer can tell (tool calls, control tokens as text, decoding there and back) is None without one,
never 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.answers import answer_of
from app.chats import opened_by, spoken_ids
from app.groups import slot_of_id
from app.jsonl import iterate
from app.manifest import RunFile
from app.offline.redo import responses
from app.offline.scratch import HashSet
from app.reasons import Stage
from app.records import ResponseRecord
from app.rundir import REJECTED, RunDir
from app.samples import SampleFilters, is_unclosed
from app.tokenization import Renderer
from app.verify_lines import whole

_PERCENTS = (1, 10, 50, 90, 99)
OTHER_TURN = "other_turn_rejected"  #: no reason of rejected.jsonl: a good answer of a row that was rejected for another


@dataclass(slots=True)
class Lengths:
    """Token counts, exact."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: int) -> None:
        """One more."""
        self.counts[tokens] += 1

    def percentile(self, percent: float) -> int:
        """The smallest length that `percent` of all do not exceed; 0 of none."""
        left = self.counts.total() * percent / 100
        for tokens in sorted(self.counts):
            left -= self.counts[tokens]
            if left <= 0:
                return tokens
        return max(self.counts, default=0)

    def to_json(self) -> dict[str, float]:
        """count, mean, percentiles, max."""
        n = self.counts.total()
        mean = sum(tokens * times for tokens, times in self.counts.items()) / n if n else 0.0
        percentiles = {f"p{percent}": self.percentile(percent) for percent in _PERCENTS}
        return {"count": n, "mean": round(mean, 1), **percentiles, "max": max(self.counts, default=0)}


@dataclass(slots=True)
class Group:
    """What one endpoint, model and server gave."""

    output: Lengths = field(default_factory=Lengths)
    finish: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class DatasetAudit:
    """One dataset."""

    dataset: str
    prompt: Lengths = field(default_factory=Lengths)
    output: Lengths = field(default_factory=Lengths)
    kept: Lengths = field(default_factory=Lengths)  #: output of those with a sample
    lost: dict[str, Lengths] = field(default_factory=dict)  #: output of those rejected after generation, by reason
    unmeasured: Counter[str] = field(default_factory=Counter)  #: rejected before there was an answer, by reason
    finish: Counter[str] = field(default_factory=Counter)
    clipped: int = 0  #: cut before the allowance that was asked for
    repeated_prompts: int = 0
    repeated_outputs: int = 0
    control_text: int | None = None  #: prompts that say control tokens as text
    thinking: Counter[str] = field(default_factory=Counter)  #: none, closed, unclosed
    calls: Counter[str] | None = None  #: none, well_formed, malformed
    decoding: Counter[str] | None = None  #: checked, same_text, same_ids
    chats: Counter[str] = field(default_factory=Counter)  #: rows of several turns: complete, length, unanswered_calls
    histories: Counter[str] = field(default_factory=Counter)  #: their later turns: same, retokenized, rewritten

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "dataset": self.dataset, "responses": self.output.counts.total(), "prompt_tokens": self.prompt.to_json(),
            "output_tokens": self.output.to_json(), "finish_reasons": dict(self.finish), "clipped": self.clipped,
            "kept_output_tokens": self.kept.to_json(),
            "lost_output_tokens": {reason: lengths.to_json() for reason, lengths in sorted(self.lost.items())},
            "rejected_before_an_answer": dict(sorted(self.unmeasured.items())),
            "repeated_prompts": self.repeated_prompts, "repeated_outputs": self.repeated_outputs,
            "control_tokens_as_text": self.control_text,
            "thinking": dict(self.thinking), "tool_calls": _maybe(self.calls), "decoding": _maybe(self.decoding),
            "chats": dict(self.chats), "histories": dict(self.histories),
        }  # fmt: skip


@dataclass(slots=True)
class Audit:
    """All of a run."""

    datasets: list[DatasetAudit] = field(default_factory=list)
    groups: dict[tuple[str, str, str, str], Group] = field(default_factory=dict)  #: endpoint, model, server, version

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        names = ("endpoint", "model", "server", "version")
        servers = [
            {**dict(zip(names, place, strict=True)), "finish_reasons": dict(group.finish),
             "output_tokens": group.output.to_json()}
            for place, group in sorted(self.groups.items())
        ]  # fmt: skip
        return {"datasets": [one.to_json() for one in self.datasets], "servers": servers}


def audit(rundir: RunDir, run_file: RunFile, renderer: Renderer | None) -> Audit:
    """Read a run. renderer: for what only the tokenizer can tell."""
    made = Audit()
    filters = SampleFilters.from_json(run_file.filters)
    for dataset in rundir.datasets_on_disk():
        with HashSet() as prompts, HashSet() as outputs:
            made.datasets.append(_Reading(made, run_file, filters, renderer, prompts, outputs).of(rundir, dataset))
    return made


@dataclass(slots=True)
class _Reading:
    made: Audit
    run_file: RunFile
    filters: SampleFilters
    renderer: Renderer | None
    prompts: HashSet
    outputs: HashSet

    def of(self, rundir: RunDir, dataset: str) -> DatasetAudit:
        one = DatasetAudit(dataset)
        if self.renderer is not None:
            one.calls, one.decoding, one.control_text = Counter(), Counter(), 0
        reasons = _reasons(rundir, dataset, one)
        for _, fields in responses(rundir, dataset):
            record = ResponseRecord(**fields)
            self._lengths(one, record, _lost_by(record, reasons))
            self._turns(one, record)
            self._repetition(one, record)
            one.thinking[self._thinking(record)] += 1
            if self.renderer is not None:
                self._texts(one, record)
        return one

    def _lengths(self, one: DatasetAudit, record: ResponseRecord, reason: str) -> None:
        tokens = record.num_output_tokens
        one.prompt.add(record.num_prompt_tokens)
        one.output.add(tokens)
        (one.lost.setdefault(reason, Lengths()) if reason else one.kept).add(tokens)
        one.finish[record.finish_reason] += 1
        one.clipped += record.finish_reason == "length" and tokens < record.max_new_tokens
        said = self.run_file.servers.get(record.server, {})
        place = (record.endpoint, record.model, record.server, str(said.get("version") or ""))
        group = self.made.groups.setdefault(place, Group())
        group.output.add(tokens)
        group.finish[record.finish_reason] += 1

    def _turns(self, one: DatasetAudit, record: ResponseRecord) -> None:
        """What the producer noted of a row of several turns (see `producers.turns`)."""
        notes = orjson.loads(record.meta_info).get("chat")
        if notes is None and self.run_file.recipe.rendering.get("turns") == "all" and record.turns == 1:
            notes = {"ended": "complete"}  # it asked for one answer, so nobody had to make another prompt
        if notes is None:
            return
        one.histories.update([notes["history"]] if "history" in notes else [])
        one.chats.update([notes["ended"]] if "ended" in notes else [])

    def _repetition(self, one: DatasetAudit, record: ResponseRecord) -> None:
        if record.completion_index == record.turn == 0:
            one.repeated_prompts += not self.prompts.add(orjson.dumps(record.prompt_token_ids))
        one.repeated_outputs += not self.outputs.add(orjson.dumps(record.output_ids))

    def _thinking(self, record: ResponseRecord) -> str:
        if is_unclosed(record.prompt_token_ids, record.output_ids, self.filters):
            return "unclosed"
        return "closed" if _holds(record.output_ids, self.filters.think_close_ids) else "none"

    def _texts(self, one: DatasetAudit, record: ResponseRecord) -> None:
        if record.completion_index == record.turn == 0:
            one.control_text += self.renderer.text_control_tokens(record.prompt_token_ids) > 0
        ids, spoken = record.output_ids, spoken_ids(record)
        text = self.renderer.decode(spoken)
        said = answer_of(text, opened=opened_by(record.prompt_token_ids, self.renderer.decode))
        one.calls["malformed" if said.malformed else "well_formed" if said.tool_calls else "none"] += 1
        one.decoding["checked"] += 1
        one.decoding["same_ids"] += self.renderer.encode(text) == spoken
        plain = {self.renderer.decode(some, skip_special_tokens=True).rstrip("\ufffd") for some in (spoken, ids)}
        one.decoding["same_text"] += record.text.rstrip("\ufffd") in {*plain, text.rstrip("\ufffd")}


def _lost_by(record: ResponseRecord, reasons: dict[str, tuple[str, str]]) -> str:
    """Why a turn has no sample: a reason of its own, or another turn's; "" if it has one."""
    rejected, reason = reasons.get(slot_of_id(record.id), ("", ""))
    return reason if rejected in ("", record.id) else OTHER_TURN


def _reasons(rundir: RunDir, dataset: str, one: DatasetAudit) -> dict[str, tuple[str, str]]:
    """Completion → (id, reason) of what was rejected after generation; counts the others."""
    found = {}
    for line in iterate(rundir.file(dataset, REJECTED)):
        try:
            record = whole(REJECTED, line.raw)
        except ValueError:
            continue
        if record["stage"] == Stage.SAMPLE:
            found[slot_of_id(record["id"])] = record["id"], record["reason"]
        else:
            one.unmeasured[record["reason"]] += 1
    return found


def _holds(ids: Sequence[int], part: tuple[int, ...]) -> bool:
    if len(part) <= 1:
        return bool(part) and part[0] in ids
    return any(tuple(ids[at : at + len(part)]) == part for at, token in enumerate(ids) if token == part[0])


def _maybe(counts: Counter[str] | None) -> dict[str, int] | None:
    return None if counts is None else dict(counts)

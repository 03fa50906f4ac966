"""Answers made in stages (`--stage-tokens`): what the next request asks for, and what an answer to it comes to. Pure.

A server keeps room for all that a request may yet make; asked for a stage at a time, it lets more of them run. What an
answer has by now goes to the server as the end of the prompt, and to Redis as part of the payload: a crash costs the
stage that was under way. Why nothing else changes: docs/decisions/0009-staged-generation.md.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.capacity.lengths import kind_of, later
from app.lanes import Lane, lane_of
from app.manifest import RunManifest
from app.records import Made, Task
from app.sglang.wire import Generation


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for a task: for its whole answer, or the next stage of it."""

    input_ids: list[int]
    max_new_tokens: int  #: of this request
    left: int  #: what the answer may get yet, this request included
    lane: Lane  #: of the task, whatever was made of it
    kind: str  #: of answers that end as this one may (app.capacity.lengths.kind_of)
    stage_kind: str  #: of requests that end as this one may: the same at first, later that of all later stages (later)
    goes_on: bool  #: with an answer that has its first stage


def ask_of(run: RunManifest, task: Task) -> Ask:
    """What to ask next."""
    made = task.made.output_ids if task.made else []
    left = task.max_new_tokens - len(made)
    lane = lane_of(len(task.prompt_token_ids), task.max_new_tokens)
    kind = kind_of(run.recipe, task.dataset, lane.value)
    return Ask(
        task.prompt_token_ids + made if made else task.prompt_token_ids, min(left, run.stage_tokens or left), left,
        lane, kind, later(kind) if made else kind, bool(made),
    )  # fmt: skip


def is_over(ask: Ask, stage: Generation, stop_ids: Collection[int]) -> bool:
    """Whether the answer ends with this stage: it stopped, has its allowance, or was clipped by the server.

    A server looks at the allowance first: a stop id in the last place of a stage is a `length`, and would have been a
    stop of the whole answer.
    """
    return not _cut(ask, stage) or stage.output_ids[-1] in stop_ids


def _cut(ask: Ask, stage: Generation) -> bool:
    """Whether our stage ended it, not the answer's allowance."""
    return stage.finish_reason == "length" and stage.num_output_tokens == ask.max_new_tokens < ask.left


def made_of(task: Task, stage: Generation, started_at: str, seconds: float) -> Made:
    """All that there is of the answer, this stage included."""
    before = task.made or Made(output_ids=[], text="", stages=0, started_at=started_at, latency_seconds=0.0)
    return Made(
        output_ids=before.output_ids + stage.output_ids, text=before.text + stage.text, stages=before.stages + 1,
        started_at=before.started_at, latency_seconds=before.latency_seconds + seconds,
    )  # fmt: skip


def text_ids(stages: Made, last: Generation, answer: Generation, sampling: Mapping[str, Any]) -> list[int] | None:
    """The ids whose text is the answer's, where the texts of its stages together are not: a character's bytes may
    fall on a boundary, and a stop id in a stage's last place was no stop to the server. None: they are."""
    if stages.stages == 1 or ("\ufffd" not in stages.text and answer.matched == last.matched):
        return None
    stopped = answer.finish_reason == "stop" and not sampling.get("no_stop_trim")
    return answer.output_ids[:-1] if stopped else answer.output_ids


def whole(task: Task, ask: Ask, last: Generation, made: Made) -> Generation:
    """The answer as one generation: what a single request would have brought. last: a stage after which it is over.
    meta_info is the last stage's, its counts those of the whole."""
    if made.stages == 1 and ask.max_new_tokens == ask.left:
        return last
    counts = {"prompt_tokens": len(task.prompt_token_ids), "completion_tokens": len(made.output_ids)}
    end = {"finish_reason": "stop", "matched": str(last.output_ids[-1])} if _cut(ask, last) else {}
    return replace(
        last, output_ids=made.output_ids, text=made.text, num_prompt_tokens=len(task.prompt_token_ids),
        num_output_tokens=len(made.output_ids), meta_info=last.meta_info | counts, **end,
    )  # fmt: skip

"""From a response record to the sample that the trainer loads, or to the reason why it gets none. Pure.

Invariant: `input_ids` are the prompt ids as sent followed by the ids as returned, never tokenized again, and the mask
is 1 on each returned id, the stop token included, and 0 elsewhere. A sample is whole or rejected; never cut.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import orjson

from app.reasons import STAGE_OF, Reason
from app.records import RejectedRecord, ResponseRecord, Sample

#: A template opens the reasoning, if at all, with the last few ids of the prompt (`<think>` and a newline).
_PROMPT_END_IDS = 8


@dataclass(frozen=True, slots=True)
class SampleFilters:
    """Which completions are left out of the samples. What is left out is rejected with a reason, and counted."""

    max_sample_tokens: int | None = None  #: prompt and output together
    truncated: Literal["keep", "drop"] = "keep"  #: finish reason "length"
    unclosed_thinking: Literal["keep", "drop"] = "keep"  #: ends inside its reasoning
    think_open_ids: tuple[int, ...] = ()  #: how the model's tokenizer writes `<think>`; () if it has none
    think_close_ids: tuple[int, ...] = ()  #: and `</think>`
    max_repeat: int | None = None  #: tokens of one passage said again and again that a completion may end in

    def to_json(self) -> dict[str, Any]:
        """As run.json says it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Self:
        """Back from `to_json`; what is not said is the default."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in said.items()})

    def differences(self, other: Self) -> list[str]:
        """One phrase per filter that differs, `truncated keep → drop`; the tokenizer's part is left out."""
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{name} {mine[name] or 'off'} → {theirs[name] or 'off'}"
            for name in mine if not name.startswith("think_") and mine[name] != theirs[name]
        ]  # fmt: skip


def sample_of(record: ResponseRecord, filters: SampleFilters, at: str) -> Sample | RejectedRecord:
    """The sample of a response, or its rejection at stage "sample". `at`: the time now, ISO 8601, UTC."""
    verdict = _verdict(record, filters)
    if verdict is not None:
        return _rejection(record, *verdict, at)
    return Sample(
        id=record.id,
        primary_id=record.primary_id,
        dataset=record.dataset,
        turn=record.turn,
        input_ids=record.prompt_token_ids + record.output_ids,
        loss_mask=[0] * len(record.prompt_token_ids) + [1] * len(record.output_ids),
        finish_reason=record.finish_reason,
        num_prompt_tokens=len(record.prompt_token_ids),
        num_output_tokens=len(record.output_ids),
        metadata=_metadata(record),
    )


def samples_of(records: Sequence[ResponseRecord], filters: SampleFilters, at: str) -> list[Sample | RejectedRecord]:
    """The samples of a completion, one for each of its turns in order; or the one rejection that stands for all.

    What is wrong with a turn stands in the history of all that follow, so a row is kept as a whole or not at all.
    """
    derived = [sample_of(record, filters, at) for record in records]
    verdict = next((one for one in derived if isinstance(one, RejectedRecord)), None)
    return derived if verdict is None else [verdict]


def _metadata(record: ResponseRecord) -> str:
    names = ("model", "recipe", "server", "finish_reason", "matched", "max_new_tokens", "turns")
    return orjson.dumps({name: getattr(record, name) for name in names}).decode()


def _verdict(record: ResponseRecord, filters: SampleFilters) -> tuple[Reason, str] | None:
    """Why there is no sample: reason and detail. The first that applies."""
    spoken = _without_stop(record)
    if not spoken:
        what = "only the stop token" if record.output_ids else "no token"
        return Reason.EMPTY_OUTPUT, f"the model returned {what}"
    tokens = len(record.prompt_token_ids) + len(record.output_ids)
    if filters.max_sample_tokens is not None and tokens > filters.max_sample_tokens:
        return Reason.OVER_MAX_SAMPLE_TOKENS, f"{tokens} tokens are more than {filters.max_sample_tokens}"
    if filters.unclosed_thinking == "drop" and is_unclosed(record.prompt_token_ids, record.output_ids, filters):
        return Reason.UNCLOSED_THINKING, f"ends inside its reasoning, after {len(record.output_ids)} tokens"
    if filters.truncated == "drop" and record.finish_reason == "length":
        return Reason.TRUNCATED, f"cut after {len(record.output_ids)} tokens"
    if filters.max_repeat is not None and (loop := loop_tokens(spoken, filters.max_repeat)) > filters.max_repeat:
        return Reason.REPETITION, f"ends in a loop of {loop} tokens"
    return None


def _without_stop(record: ResponseRecord) -> list[int]:
    ids = record.output_ids
    stopped = ids and record.finish_reason == "stop" and record.matched == str(ids[-1])
    return ids[:-1] if stopped else ids


def is_unclosed(prompt_ids: Sequence[int], output_ids: Sequence[int], filters: SampleFilters) -> bool:
    """Whether an answer began to reason, by itself or because the prompt ends so, and never closed it."""
    opening, closing = filters.think_open_ids, filters.think_close_ids
    if not opening or not closing or _last(closing, output_ids) >= 0:
        return False
    prompt_end = prompt_ids[-_PROMPT_END_IDS:]
    return _last(opening, output_ids) >= 0 or _last(opening, prompt_end) > _last(closing, prompt_end)


def loop_tokens(ids: Sequence[int], max_repeat: int) -> int:
    """Tokens at the end of `ids` that are one passage, said at least twice, of at most half of `max_repeat` tokens.

    The longest such end; 0 if there is none. Costs little where nothing repeats, and little more where all does: a
    passage said twice over ends where it ends itself, so multiples of a length are not looked at.
    """
    longest, passages = 0, list[int]()
    for period in range(1, max(1, max_repeat // 2) + 1):
        if any(period % one == 0 for one in passages):
            continue
        same, at = 0, len(ids) - 1
        while at - period >= 0 and ids[at] == ids[at - period]:
            same, at = same + 1, at - 1
        if same >= period:
            longest = max(longest, same + period)
            passages.append(period)
    return longest


def _last(part: Sequence[int], ids: Sequence[int]) -> int:
    """Where a short sequence last begins in a longer one; -1 if nowhere."""
    part = list(part)
    starts = range(len(ids) - len(part), -1, -1)
    return next((at for at in starts if ids[at] == part[0] and list(ids[at : at + len(part)]) == part), -1)


def _rejection(record: ResponseRecord, reason: Reason, detail: str, at: str) -> RejectedRecord:
    return RejectedRecord(
        key=record.key,
        id=record.id,
        primary_id=record.primary_id,
        dataset=record.dataset,
        row_id=record.row_id,
        source_id=record.source_id,
        row_number=record.row_number,
        stage=STAGE_OF[reason],
        reason=reason,
        detail=detail,
        attempts=record.attempt,
        at=at,
    )

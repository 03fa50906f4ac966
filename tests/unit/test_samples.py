"""app.samples: the ids as they were, the mask exact, or a reason."""

from collections import Counter

import orjson
import pytest

from app.reasons import Reason
from app.records import RejectedRecord, Sample
from app.samples import SampleFilters, loop_tokens, sample_of
from tests.run_on_disk import AT, response

OPEN, CLOSE = 100, 101
KEEP_ALL = SampleFilters()
THINKING = SampleFilters(unclosed_thinking="drop", think_open_ids=(OPEN,), think_close_ids=(CLOSE,))


def derived(filters: SampleFilters = KEEP_ALL, **changes) -> Sample | RejectedRecord:
    return sample_of(response(**changes), filters, AT)


def reason(filters: SampleFilters = KEEP_ALL, **changes) -> str:
    """The reason of a rejection, "" for a sample."""
    return getattr(derived(filters, **changes), "reason", "")


def test_a_sample_is_prompt_and_output_as_they_were_with_an_exact_mask():
    """0 on the prompt, 1 on every returned id, the stop token included; plain ints; counts that match."""
    sample = derived(prompt_token_ids=[5, 6, 7], output_ids=[71, 72, 2], matched="2")
    assert sample.input_ids == [5, 6, 7, 71, 72, 2]
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1]
    assert {type(one) for one in sample.loss_mask} == {int}
    assert (sample.num_prompt_tokens, sample.num_output_tokens) == (3, 3)
    assert (sample.id, sample.primary_id) == (response().id, response().primary_id)


def test_metadata_always_has_the_same_keys():
    """Open-ended values are a JSON string, of few fields."""
    expected = {"model", "recipe", "server", "finish_reason", "matched", "max_new_tokens", "turns"}
    assert orjson.loads(derived().metadata).keys() == expected
    assert orjson.loads(derived(finish_reason="length", matched="").metadata).keys() == expected


@pytest.mark.parametrize(
    ("output_ids", "finish_reason", "matched", "expected"),
    [
        ([], "stop", "", "empty_output"),
        ([2], "stop", "2", "empty_output"),
        ([2], "length", "", ""),  # the allowance was one token, and this is it
        ([2], "stop", "###", ""),  # stopped by a string: the token is text
        ([8, 2], "stop", "2", ""),
    ],
)
def test_an_answer_without_a_word_is_no_sample(output_ids, finish_reason, matched, expected):
    """No token, or nothing but the stop token: a mask of nothing is never counted good."""
    assert reason(output_ids=output_ids, finish_reason=finish_reason, matched=matched) == expected


def test_a_rejection_carries_the_identity_of_its_response():
    """Key and ids are the response's, the stage is "sample", the time is the one given."""
    rejected, record = derived(output_ids=[]), response()
    for name in ("key", "id", "primary_id", "dataset", "row_id", "source_id", "row_number"):
        assert getattr(rejected, name) == getattr(record, name)
    assert (rejected.stage, rejected.attempts, rejected.at) == ("sample", record.attempt, AT)


def test_a_sample_that_is_too_long_is_rejected_whole():
    """Never cut: an answer without its end teaches not to end."""
    assert reason(SampleFilters(max_sample_tokens=6)) == ""
    assert reason(SampleFilters(max_sample_tokens=5)) == Reason.OVER_MAX_SAMPLE_TOKENS


def test_truncated_answers_are_kept_unless_told_otherwise():
    """finish_reason length is a field of the sample; `--truncated drop` makes it a rejection."""
    cut = {"finish_reason": "length", "matched": ""}
    assert reason(**cut) == ""
    assert reason(SampleFilters(truncated="drop"), **cut) == Reason.TRUNCATED
    assert reason(SampleFilters(truncated="drop")) == ""


@pytest.mark.parametrize(
    ("prompt", "output", "unclosed"),
    [
        ([5, OPEN, 10], [8, CLOSE, 9], False),  # the prompt opens, the answer closes
        ([5, OPEN, 10], [8, 9], True),
        ([5, OPEN, 10, CLOSE, 10], [8, 9], False),  # thinking switched off by the template
        ([5], [OPEN, 8, CLOSE, 9], False),
        ([5], [OPEN, 8], True),
        ([5], [8], False),  # never began
        ([5, OPEN, 10], [8, CLOSE, 9, OPEN, 9], False),  # tags in the answer itself
        ([OPEN, *range(20)], [8], False),  # said in the conversation, not by the template
    ],
)
def test_an_answer_that_ends_inside_its_reasoning_is_told_from_one_that_does_not(prompt, output, unclosed):
    """Reasoning opened by the template or by the answer, and never closed."""
    changes = {"prompt_token_ids": prompt, "output_ids": output}
    assert reason(THINKING, **changes) == ("unclosed_thinking" if unclosed else "")
    assert reason(SampleFilters(unclosed_thinking="drop"), **changes) == ""  # no such tags known
    assert reason(**changes) == ""


def test_tags_of_several_ids_are_found():
    """A tokenizer may write `<think>` as more than one id."""
    filters = SampleFilters(unclosed_thinking="drop", think_open_ids=(1, 2), think_close_ids=(3, 4))
    assert reason(filters, output_ids=[1, 2, 9]) == Reason.UNCLOSED_THINKING
    assert reason(filters, output_ids=[1, 2, 9, 3, 5, 3, 4]) == ""


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([], 0), ([1, 2, 3, 4], 0), ([1, 2, 3, 3], 2), ([9, 1, 2, 1, 2, 1, 2], 6), ([1, 2, 1, 2, 3], 0),
        ([5] * 40, 40), ([7, *[1, 2, 3] * 5, 1], 16),
    ],
)  # fmt: skip
def test_a_loop_is_one_passage_again_and_again_up_to_the_end(ids, loop):
    """Counted in tokens; a passage said twice in the middle is none."""
    assert loop_tokens(ids, 20) == loop


def test_a_long_loop_is_found_in_one_look():
    """The answers that loop are the longest of all: 32,768 ids of one kind, with any limit, cost what one pass does."""
    looks = 0

    class Counted(list):
        def __getitem__(self, at):
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    assert loop_tokens(Counted([5] * 32_768), 8_000) == 32_768
    assert loop_tokens(Counted([5, 6, 7] * 10_000), 8_000) == 30_000
    assert looks < 4 * 65_536


def test_a_loop_longer_than_allowed_is_rejected_and_the_stop_token_does_not_hide_it():
    """`--max-repeat 10`: ten tokens of it are fine, more are not."""
    filters = SampleFilters(max_repeat=10)
    assert reason(filters, output_ids=[8, *[1, 2] * 5, 2], matched="2") == ""
    assert reason(filters, output_ids=[8, *[1, 2] * 6, 3], matched="3") == Reason.REPETITION
    assert Counter(derived(output_ids=[1, 2] * 6).loss_mask) == {0: 3, 1: 12}

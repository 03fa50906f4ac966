"""What the next request of a staged answer asks for, when the answer is over, and what cannot be asked in stages."""

from dataclasses import replace

import pytest

from app.errors import UsageError
from app.records import Made, Task
from app.sglang.sampling import refuse_stages, sampling_body
from app.sglang.wire import Generation
from tests.belt import manifest
from workers.stages import ask_of, is_over, made_of, text_ids, whole

EOS = 99


def task(made: int = 0, allowance: int = 10) -> Task:
    """A prompt of three ids, and so many made."""
    so_far = Made(output_ids=list(range(made)), text="t" * made, stages=1, started_at="then", latency_seconds=1.0)
    return Task(
        key="k", dataset="d", row_id="r", source_id="", row_number=1, turn=0, turns=1, completion_index=0,
        max_new_tokens=allowance, prompt_token_ids=[1, 2, 3], made=so_far if made else None,
    )  # fmt: skip


def stage(ids: list[int], reason: str = "length", matched: str = "") -> Generation:
    """An answer to one request."""
    return Generation(
        output_ids=ids, text="x" * len(ids), finish_reason=reason, matched=matched, num_prompt_tokens=3,
        num_output_tokens=len(ids), meta_info={"id": "rid", "prompt_tokens": 3, "completion_tokens": len(ids)},
    )  # fmt: skip


def test_a_request_asks_for_a_stage_and_never_for_more_than_the_answer_may_get():
    """4 + 4 + 2 of an allowance of 10; without stages all of it. Later stages are a kind of their own, of one lane."""
    run, off = manifest("http://x", stage_tokens=4), manifest("http://x")
    first, later = ask_of(run, task()), ask_of(run, task(8))
    assert (first.input_ids, first.max_new_tokens, first.left, first.goes_on) == ([1, 2, 3], 4, 10, False)
    assert (later.input_ids, later.max_new_tokens, later.left) == ([1, 2, 3, *range(8)], 2, 2)
    assert (first.stage_kind, first.lane) == (first.kind, later.lane)
    assert later.stage_kind != later.kind == first.kind
    assert ask_of(off, task()).max_new_tokens == 10
    assert ask_of(off, task(4)).max_new_tokens == 6  # begun in stages, gone on with without


@pytest.mark.parametrize(
    ("answer", "over"),
    [
        (stage([5, 6, 7, 8]), False),
        (stage([5, 6, 7, EOS]), True),  # the server looks at the allowance first
        (stage([5, 6, EOS], "stop", "99"), True),
        (stage([5, 6, 7, EOS], "stop", "99"), True),
        (stage([5, 6]), True),  # clipped by the server
    ],
)
def test_an_answer_goes_on_only_where_a_stage_alone_cut_it(answer, over):
    """A stop, a stop id in the last place, or fewer ids than asked end it."""
    assert is_over(ask_of(manifest("http://x", stage_tokens=4), task()), answer, {EOS}) is over


def test_an_answer_ends_with_its_allowance():
    """The last stage may be cut like any request."""
    assert is_over(ask_of(manifest("http://x", stage_tokens=4), task(8)), stage([5, 6]), {EOS})


def test_a_stop_id_in_a_stages_last_place_is_the_stop_that_a_whole_request_would_have_told():
    """Reason, matched and counts are the whole answer's."""
    run = manifest("http://x", stage_tokens=4)
    asked, last = ask_of(run, task(4)), stage([5, 6, 7, EOS])
    made = made_of(task(4), last, "now", 2.0)
    answer = whole(task(4), asked, last, made)
    assert (answer.finish_reason, answer.matched) == ("stop", "99")
    assert (answer.output_ids, answer.num_output_tokens, answer.text) == ([0, 1, 2, 3, 5, 6, 7, EOS], 8, "ttttxxxx")
    assert answer.meta_info == {"id": "rid", "prompt_tokens": 3, "completion_tokens": 8}
    assert (made.stages, made.started_at, made.latency_seconds) == (2, "then", 3.0)


def test_a_text_is_asked_for_where_those_of_the_stages_are_not_it():
    """A damaged character; a stop id that the server took for text. Not where one request brought it all."""
    run = manifest("http://x", stage_tokens=4)

    def ids(text: str, last: Generation, sampling: dict, begun: int = 4) -> list[int] | None:
        so_far = replace(task(begun), made=replace(task(begun).made, text=text)) if begun else task()
        made = made_of(so_far, last, "now", 1.0)
        return text_ids(made, last, whole(so_far, ask_of(run, so_far), last, made), sampling)

    cut, stop, told = stage([5, 6, 7, 8, 9, 10]), stage([5, 6, 7, EOS]), stage([5, EOS], "stop", "99")
    assert ids("fine", told, {}) is None
    assert ids("half\ufffd", told, {}) == [0, 1, 2, 3, 5]
    assert ids("half\ufffd", told, {"no_stop_trim": True}) == [0, 1, 2, 3, 5, EOS]
    assert ids("half\ufffd", stage([5, 6]), {}, begun=8) == [*range(8), 5, 6]
    assert ids("fine", stop, {}) == [0, 1, 2, 3, 5, 6, 7]
    assert ids("", cut, {}, begun=0) is None


@pytest.mark.parametrize(
    "option",
    [
        {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 1},
        {"stop": ["END"]}, {"stop_regex": "a+"}, {"sampling_seed": 1}, {"json_schema": "{}"}, {"regex": "a"},
        {"ebnf": "a"}, {"structural_tag": "a"},
    ],
)  # fmt: skip
def test_what_looks_back_at_an_answer_cannot_be_asked_in_stages(option):
    """A sentence that names the parameter."""
    with pytest.raises(UsageError, match=next(iter(option))):
        refuse_stages(sampling_body({"max_new_tokens": 9, **option}))


def test_all_else_can():
    """What looks at one id at a time is the same in each stage."""
    refuse_stages(
        sampling_body({
            "max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_token_ids": [5],
            "ignore_eos": True, "logit_bias": {"5": 1.0}, "skip_special_tokens": False, "no_stop_trim": True,
        })
    )  # fmt: skip

"""Tokens and masks: the ids that are sent, the ids that come back, and what is trained on."""

import asyncio

import pytest

from app.errors import UsageError
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.samples import SampleFilters, sample_of
from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.sampling import sampling_body
from app.tokenization import Renderer
from tests.belt import ROOT
from tests.run_on_disk import AT, response
from tests.tokenizers import renderer_of

TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
USER = Conversation([{"role": "user", "content": "hi"}])


@pytest.fixture(scope="module")
def demo(demo_tokenizer) -> Renderer:
    return renderer_of(demo_tokenizer)


@pytest.fixture(params=["demo", "kimi", "deepseek", "bos", "tiktoken_like"])
def any_renderer(request, demo_tokenizer, kimi_tokenizer, deepseek_tokenizer) -> Renderer:
    """Each kind of tokenizer: fast, with its own BOS, with its own code."""
    places = {"demo": demo_tokenizer, "kimi": kimi_tokenizer, "deepseek": deepseek_tokenizer}
    return renderer_of(places.get(request.param, TOKENIZERS / request.param), trust_remote_code=True)


def test_c12_the_ids_are_a_flat_list_of_ints(any_renderer):
    """Never a BatchEncoding, whose iteration gives its keys."""
    ids = any_renderer.render(USER)
    assert type(ids) is list
    assert {type(token_id) for token_id in ids} == {int}


def test_c13_there_is_one_bos_where_the_template_writes_one_and_none_is_added():
    """The tokenizer adds one to every text by itself; the ids are those of apply_chat_template(tokenize=True)."""
    bos = renderer_of(TOKENIZERS / "bos")
    ids = bos.render(USER)
    assert bos._tokenizer("x")["input_ids"][0] == bos._tokenizer.bos_token_id
    assert ids.count(bos._tokenizer.bos_token_id) == 1
    silent = renderer_of(TOKENIZERS / "bos", chat_template=str(TOKENIZERS / "strict" / "chat_template.jinja"))
    assert silent.render(USER).count(bos._tokenizer.bos_token_id) == 0


def test_c13_one_bos_with_deepseeks_tokenizer_too(deepseek_tokenizer):
    """Equal to the tokenizer's own call, whose template begins with it."""
    deepseek = renderer_of(deepseek_tokenizer)
    ids = deepseek.render(USER)
    assert ids == deepseek._tokenizer.apply_chat_template(USER.messages, add_generation_prompt=True, return_dict=False)
    assert (ids.count(0), ids[0]) == (1, 0)


@pytest.mark.parametrize("output", [[71, 72, 2], [128_000, 240, 159, 2], [8, 163_607, 9, 2]])
def test_c14_output_ids_are_kept_as_they_came_and_never_made_of_text(output, demo):
    """Ids that a tokenizer would merge, half an emoji, a control token in the middle: byte for byte in the sample."""
    sample = sample_of(response(output_ids=output), SampleFilters(), AT)
    assert sample.input_ids[-len(output) :] == output


def test_c14_text_that_does_not_lead_back_to_its_ids_is_found(demo):
    """`h` and `i` apart, and the first half of an emoji: encoding their text gives other ids."""
    apart = demo.encode("h") + demo.encode("i")
    half = demo.encode("🙂")[:-1]
    for ids in (demo.encode("the")[:0] + demo.encode("t") + demo.encode("he"), half):
        assert demo.encode(demo.decode(ids)) != ids
    assert demo.decode(apart) == "hi"


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({"output_ids": [8], "finish_reason": "length", "matched": ""}, [0, 0, 0, 1]),  # one token
        ({"output_ids": [8, 9], "finish_reason": "length", "matched": ""}, [0, 0, 0, 1, 1]),  # cut before its end
        ({"output_ids": [8, 9, 2]}, [0, 0, 0, 1, 1, 1]),  # the stop token is trained
        ({"output_ids": [8, 7], "matched": "7"}, [0, 0, 0, 1, 1]),  # GLM: ends in the user's opening token
        ({"output_ids": [8, 9], "matched": "###"}, [0, 0, 0, 1, 1]),  # a stop string
        ({"prompt_token_ids": [5], "output_ids": [5, 5, 2]}, [0, 1, 1, 1]),  # the answer repeats the prompt
    ],
)
def test_c15_the_mask_is_exact_at_every_edge(changes, mask):
    """0 on the prompt, 1 on each returned id; as long as the ids."""
    sample = sample_of(response(**changes), SampleFilters(), AT)
    assert sample.loss_mask == mask
    assert len(sample.loss_mask) == len(sample.input_ids)


@pytest.mark.parametrize(("output", "matched"), [([], ""), ([2], "2")])
def test_c15_a_row_with_nothing_to_train_on_is_rejected_and_never_counted_good(output, matched):
    """No token, or nothing but the stop token."""
    assert sample_of(response(output_ids=output, matched=matched), SampleFilters(), AT).reason == "empty_output"


@pytest.mark.parametrize(
    "answer", ["hm</think>Yes.", "hm, cut", "<think>again</think>Yes.", "```\n<think>\n```</think>Yes."]
)
@pytest.mark.parametrize("thinking", [True, False])
def test_c17_what_the_prompt_opens_is_prompt_and_what_comes_back_is_kept(demo_tokenizer, thinking, answer):
    """The template ends in `<think>` (or closes it): mask 0. The answer's tags are the answer's: mask 1."""
    renderer = renderer_of(demo_tokenizer, template_kwargs={"thinking": thinking})
    prompt, output = renderer.render(USER), renderer.encode(answer)
    opener, closer = renderer.encode("<think>"), renderer.encode("</think>")
    assert prompt[-1:] == (opener if thinking else closer)
    sample = sample_of(response(prompt_token_ids=prompt, output_ids=output, matched="###"), SampleFilters(), AT)
    assert sample.input_ids == prompt + output
    assert sample.loss_mask == [0] * len(prompt) + [1] * len(output)
    assert renderer.decode(sample.input_ids[len(prompt) :]) == answer


@pytest.mark.parametrize("ids", [[5, 1000], [-1], []])
def test_c20_ids_outside_the_models_vocabulary_never_leave(ids):
    """Nothing listens there: a request that left would fail to connect, and this one fails for its ids."""

    async def work() -> Fault:
        async with SGLangClient() as client:
            with pytest.raises(Fault) as caught:
                await client.generate("http://127.0.0.1:1", ids, sampling_body({"max_new_tokens": 4}), rid=new_rid(),
                                      deadline_seconds=1, vocab_size=1000)  # fmt: skip
            return caught.value

    assert asyncio.run(work()).kind is FaultKind.BAD_IDS


def test_c20_the_bound_is_the_models_and_rejects_one_row(demo_tokenizer):
    """The tokenizer's own sizes (length, vocab_size) are no bound: its control tokens stand far above them."""
    control = Conversation([{"role": "tool", "content": "x", "tool_call_id": "1"}])
    with pytest.raises(Rejected) as caught:
        renderer_of(demo_tokenizer, model_vocab_size=163_606).render(control)
    assert caught.value.reason == Reason.IDS_OUT_OF_VOCABULARY
    renderer = renderer_of(demo_tokenizer, model_vocab_size=163_607)
    assert max(renderer.render(control)) == 163_606 > len(renderer._tokenizer)


def test_c20_stop_ids_outside_the_vocabulary_are_refused_before_the_run():
    """A stop id of the old tokenizer is a wrong option."""
    with pytest.raises(UsageError, match="stop_token_ids"):
        sampling_body({"max_new_tokens": 4, "stop_token_ids": [163_586]}, vocab_size=1000)

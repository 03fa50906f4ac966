"""app.sglang.wire: what servers say of themselves, and the lies that no file may hold."""

import json
from pathlib import Path

import orjson
import pytest

from app.sglang.faults import Fault, FaultKind, RequestFacts
from app.sglang.wire import EndpointInfo, endpoint_info, generation, loads_from_get_load, loads_from_v1

DATA = Path(__file__).parents[1] / "data" / "sglang"
FACTS = RequestFacts(num_prompt_tokens=3, max_new_tokens=4)


def said_by(version: str) -> dict:
    """The recorded bodies in which a server speaks of itself."""
    return {name: answer["body"] for name, answer in json.loads((DATA / f"client_{version}.json").read_text())["says"].items()}  # noqa: E501


def info_of(version: str, /, **changes: object) -> EndpointInfo:
    """EndpointInfo from recorded bodies, server_info changed."""
    said = said_by(version)
    return endpoint_info("http://h:1", said["model_info"], said["server_info"] | changes, said["v1_models"])


def answer(**changes: object) -> dict:
    """A true answer to FACTS, with changes to its top level or its meta_info."""
    meta = {"id": "r", "finish_reason": {"type": "stop", "matched": 9}, "prompt_tokens": 3, "completion_tokens": 2}
    body = {"text": "t", "output_ids": [8, 9], "meta_info": meta}
    for name, value in changes.items():
        (body if name in body else meta)[name] = value
    return body


@pytest.mark.parametrize(
    ("version", "context", "kv_tokens", "running", "queue"),
    [("0.5.6.post2", 2048, 16384, 16, None), ("0.5.17", 8192, 400000, 256, 512), ("0.5.23", 2048, 16384, 16, None)],
)
def test_each_version_tells_what_capacity_needs(version, context, kv_tokens, running, queue):
    """Three versions, one view."""
    info = info_of(version)
    assert (info.version, info.usable_context, info.kv_tokens) == (version, context, kv_tokens)
    assert (info.max_running_requests, info.max_queued_requests, info.dp_size) == (running, queue, 1)
    assert (info.max_req_input_len, info.dtype, info.kv_cache_dtype) == (context - 6, "auto", "auto")
    assert info.weight_version == "default"
    assert info.skip_tokenizer_init is False


def test_a_router_that_tells_nothing_gives_nones():
    """Nothing known is None, never a guess, and still has an identity."""
    info = endpoint_info("http://h:1", {}, {}, {})
    assert {name for name in EndpointInfo.__slots__ if getattr(info, name) is not None} == {"url"}
    assert (info.kv_tokens, info.usable_context, info.reserved_tokens) == (None, None, 0)
    assert info.fingerprint == endpoint_info("http://other:2", {}, {}, {}).fingerprint


def test_parameters_that_a_router_does_not_hand_on_are_known():
    """As recorded from sglang-router 0.3.2: those that touch the ids are told, from what it says of itself."""
    recorded = json.loads((DATA / "router_0.3.2.json").read_text())
    said, (sent, arrived) = recorded["says"], recorded["forwarded"].values()
    info = endpoint_info("http://h:1", said["GET /get_model_info"]["body"], said["GET /get_server_info"]["body"], {})
    lost = {name for name, value in sent.items() if value is not None and arrived.get(name) != value}
    assert lost == {"logit_bias", "stop_regex", "structural_tag", "spaces_between_special_tokens"}
    assert "which drops logit_bias and stop_regex and structural_tag without" in info.drops(sent)
    assert info.drops(arrived) is None
    assert info_of("0.5.23").drops(sent) is None


def test_nonsense_in_a_field_is_none():
    """A field of a type that it never has is not taken over."""
    said = {"dp_size": "2", "version": 5, "max_total_num_tokens": True, "internal_states": 3}
    info = endpoint_info("u", {}, said, {"data": [7]})
    assert {info.dp_size, info.version, info.max_total_num_tokens, info.max_running_requests} == {None}


def test_data_parallel_ranks_add_up():
    """The KV pool and the running requests of an endpoint are those of all its ranks."""
    states = [{"effective_max_running_requests_per_dp": 8}]
    one_state = info_of("0.5.23", dp_size=4, internal_states=states)
    all_states = info_of("0.5.23", dp_size=4, internal_states=states * 4)
    assert one_state.max_running_requests == all_states.max_running_requests == 32
    assert one_state.kv_tokens == 4 * 16384


def test_speculative_decoding_takes_its_slots_from_the_context():
    """With EAGLE the context that can be used shrinks by the draft tree."""
    info = info_of("0.5.23", speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=4,
                   speculative_num_draft_tokens=8)  # fmt: skip
    assert info.usable_context == 2048 - 12


@pytest.mark.parametrize(("page", "usable"), [(None, 1000), (1, 1000), (64, 1000 - 126)])
def test_a_pool_smaller_than_the_context_limits_prompt_and_answer(page, usable):
    """Of one rank; pages that a prompt and an answer begin are lost to others."""
    info = info_of("0.5.23", max_total_num_tokens=1000, page_size=page, dp_size=2)
    assert (info.usable_context, info.context_length, info.kv_tokens) == (usable, 2048, 2000)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}, {"revision": "abc"},
     {"version": "0.5.24"}, {"speculative_algorithm": "EAGLE"}, {"speculative_num_draft_tokens": 4}],
)  # fmt: skip
def test_the_fingerprint_changes_with_what_changes_answers(change):
    """And only with that: neither with the address nor with capacity."""
    assert info_of("0.5.23", **change).fingerprint != info_of("0.5.23").fingerprint
    bigger = info_of("0.5.23", max_total_num_tokens=1, max_running_requests=1, api_key="k", launch_command="x")
    assert bigger.fingerprint == info_of("0.5.23").fingerprint


def test_api_keys_in_server_info_go_no_further():
    """Servers repeat their own key in /server_info; the view has no place for it, and survives a trip through JSON."""
    info = info_of("0.5.23", api_key="sk-secret", launch_command="--api-key sk-secret")
    assert "sk-secret" not in repr(info)
    assert EndpointInfo(**orjson.loads(orjson.dumps(info))) == info


def test_loads_are_read_from_both_endpoints():
    """/v1/loads where there is one; /get_load counts the waiting among its requests."""
    new = loads_from_v1(said_by("0.5.23")["busy"])
    assert (new.running, new.waiting, new.used_tokens, new.capacity_tokens) == (16, 8, 32, 16384)
    assert (new.retracted, new.token_usage, new.gen_throughput) == (0, 0.002, 15.67)
    old = loads_from_get_load(said_by("0.5.6.post2")["busy"])
    assert (old.running, old.waiting, old.used_tokens, old.capacity_tokens) == (2, 1, 524, None)
    for nothing in (None, {}, [], "x", {"loads": []}, {"detail": "Not Found"}):
        assert loads_from_v1(nothing) is None
        assert loads_from_get_load(nothing) is None


@pytest.mark.parametrize(
    "lie", [{"num_used_tokens": -5}, {"num_used_tokens": 1200}, {"num_running_reqs": -1}, {"max_total_num_tokens": 0},
            {"max_total_num_tokens": -1}],
)  # fmt: skip
def test_figures_that_cannot_be_are_not_told(lie):
    """Fuller than full, fewer than none."""
    rank = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 1000, "max_total_num_tokens": 1000}
    assert loads_from_v1({"loads": [rank]}).used_tokens == 1000
    assert loads_from_v1({"loads": [rank | lie]}) is None


def test_loads_sum_over_ranks_and_keep_the_stalest_time():
    """Two ranks: counts add up, usage is the fuller one's, the time is the older one's."""
    rank = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 3, "max_total_num_tokens": 10}
    loads = loads_from_v1({"loads": [rank | {"token_usage": 0.1, "timestamp": 5.0}, rank | {"token_usage": 0.9, "timestamp": 4.0}]})  # noqa: E501
    assert (loads.running, loads.waiting, loads.used_tokens, loads.capacity_tokens) == (2, 4, 6, 20)
    assert (loads.token_usage, loads.timestamp, loads.gen_throughput, loads.retracted) == (0.9, 4.0, None, None)


def test_a_true_answer_is_a_generation():
    """Ids as returned, the stop token included; what stopped it as text."""
    made = generation(orjson.dumps(answer()), FACTS, vocab_size=10)
    assert (made.output_ids, made.finish_reason, made.matched, made.text) == ([8, 9], "stop", "9", "t")
    assert (made.num_prompt_tokens, made.num_output_tokens, made.meta_info["id"]) == (3, 2, "r")
    cut = generation(orjson.dumps(answer(finish_reason={"type": "length", "length": 2})), FACTS)
    assert (cut.finish_reason, cut.matched) == ("length", ""), "fewer tokens than asked for is true"


def test_a_server_without_a_tokenizer_has_no_text():
    """skip_tokenizer_init: ids and meta_info are all there is, and enough."""
    body = answer()
    del body["text"]
    assert generation(orjson.dumps(body), FACTS).text == ""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (FaultKind.CONTRACT, {"output_ids": None}),
        (FaultKind.CONTRACT, {"output_ids": {}}),
        (FaultKind.CONTRACT, {"meta_info": None}),
        (FaultKind.CONTRACT, {"finish_reason": None}),
        (FaultKind.CONTRACT, {"finish_reason": "stop"}),
        (FaultKind.CONTRACT, {"finish_reason": {"type": "eos"}}),
        (FaultKind.CONTRACT, {"finish_reason": {"type": "stop", "matched": 7}}),
        (FaultKind.CONTRACT, {"finish_reason": {"type": "stop", "matched": 7}, "output_ids": [], "completion_tokens": 0}),  # noqa: E501
        (FaultKind.NAN, {"finish_reason": {"type": "stop", "matched": "NaN happened"}}),
        (FaultKind.ABORTED, {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}),
        (FaultKind.WRONG_COUNTS, {"prompt_tokens": 2}),
        (FaultKind.WRONG_COUNTS, {"completion_tokens": 3}),
        (FaultKind.WRONG_COUNTS, {"completion_tokens": None}),
        (FaultKind.WRONG_COUNTS, {"output_ids": [1, 2, 3, 8, 9]}),  # 0.5.2: the prompt's tail before the answer
        (FaultKind.WRONG_COUNTS, {"output_ids": [1, 1, 1, 8, 9], "completion_tokens": 5}),  # over the allowance
        (FaultKind.BAD_OUTPUT_IDS, {"output_ids": [-1, 9]}),
        (FaultKind.BAD_OUTPUT_IDS, {"output_ids": [10, 9]}),
        (FaultKind.BAD_OUTPUT_IDS, {"output_ids": [8.0, 9]}),
        (FaultKind.BAD_OUTPUT_IDS, {"output_ids": [True, 9]}),
        (FaultKind.BAD_OUTPUT_IDS, {"output_ids": ["8", 9]}),
        (FaultKind.MIXED_WEIGHTS, {"weight_versions": [{"version": "a"}, {"version": "b"}]}),
    ],
)
def test_no_lie_becomes_a_generation(kind, changes):
    """Each way in which a 200 can be untrue is one kind of fault."""
    with pytest.raises(Fault) as caught:
        generation(orjson.dumps(answer(**changes)), FACTS, vocab_size=10)
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"[{}]", b"true", b'"x"', b"<html></html>", b'{"text":"t","output_ids":[8', b'{"text":NaN}',
     b'{"error":{"message":"x"}}', b'{"error":"x"}', b'{"object":"error","message":"x","code":400}'],
)  # fmt: skip
def test_a_200_that_is_no_generation_is_a_bad_body(content):
    """null, lists, HTML, half a body, an error object: none is a success."""
    with pytest.raises(Fault) as caught:
        generation(content, FACTS)
    assert caught.value.kind is FaultKind.BAD_BODY


def test_fields_that_an_answer_may_lack_are_not_missed():
    """Routers and versions leave out what they like; ids, counts of output and the reason are enough."""
    body = {"output_ids": [8], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}
    made = generation(orjson.dumps(body), FACTS)
    assert (made.output_ids, made.matched, made.num_prompt_tokens) == ([8], "", 3)

"""app.drift: which differences between servers are held, which are told, what a run may require and accept."""

from dataclasses import replace

import pytest

from app.drift import GUARDED, allowed, drift, guarded, news, objection, requirements, unmet
from app.errors import UsageError
from app.sglang.wire import EndpointInfo
from tests.unit.test_sglang_wire import info_of

BEFORE = info_of(
    "0.5.23", json_model_override_args="{}", speculative_accept_threshold_single=1.0,
    speculative_accept_threshold_acc=1.0,
)  # fmt: skip
RUN = guarded(BEFORE.identity)


def changed(**fields) -> dict:
    """The identity of the same server with something changed."""
    return replace(BEFORE, **fields).identity


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "/models/other", "model tiny-qwen3 → other"),
        ("weight_version", "v2", "weight_version default → v2"),
        ("quantization", "fp8", "quantization none → fp8"),
        ("revision", "abc", "revision none → abc"),
        ("dtype", "float16", "dtype auto → float16"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype auto → fp8_e5m2"),
        ("json_model_override_args", '{"rope": 1}', 'json_model_override_args {} → {"rope": 1}'),
    ],
)
def test_what_changes_answers_is_named_in_one_line(field, value, words):
    """Also where it was not set at the start: no quantization is one, too."""
    assert drift(RUN, guarded(changed(**{field: value}))) == words
    assert words in objection(RUN, {}, changed(**{field: value}))


@pytest.mark.parametrize(
    "changes", [{"model": "/elsewhere/tiny-qwen3/"}, {"version": "0.5.24"}, {"context_length": 4096}]
)
def test_what_does_not_change_answers_is_used_and_told(changes):
    """Another folder, version or context: no objection, another fingerprint, a line of news."""
    assert objection(RUN, {}, changed(**changes)) is None
    assert replace(BEFORE, **changes).fingerprint != BEFORE.fingerprint
    told = news(BEFORE.identity, changed(**changes))
    assert told is None if "model" in changes else next(iter(changes)) in told
    assert news(BEFORE.identity, BEFORE.identity) is None


def test_a_model_of_the_hub_is_the_one_in_a_folder_of_its_name_and_no_other_owner_s():
    """owner/name and /models/name are one; owner/name and other/name are not."""
    hub, folder, other = (guarded(changed(model=path)) for path in ("owner/name", "/models/name/", "other/name"))
    assert drift(hub, folder) is drift(folder, hub) is drift(folder, other) is None
    assert drift(hub, other) == "model owner/name → other/name"


def test_speculative_decoding_is_held_only_where_it_accepts_what_the_model_would_not_draw():
    """Thresholds of 1 are lossless; and they mean nothing while no draft model is used."""
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
    assert objection(RUN, {}, changed(**eagle)) is None
    assert "speculative_algorithm None → EAGLE" in news(BEFORE.identity, changed(**eagle))
    assert "acc 1.0 → 0.9" in objection(RUN, {}, changed(**eagle, speculative_accept_threshold_acc=0.9))
    assert objection(RUN, {}, changed(speculative_accept_threshold_acc=0.9)) is None


def test_a_server_that_does_not_tell_is_not_another_one():
    """A router, or an old version: untold fields do not differ, but a requirement is not met by them."""
    silent = EndpointInfo(url="http://h:1").identity
    assert objection(RUN, {}, silent) is None
    assert "which it does not tell" in objection(RUN, {"kv_cache_dtype": "auto"}, silent)


def test_a_requirement_names_what_there_is_instead():
    """Text without regard to case; "none" for what is not set."""
    assert unmet({"kv_cache_dtype": "Auto", "quantization": "none", "model": "tiny-qwen3"}, BEFORE.identity) is None
    assert "kv_cache_dtype=bf16, and it has auto" in unmet({"kv_cache_dtype": "bf16"}, BEFORE.identity)


def test_requirements_and_allowances_are_checked_when_they_are_given():
    """One sentence with the fields there are."""
    given = ["kv_cache_dtype=auto", " dtype = bfloat16 "]
    assert requirements(given) == {"kv_cache_dtype": "auto", "dtype": "bfloat16"}
    for text in ("kv_cache_dtype", "colour=red", "dtype="):
        with pytest.raises(UsageError, match="kv_cache_dtype"):
            requirements([text])
    with pytest.raises(UsageError, match="twice"):
        requirements(["dtype=a", "dtype=b"])
    assert allowed(["model", "model"]) == ["model"]
    with pytest.raises(UsageError, match="weight_version"):
        allowed(["version"])
    assert set(GUARDED) <= BEFORE.identity.keys()

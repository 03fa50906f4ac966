"""The simulated server answers what SGLang 0.5.23 answered: recorded requests are sent again and shapes compared."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.integration.simulator_client import call, generate, together, until

RECORDED = Path(__file__).parents[1] / "data" / "sglang" / "recorded-0.5.23"
TOKENIZER = Path(__file__).parents[2] / "app" / "demo_data" / "tokenizer"
BASE = SimulatorConfig(
    vocab_size=151_936, id_high=151_643, eos_id=151_645, context_length=2048, max_total_num_tokens=16_384,
    max_running_requests=16, health_seconds=0.01, speed=50.0, output_mean=500.0, output_lengths="fixed",
)  # fmt: skip
VARIANTS = {
    "apikey": replace(BASE, api_key="right"),
    "kv": replace(BASE, max_total_num_tokens=1000, skip_tokenizer_init=True),
    "skiptok": replace(BASE, skip_tokenizer_init=True),
    "autotrunc": replace(BASE, allow_auto_truncate=True),
}
ELSEWHERE = ("queue_full_3", "queue_full_4", "queue_full_stream", "abort_running_nonstream",
             "eos_second_generation_config_eos")  # fmt: skip
NAMES = sorted(path.stem for path in RECORDED.glob("*.json") if path.stem not in ELSEWHERE)
OPEN_ENDED = {"cached_tokens_details"}  # null or an object, by what the prefix cache held
RATE = "decode_throughput"  # only where more than one token was made
PARTS_WE_LACK = {"/model_info": {"embedding", "cache"}}  # no text model's client reads them


@pytest.fixture(scope="module")
def servers():
    """One server for each way in which the recorded one was started."""
    with (
        running_simulator(BASE) as base,
        running_simulator(VARIANTS["apikey"]) as apikey,
        running_simulator(VARIANTS["kv"]) as kv,
        running_simulator(VARIANTS["skiptok"]) as skiptok,
        running_simulator(VARIANTS["autotrunc"]) as autotrunc,
    ):
        yield {"apikey": apikey, "kv": kv, "skiptok": skiptok, "autotrunc": autotrunc, "": base}


def recorded(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and response of one file, long lists unfolded."""
    exchange = json.loads((RECORDED / f"{name}.json").read_text())
    return exchange["request"], exchange["response"]


def unfolded(value: Any) -> Any:
    """`{"repeat": 5, "times": 3}` -> [5, 5, 5], anywhere inside."""
    if isinstance(value, dict):
        if set(value) == {"repeat", "times"}:
            return [value["repeat"]] * value["times"]
        return {key: unfolded(one) for key, one in value.items()}
    return [unfolded(one) for one in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """A JSON value without its contents: names and kinds."""
    if isinstance(value, dict):
        return {key: "open" if key in OPEN_ENDED else shape(one) for key, one in value.items() if key != RATE}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return value
    return "number" if isinstance(value, int | float) else "text"


def events(body: bytes) -> list[Any]:
    """The JSON events of a stream, which must end as SGLang's do."""
    parts = body.decode().strip().split("\n\n")
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_request_is_answered_in_the_recorded_shape(servers, name):
    """Same status, same content type, same keys with the same kinds of values; same words where a value is refused."""
    request, response = recorded(name)
    server = next(server for prefix, server in servers.items() if name.startswith(prefix))
    body = unfolded(request.get("body"))
    reply = call(server.url, request["path"], body.encode() if isinstance(body, str) else body,
                 request["method"], request["headers"])  # fmt: skip
    assert reply.status == response["status"]
    expected = response["body_text"].encode()
    if response["content_type"].startswith("text/event-stream"):
        assert reply.headers["content-type"] == response["content_type"]
        assert shape(events(reply.body)[-1]) == shape(events(expected)[-1])
        return
    if not expected or request["method"] == "HEAD":
        assert reply.body == b""
        return
    assert reply.headers["content-type"].startswith("application/json")
    ours, theirs = reply.json, json.loads(expected)
    if isinstance(theirs, dict):
        theirs = {key: one for key, one in theirs.items() if key not in PARTS_WE_LACK.get(request["path"], ())}
    assert shape(ours) == shape(theirs)
    if response["status"] != 200 and "object" not in theirs:
        assert ours == theirs


CLIPPED = ("input_plus_max_new_exact", "default_max_new_over", "kv_max_new_over_pool", "autotrunc_input_too_long",
           "autotrunc_total_too_long", "max_new_tokens_0")  # fmt: skip


@pytest.mark.parametrize("name", CLIPPED)
def test_the_allowance_is_clipped_to_the_recorded_number(servers, name):
    """Context and pool cut max_new_tokens (and, with auto-truncate, the prompt) to exactly what SGLang made of them."""
    request, response = recorded(name)
    server = next(server for prefix, server in servers.items() if name.startswith(prefix))
    ours, theirs = call(server.url, "/generate", unfolded(request["body"])).json, json.loads(response["body_text"])
    for key in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert ours["meta_info"][key] == theirs["meta_info"][key]


def test_server_info_holds_only_names_that_sglang_has(servers):
    """A client may not come to rely on a field that exists in the simulator alone."""
    info = call(servers[""].url, "/server_info").json
    assert info["max_total_num_tokens"] == 16_384
    assert info["max_req_input_len"] == 2042
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 16


def test_a_stop_id_ends_the_output_and_is_named(servers):
    """finish_reason stop carries the id, which stays the last of output_ids and is not in the text."""
    _, response = recorded("eos_second_generation_config_eos")
    whole = generate(servers[""].url, [1, 2, 3], max_new_tokens=600).json
    assert shape(whole) == shape(json.loads(response["body_text"]))
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": 151_645}
    assert whole["output_ids"][-1] == 151_645
    tenth = whole["output_ids"][9]
    cut = generate(servers[""].url, [1, 2, 3], max_new_tokens=600, stop_token_ids=[tenth]).json
    assert cut["output_ids"] == whole["output_ids"][:10]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": tenth}


def test_a_stop_in_the_last_allowed_place_is_reported_as_length(servers):
    """SGLang looks at the allowance first: the eos id may stand at the end of a `length`."""
    answer = generate(servers[""].url, [1, 2, 3], max_new_tokens=500).json
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 500}
    assert answer["output_ids"][-1] == 151_645


def test_the_right_key_opens_and_the_scheme_has_no_case(servers):
    """Authorization is `Bearer KEY`, any case of the scheme."""
    assert call(servers["apikey"].url, "/v1/models", headers={"Authorization": "bearer right"}).status == 200


def test_chat_completions_can_return_the_ids():
    """`return_token_ids` gives prompt and response ids in each choice, equal to what /generate makes of the prompt."""
    with running_simulator(replace(BASE, output_mean=20, tokenizer_dir=str(TOKENIZER), vocab_size=163_840)) as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "return_token_ids": True, "n": 2}
        reply = call(server.url, "/v1/chat/completions", body).json
        ids = call(server.url, "/v1/tokenize", {"messages": body["messages"]}).json["tokens"]
        assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [ids, ids]
        assert reply["choices"][0]["response_token_ids"] == generate(server.url, ids, 30).json["output_ids"]
        assert reply["choices"][0]["finish_reason"] == "stop"


class TestQueue:
    """Two run, two wait, the rest is refused; as recorded with the same limits."""

    @pytest.fixture
    def server(self):
        """Slow enough that nothing finishes while we look."""
        config = replace(BASE, max_running_requests=2, max_queued_requests=2, speed=1.0, step_seconds=0.05)
        with running_simulator(config) as server:
            yield server

    def test_a_full_queue_refuses_and_an_abort_answers_what_was_recorded(self, server):
        """503 for the surplus; abort by prefix: running ones answer what they have, queued ones a short body."""
        def ask(rid: str):
            return lambda: generate(server.url, [1, 2, 3], 400, rid=rid, ignore_eos=True)

        def stream_then_abort():
            until(server, queue_full=2, running=2)
            load = call(server.url, "/v1/loads").json["loads"][0]
            streamed = call(server.url, "/generate", {"input_ids": [1], "stream": True})
            call(server.url, "/abort_request", {"rid": "q"})  # nobody has this very rid: ignored
            assert server.stats()["in_flight"] == 4
            call(server.url, "/abort_request", {"abort_all": True})
            return load, streamed

        *replies, (load, streamed) = together([*(ask(f"q{i}") for i in range(6)), stream_then_abort])
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 2)
        kinds = {"Aborted": "abort_running_nonstream", "Abort in waiting queue": "queue_full_3"}
        seen = []
        for reply in replies:
            if reply.status == 503:
                seen.append("full")
                assert reply.json == json.loads(recorded("queue_full_4")[1]["body_text"])
                continue
            message = reply.json["meta_info"]["finish_reason"]["message"]
            seen.append(message)
            assert shape(reply.json) == shape(json.loads(recorded(kinds[message])[1]["body_text"]))
        assert sorted(seen) == ["Abort in waiting queue"] * 2 + ["Aborted"] * 2 + ["full"] * 2
        assert shape(events(streamed.body)) == shape(events(recorded("queue_full_stream")[1]["body_text"].encode()))

    def test_an_abort_takes_every_rid_that_begins_with_it(self, server):
        """`col-1` also ends `col-10`, as SGLang's scheduler matches by prefix."""
        def abort():
            until(server, running=2)
            call(server.url, "/abort_request", {"rid": "col-1"})

        first, second, _ = together([
            lambda: generate(server.url, [1], 400, rid="col-1", ignore_eos=True),
            lambda: generate(server.url, [2], 400, rid="col-10", ignore_eos=True),
            abort,
        ])  # fmt: skip
        assert first.json["meta_info"]["finish_reason"]["type"] == "abort"
        assert second.json["meta_info"]["finish_reason"]["type"] == "abort"

    def test_a_rid_in_flight_may_not_be_used_again(self, server):
        """400, and the first goes on."""
        def again():
            until(server, running=1)
            return generate(server.url, [1], 2, rid="dup")

        first, second = together([lambda: generate(server.url, [1], 10, rid="dup", ignore_eos=True), again])
        assert second.json == {"error": {"message": "Duplicate request ID detected: dup"}}
        assert len(first.json["output_ids"]) == 10


def test_behind_a_router_the_simulator_says_as_little():
    """What sglang-router 0.3.2 answered, path by path."""
    recorded = json.loads((RECORDED.parent / "router_0.3.2.json").read_text())["says"]
    with running_simulator(replace(BASE, behind_router=True)) as server:
        for asked, said in recorded.items():
            method, path = asked.split()
            body = {"messages": [{"role": "user", "content": "hi"}]} if path == "/v1/tokenize" else {"rid": "x"}
            answer = call(server.url, path, body if method == "POST" else None)
            assert answer.status == said["status"], asked
            if isinstance(said["body"], dict):
                assert shape(said["body"]).items() <= shape(answer.json).items(), asked


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2."),
        ({"frequency_penalty": 9}, "frequency_penalty must be in [-2, 2], got 9."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0."),
    ],
)
def test_values_out_of_range_are_refused_in_the_real_servers_words(servers, params, message):
    """As a 0.5.23 answered."""
    answer = generate(servers[""].url, [5, 6], 3, **params)
    assert (answer.status, answer.json) == (400, {"error": {"message": message}})


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_paused_server_is_not_ready_and_goes_on_where_it_was(mode):
    """What ran goes on or was aborted; what comes meanwhile waits inside the server; bodies as a 0.5.23's."""
    with running_simulator(replace(BASE, speed=1.0, step_seconds=0.005)) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate, server.url, [5, 6], 60)
        until(server, running=1)
        paused = call(server.url, "/pause_generation", {"mode": mode})
        assert (paused.status, paused.json) == (200, {"message": "Generation paused successfully.", "status": "ok"})
        waiting = pool.submit(generate, server.url, [7, 8], 3)
        assert call(server.url, "/ready").status == 503
        made = server.stats()["generated_tokens"]
        assert not waiting.done()
        assert server.stats()["generated_tokens"] == made
        resumed = call(server.url, "/continue_generation", {})
        assert resumed.json == {"message": "Generation continued successfully.", "status": "ok"}
        assert len(waiting.result().json["output_ids"]) == 3
        ended = running.result().json["meta_info"]
        assert ended["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
        assert call(server.url, "/ready").status == 200


def test_weights_get_another_name_while_it_runs():
    """/update_weight_version, which answers tell from then on."""
    with running_simulator(BASE) as server:
        body = {"new_version": "v2", "abort_all_requests": False}
        answer = call(server.url, "/update_weight_version", body)
        assert answer.json == {"success": True, "message": "Weight version updated to v2", "new_version": "v2"}
        assert call(server.url, "/model_info").json["weight_version"] == "v2"
        assert generate(server.url, [5, 6], 3).json["meta_info"]["weight_version"] == "v2"


@pytest.mark.parametrize(("cached", "prefilled"), [(True, 40), (False, 40 + 48)])
def test_a_request_that_goes_on_with_an_answer_finds_it_in_the_cache(cached, prefilled):
    """Where there is one: prompt and answer of the first are not prefilled again. Ids are the same either way."""
    config = SimulatorConfig(output_lengths="fixed", output_mean=20, step_seconds=0.0005, prefix_cache=cached)
    with running_simulator(config) as server:
        prompt = [7] * 40
        first = generate(server.url, prompt, 8).json["output_ids"]
        assert len(generate(server.url, prompt + first, 30).json["output_ids"]) == 12
        assert server.stats()["prefilled_tokens"] == prefilled

"""The simulated server beside the real one: the same requests, the same status and the same shape of body."""

import json
from typing import Any

import httpx
import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from tests.integration.test_simulator_wire import shape

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
IDS = [300, 301, 302]
SHORT = {"max_new_tokens": 3, "ignore_eos": True}  # so that length and reason do not hang on the model
CHAT = {"messages": [{"role": "user", "content": "Say x."}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def with_ids(ids: Any, **more: Any) -> tuple[str, str, dict]:
    """A generation from these ids."""
    return "POST", "/generate", {"input_ids": ids, "sampling_params": SHORT} | more


def ask(**sampling: Any) -> tuple[str, str, dict]:
    """A generation with these parameters."""
    return with_ids(IDS, sampling_params={**SHORT, **sampling})


SAME = {
    "a generation": ask(), "greedy": ask(temperature=0), "a single token": ask(max_new_tokens=1),
    "no token": ask(max_new_tokens=0), "two of one prompt": ask(n=2), "a batch": with_ids([IDS, IDS]),
    "with its prompt": with_ids(IDS, return_prompt_token_ids=True), "its own rid": with_ids(IDS, rid="mine"),
    "twice one rid": with_ids([IDS, IDS], rid=["mine", "mine"]), "a number as rid": with_ids(IDS, rid=5),
    "an unknown field": with_ids(IDS, nonsense=1), "from text": with_ids(None, text="Say x."),
    "nothing to answer": ("POST", "/generate", {}), "no ids": with_ids([]), "null": with_ids(None),
    "a float": with_ids([1.0, 2]), "a float later": with_ids([1, 2.5]), "text as ids": with_ids("5"),
    "true": with_ids([True]), "65 bits": with_ids([1, 2**65]), "a list among ids": with_ids([1, [2]]),
    "null among ids": with_ids([1, None]), "too long": with_ids([5] * 2048), "too long together": with_ids([5] * 2046),
    "a number for a list": with_ids(5),
    "an unknown parameter": ask(max_tokens=3), "seed": ask(seed=1), "a text for a number": ask(temperature="0.5"),
    "a float for a count": ask(max_new_tokens=1.5), "less than none": ask(max_new_tokens=-1), "top_p 0": ask(top_p=0),
    "top_p 2": ask(top_p=2), "top_k 0": ask(top_k=0), "top_k -2": ask(top_k=-2), "temperature -1": ask(temperature=-1),
    "min_p 2": ask(min_p=2), "penalty 9": ask(frequency_penalty=9), "repetition 0": ask(repetition_penalty=0),
    "more than all": ask(min_new_tokens=9), "no copies": ask(n=0), "null stop": ask(stop=None),
    "a stop text": ask(stop=["zzz"]),
    "a text as flag": ask(ignore_eos="yes"), "stop ids of text": ask(stop_token_ids=["a"]),
    "a number for parameters": with_ids(IDS, sampling_params=5),
    "the model": ("GET", "/model_info", None), "by its old name": ("GET", "/get_model_info", None),
    "itself": ("GET", "/", None), "health": ("GET", "/health", None), "ready": ("GET", "/ready", None),
    "models": ("GET", "/v1/models", None),
    "loads": ("GET", "/v1/loads", None), "old loads": ("GET", "/get_load", None), "nowhere": ("GET", "/nowhere", None),
    "GET to generate": ("GET", "/generate", None), "abort of nobody": ("POST", "/abort_request", {"rid": "nobody"}),
    "tokens": ("POST", "/v1/tokenize", CHAT), "tokens with tools": ("POST", "/v1/tokenize", {**CHAT, "tools": TOOLS}),
    "tokens of text": ("POST", "/v1/tokenize", {"prompt": "Say x."}), "tokens of nothing": ("POST", "/v1/tokenize", {}),
    "tokens of no message": ("POST", "/v1/tokenize", {"messages": []}),
    "a chat": ("POST", "/v1/chat/completions", {**CHAT, "model": "x", "max_tokens": 3, "ignore_eos": True}),
    "a pause": ("POST", "/pause_generation", {"mode": "in_place"}), "not ready in it": ("GET", "/ready", None),
"its end": ("POST", "/continue_generation", {}),
    "another version": ("POST", "/update_weight_version", {"new_version": "other", "abort_all_requests": False}),
    "which is told": ("GET", "/model_info", None), "and in answers": ask(),
    "the old version": ("POST", "/update_weight_version", {"new_version": "default", "abort_all_requests": False}),
    "health in the end": ("GET", "/health", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def both(targets):
    """The real server and a simulated one of the same sizes."""
    if targets[0].version != SimulatorConfig.version or not (targets[0].tokenizer / "tokenizer.json").exists():
        pytest.skip(f"the simulator speaks as {SimulatorConfig.version}, with the tokenizer of a tokenizer.json")
    config = SimulatorConfig(
        vocab_size=4224, id_low=256, id_high=4000, eos_id=4098, context_length=targets[0].context,
        max_total_num_tokens=16_384, max_running_requests=16, tokenizer_dir=str(targets[0].tokenizer), speed=50.0,
    )  # fmt: skip
    with running_simulator(config) as simulated:
        yield targets[0], simulated.url


@pytest.mark.parametrize("name", SAME)
def test_the_simulator_answers_as_the_real_server(both, name):
    """Status and shape; of ids, the ids."""
    method, path, body = SAME[name]
    target, simulator = both
    real, simulated = (answered(url, method, path, body, target.key) for url in (target.url, simulator))
    assert simulated[0] == real[0], (real, simulated)
    if path == "/v1/tokenize" and real[0] == 200:
        assert simulated[1] == real[1]
    elif path.endswith("model_info"):
        assert shape(simulated[1]).items() <= shape(real[1]).items()
    else:
        assert shape(simulated[1]) == shape(real[1]), (real, simulated)


def answered(url, method, path, body, key):
    """(status, JSON or text)."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    content = None if body is None else json.dumps(body).encode()
    reply = httpx.request(
        method, f"{url}{path}", content=content, headers=headers | {"content-type": "application/json"}, timeout=60
    )
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, reply.text

"""Nothing that Headrace can be given makes it send what kills a server: seeded nonsense through client and producer."""

import asyncio
import json
import math
import os
import random
from collections import Counter
from itertools import islice

import pytest
from pydantic import SecretStr

from app.errors import UsageError
from app.reasons import Reason
from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.sampling import sampling_body
from app.tokenization import Renderer, RenderOptions
from tests.acceptance.harness import run, status, verified

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SEED = int(os.environ.get("SEED", "1"))
NUMBERS = [
    0, 1, -1, 2, 3, 7, 1.0, 0.5, 1.5, -0.0, 1e-300, 1e-5, 0.999, 2.0, 100, 1e30, 1e308, 2**31 - 1, 2**31, 2**63, 2**65,
    math.nan, math.inf, -math.inf, True, False, None, "1", "", [], {}, "nan",
]  # fmt: skip
TEXTS = ["a", "", " ", "\0", "\ud800", "é" * 50, "the", "<|im_end|>", "\n\n", "🙂", "[", "(?i)x", "x" * 300]


@pytest.fixture(scope="module")
def vocabulary(targets):
    """How many ids our tokenizer knows: what the producer lets through."""
    return Renderer(RenderOptions(str(targets[0].tokenizer))).vocab_size


def asked(target, requests):
    """(what was asked, the fault or None) of each request (ids, sampling, vocabulary), eight at a time."""

    async def one(client, gate, ids, sampling, vocabulary):
        async with gate:
            try:
                await client.generate(
                    target.url, ids, sampling, rid=new_rid(), deadline_seconds=120, vocab_size=vocabulary
                )
            except Fault as fault:
                return fault
            return None

    async def all_of_them():
        gate = asyncio.Semaphore(8)
        async with SGLangClient(SecretStr(target.key)) as client:
            return await asyncio.gather(*(one(client, gate, *request) for request in requests))

    requests = list(requests)
    return list(zip(requests, asyncio.run(all_of_them()), strict=True))


def test_ids_that_the_model_does_not_have_are_not_sent(target, vocabulary):
    """Each kind of wrong id among good ones; good ones up to the edges of the vocabulary are served."""
    chance = random.Random(SEED)
    wrong = [
        -1,
        vocabulary,
        vocabulary + 10_000,
        2**31,
        2**63,
        2**65,
        -(2**65),
        1.0,
        math.nan,
        True,
        None,
        "5",
        [],
        [5],
    ]
    sampling = sampling_body({"max_new_tokens": 2})
    prompts = [[], [[]], [[1]], *([one] for one in wrong)]
    for one in wrong * 4:
        good = [chance.randrange(vocabulary) for _ in range(chance.randrange(1, 20))]
        good.insert(chance.randrange(len(good) + 1), one)
        prompts.append(good)
    for (ids, *_), fault in asked(target, ((ids, sampling, vocabulary) for ids in prompts)):
        assert fault is not None, ids
        assert fault.kind is FaultKind.BAD_IDS, ids
    good = [[0], [vocabulary - 1], [0, vocabulary - 1] * 50]
    good += [[chance.randrange(vocabulary) for _ in range(chance.randrange(1, 200))] for _ in range(20)]
    assert [fault for _, fault in asked(target, ((ids, sampling, None) for ids in good)) if fault] == []


@pytest.mark.parametrize("allowance", NUMBERS, ids=repr)
def test_no_allowance_of_another_kind_than_a_count_is_sent(target, allowance):
    """A float for max_new_tokens killed servers up to 0.5.17."""
    sampling = sampling_body({"max_new_tokens": 2}) | {"max_new_tokens": allowance}
    ((_, fault),) = asked(target, [([300, 301], sampling, None)])
    if type(allowance) is int and 0 < allowance < 2**31:
        assert fault is None or fault.kind is FaultKind.BAD_PARAMETERS  # the server's own 400
    else:
        assert fault.kind is FaultKind.BAD_PARAMETERS
        assert "whole number" in fault.detail  # said by us


def options(chance, vocabulary):
    """Sampling options, most of them right, some of another type, range or meaning."""
    ids = [0, 1, 300, vocabulary - 1, vocabulary, -1, 2**40, 1.0, "3", None, True]
    pools = {
        "temperature": NUMBERS, "top_p": NUMBERS, "top_k": NUMBERS, "min_p": NUMBERS, "frequency_penalty": NUMBERS,
        "presence_penalty": NUMBERS, "repetition_penalty": NUMBERS, "min_new_tokens": NUMBERS, "n": NUMBERS,
        "ignore_eos": [True, False, 1, "true", None], "skip_special_tokens": [True, False, 0],
        "no_stop_trim": [True, False, 1], "sampling_seed": NUMBERS,
        "stop": [*TEXTS, ["a", "b"], [""], [1], [], ["a"] * 33],
        "stop_token_ids": [[one] for one in ids] + [[], [1, 2], [[1]], 5],
        "logit_bias": [{str(one): value} for one in ids for value in (1.0, -100, 1e308, math.nan, "1", None)],
        "seed": [1], "max_tokens": [5], "stop_regex": ["a+", ["b"], "", 5],
    }  # fmt: skip
    names = chance.sample(sorted(pools), chance.choice([1, 1, 1, 2, 3]))
    return {"max_new_tokens": chance.choice([1, 2, 4]), **{name: chance.choice(pools[name]) for name in names}}


def test_every_parameter_that_we_let_through_is_served(target, vocabulary):
    """What sampling_body takes, the server answers, with no 400 that blames it; the rest is a sentence."""
    chance, refused, sent = random.Random(SEED), Counter(), []
    for _ in range(900):
        given = options(chance, vocabulary)
        try:
            sent.append(([300, 301], sampling_body(given, vocab_size=vocabulary), None))
        except UsageError as error:
            refused[str(error).split(";")[0][:40]] += 1
    assert len(refused) > 20
    assert len(sent) > 150
    assert [
        (one[1], str(fault)) for one, fault in asked(target, sent) if fault and fault.kind is not FaultKind.NAN
    ] == []


def odd_rows(chance):
    """Records that no data set should have, and that each one has."""
    values = [one for one in TEXTS if one != "\ud800"]
    values += [None, 5, True, [], {}, [[]], math.nan, "x" * 9000, "<|im_end|><|im_user|>", "\r\n\t\x7f"]
    roles = ["user", "user", "system", "assistant", "tool", "", None, 7]
    while True:
        content, role = chance.choice(values), chance.choice(roles)
        message, user = {"role": role, "content": content}, {"role": "user", "content": "Say x."}
        call = {"id": chance.choice(values), "function": {"name": "f", "arguments": chance.choice(["{}", "{", 5, {}])}}
        caller, answer = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": content}
        tools = [{"type": "function", "function": {"name": chance.choice(["f", "", 5, None]), "parameters": {}}}]
        yield chance.choice([
            {"prompt": content}, {"messages": [message]}, {"messages": content}, {"text": content}, {},
            {"messages": [user, message]}, {"conversations": [{"from": role, "value": content}]},
            {"messages": [user], "tools": chance.choice([tools, content, [content]])},
            {"messages": [user, caller | {"content": content}, answer | {"content": "5"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": content}, content]}]},
        ])  # fmt: skip


def test_odd_rows_are_served_or_rejected_with_a_reason(run_words, target, tmp_path):
    """Each row of 400 is accounted for, whatever it is, and all are asked of a server that stays."""
    file, torn = (
        tmp_path / "odd.jsonl",
        ["", "{", "[1]", '"text"', "null", '{"prompt": "\\ud800"}', "\ufeff{}", "5" * 5000],
    )
    lines = [json.dumps(row) for row in islice(odd_rows(random.Random(SEED)), 400)]
    file.write_text("\n".join(lines[:200] + torn + lines[200:]) + "\n", encoding="utf-8")
    out = tmp_path / "out"
    with run(out, *run_words(file, max_new_tokens=4)) as started:
        assert started.wait(600) == 5, started.text()
    totals = status(out)["totals"]
    assert totals["rows"] == totals["tokenized"] + totals["rejected"]
    assert totals["tokenized"] > 50
    ours = {Reason.REFUSED, Reason.ATTEMPTS_EXHAUSTED, Reason.CRASHES_ENDPOINT}
    assert not ours & set(totals["rejected_by_reason"])
    assert verified(out)

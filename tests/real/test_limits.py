"""What a real SGLang takes and what it refuses: contexts to the token, a full queue, a pool that overflows, keys."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from app.sglang.client import SGLangClient, new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.sampling import sampling_body
from app.tokenization import Renderer, RenderOptions
from producers.shapes import conversation_of
from tests.acceptance.harness import DEMO, headrace, run, status, verified
from tests.belt import until
from tests.real.runs import finished, raw
from tests.real.server import get, metric, post

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
WHOLE = {"ignore_eos": True, "temperature": 0.0}
NEW = 8
KEY = "the-right-key"


@pytest.mark.parametrize(("below", "made"), [(3, NEW), (2, NEW), (1, NEW - 1), (0, NEW - 2), (-1, None)])
def test_at_the_edge_of_its_context_the_server_cuts_or_refuses(target, below, made):
    """prompt + max_new_tokens, so many below the context: two are always cut off; beyond it is a TOO_LONG."""
    prompt = [300 + place % 7 for place in range(target.context - below - NEW)]

    async def ask():
        async with SGLangClient(SecretStr(target.key)) as client:
            sampling = sampling_body({**WHOLE, "max_new_tokens": NEW})
            limits = await client.info(target.url)
            return await client.generate(
                target.url, prompt, sampling, rid=new_rid(), deadline_seconds=300, limits=limits, parameters_proven=True
            )

    if made is None:
        with pytest.raises(Fault) as refused:
            asyncio.run(ask())
        assert refused.value.kind is FaultKind.TOO_LONG
    else:
        assert asyncio.run(ask()).num_output_tokens == made


def test_a_run_takes_rows_up_to_what_the_server_answers_in_full(run_words, target, tmp_path):
    """Two below the context: in, and whole. Nearer: rejected by the producer, with not one request."""
    file = tmp_path / "edges.jsonl"
    wanted = {f"{below} below": target.context - NEW - below for below in (3, 2, 1, 0, -1)}
    write_rows(file, target.tokenizer, wanted)
    out = tmp_path / "out"
    words = run_words(file, max_new_tokens=NEW)
    with run(out, *words, "--sampling", json.dumps(WHOLE)) as started:
        assert started.wait(600) == 5, started.text()
    assert {line["source_id"]: line["num_output_tokens"] for line in raw(out)} == {"3 below": NEW, "2 below": NEW}
    assert status(out)["totals"]["rejected_by_reason"] == {"too_long": 3}
    assert verified(out)


def write_rows(file, tokenizer, sizes):
    """Rows with names, whose prompts have so many ids."""
    renderer = Renderer(RenderOptions(str(tokenizer)))

    def row(name, words, letters):
        return {"id": name, "messages": [{"role": "user", "content": " the" * words + "x" * letters}]}

    def length(one):
        return len(renderer.render(conversation_of(one)))

    frame = length(row("", 1, 0)) - 1
    with file.open("w") as out:
        for name, size in sizes.items():
            rows = (row(name, size - frame - letters, letters) for letters in range(8))
            out.write(json.dumps(next(one for one in rows if length(one) == size)) + "\n")


def test_a_full_queue_slows_the_run_and_costs_no_row_an_attempt(serve, run_words, tmp_path):
    """Strangers fill two places to run and two to wait; refused rows come again, uncharged."""
    out = tmp_path / "out"
    with serve("--max-queued-requests", "2", running=2) as server, strangers(server.url, 3, tokens=20):
        words = run_words(DEMO / "gsm8k.jsonl", urls=(server.url,))
        with run(out, *words, "--limit", 12, "--concurrency", 8) as started:
            assert finished(started), started.text()
        assert metric(server.url, "sglang:http_responses_total", 'status_code="503"') > 0
    assert len(raw(out)) == 12
    assert "attempts_exhausted" not in status(out)["totals"]["rejected_by_reason"]
    assert verified(out)


@pytest.fixture(scope="module")
def small(serve):
    """Another model, with a key, a small pool and no tokenizer."""
    with serve("--api-key", KEY, "--skip-tokenizer-init", model=1, kv=1000) as server:
        yield server


def test_a_pool_that_overflows_loses_nothing(small, run_words, tmp_path, monkeypatch):
    """Strangers make it retract; answers that were pushed out and came back are whole, without a server's text."""
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    out = tmp_path / "out"
    with strangers(small.url, 2, tokens=250, key=KEY, together=4):
        words = run_words(DEMO / "gsm8k.jsonl", urls=(small.url,), max_new_tokens=120)
        with run(out, *words, "--limit", 20) as started:
            assert finished(started), started.text()
        until(lambda: metric(small.url, "sglang:num_retracted_requests_total") > 0, 120, what="retractions")
    lines = raw(out)
    assert len(lines) == 20
    assert {line["text"] for line in lines} == {""}
    assert verified(out)


def test_a_prompt_larger_than_the_pool_is_rejected_before_it_is_sent(small, run_words, tmp_path, monkeypatch):
    """The pool holds 1000 tokens, so a prompt 994 at most, whatever the context."""
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    file = tmp_path / "pool.jsonl"
    write_rows(file, small.model, {str(size): size for size in (900, 993, 994, 1200)})
    out = tmp_path / "out"
    with run(out, *run_words(file, urls=(small.url,), max_new_tokens=4)) as started:
        assert started.wait(300) == 5, started.text()
    rejected = status(out)["totals"]["rejected_by_reason"]
    assert rejected.pop("too_long") == 2
    assert set(rejected) <= {"empty_output"}
    assert {line["source_id"] for line in raw(out)} == {"900", "993"}


def test_a_run_takes_rows_up_to_what_the_pool_answers_in_full(small, run_words, tmp_path, monkeypatch):
    """The pool cuts short without a word, and not even with a 400: rows that need more than 998 are rejected."""
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    body = {"input_ids": [300] * (1000 - NEW - 1), "sampling_params": {**WHOLE, "max_new_tokens": NEW}}
    assert post(small.url, "/generate", body, KEY).json()["meta_info"]["completion_tokens"] == NEW - 1
    file = tmp_path / "pool.jsonl"
    write_rows(file, small.model, {f"{below} below": 1000 - NEW - below for below in (3, 2, 1, 0, -20)})
    out = tmp_path / "out"
    words = run_words(file, urls=(small.url,), max_new_tokens=NEW)
    with run(out, *words, "--sampling", json.dumps(WHOLE)) as started:
        assert started.wait(300) == 5, started.text()
        assert "its KV pool (1,000 tokens) is smaller than its context (2,048)" in started.text()
    assert {line["source_id"]: line["num_output_tokens"] for line in raw(out)} == {"3 below": NEW, "2 below": NEW}
    assert status(out)["totals"]["rejected_by_reason"] == {"too_long": 3}
    assert verified(out)


@pytest.mark.parametrize("key", ["", "another-key"])
def test_a_wrong_key_ends_the_command_with_the_remedy(small, run_words, tmp_path, monkeypatch, key):
    """Exit 2 before the first row; the key itself is nowhere."""
    if key:
        monkeypatch.setenv("HEADRACE_API_KEY", key)
    words = run_words(DEMO / "gsm8k.jsonl", urls=(small.url,))
    done = headrace("run", "--out", tmp_path / "out", *words, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "HEADRACE_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr
    assert not key or key not in done.stderr


def test_of_two_models_only_the_runs_own_is_used(small, run_words, target, tmp_path, monkeypatch):
    """The first endpoint decides; the other is held and named."""
    if target.key:
        pytest.skip("two servers with two keys")
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    out = tmp_path / "out"
    words = run_words(DEMO / "gsm8k.jsonl", urls=(target.url, small.url))
    with run(out, *words, "--limit", 20) as started:
        assert finished(started), started.text()
    assert {line["endpoint"] for line in raw(out)} == {target.url}
    assert f"{small.url} is held" in started.log.read_text()
    assert verified(out)


@contextmanager
def strangers(url, count, *, tokens, key="", together=1):
    """So many clients that are not ours ask one thing after the other; together: prompts that come at once, and grow
    in step, however busy this machine is."""
    over = threading.Event()

    def ask(number):
        prompts = [[400 + 8 * number + one] * 40 for one in range(together)]
        body = {"input_ids": prompts, "sampling_params": {**WHOLE, "max_new_tokens": tokens}}
        while not over.is_set():
            if post(url, "/generate", body, key).status_code == 503:
                over.wait(0.2)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_metrics_and_loads_tell_the_same_pool(small):
    """What admission reads from /v1/loads is what /metrics shows."""
    loads = get(small.url, "/v1/loads", KEY).json()["loads"][0]
    assert metric(small.url, "sglang:max_total_num_tokens") == loads["max_total_num_tokens"] == 1000

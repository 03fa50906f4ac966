"""What decides about prompts, from the command line to the files: prefill, tools as the server has them, parity."""

import json
from dataclasses import replace

import pytest

from app.records import Conversation
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.tokenization import Renderer, RenderOptions
from producers.catalog import read_row
from producers.readers import read_records
from producers.shapes import ShapeOptions
from tests.acceptance.harness import IDS, TOKENIZER, headrace, run, status, verified
from tests.belt import ROOT

pytestmark = pytest.mark.timeout(400)  # several whole runs in one test
DATA = ROOT / "tests" / "data" / "datasets"
QUICK = SimulatorConfig(**IDS, output_mean=20, step_seconds=0.002)
END_OF_TURN = 163_586


def lines(out, name: str) -> list[dict]:
    return [json.loads(line) for path in sorted(out.glob(f"*/{name}")) for line in path.open("rb")]


def run_json(out) -> dict:
    return json.loads((out / "run.json").read_text())


def test_a_server_with_another_template_stops_the_run_and_skip_parity_goes_on(tmp_path):
    """Exit 2 and nothing sent; with --skip-parity the run is made, and run.json says that nobody compared."""
    with running_simulator(QUICK) as server:
        server.faults(tokenize="other")
        words = [DATA / "gsm8k.jsonl", "--endpoint", server.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 64]
        out = tmp_path / "out"
        done = headrace("run", *words, "--out", out, timeout=110)
        assert done.returncode == 2
        assert "makes another prompt of row 1 of" in done.stderr
        assert not lines(out, "raw_responses.jsonl")
        with run(out, *words, "--skip-parity") as started:
            assert started.wait() == 0, started.text()
        assert run_json(out)["parity"] == {"skipped": True}


@pytest.mark.long
def test_tools_come_in_the_form_of_the_first_server_and_stay_so(tmp_path):
    """A run begun on 0.5.17 keeps its recipe when it is resumed on 0.5.23: the difference is told, nothing is mixed."""
    out = tmp_path / "out"
    words = [DATA / "bfcl_live_simple.json", "--tokenizer", TOKENIZER, "--max-new-tokens", 64]
    with running_simulator(replace(QUICK, version="0.5.17")) as old:
        with run(out, *words, "--endpoint", old.url, "--limit", 1) as started:
            assert started.wait() == 0, started.text()
    assert run_json(out)["recipe"]["rendering"]["tools"] == "types"
    assert run_json(out)["parity"]["compared"] == {old.url: 1}
    prompt = Renderer(RenderOptions(str(TOKENIZER))).decode(lines(out, "raw_responses.jsonl")[0]["prompt_token_ids"])
    assert '"strict": false}, "defer_loading": null}]' in prompt
    with running_simulator(QUICK) as new:
        done = headrace("run", *words, "--endpoint", new.url, "--out", out, timeout=110)
        assert (done.returncode, done.stderr.count("rows with tools are left out")) == (0, 1), done.stderr
    assert run_json(out)["recipe"]["rendering"]["tools"] == "types"
    assert run_json(out)["parity"]["without_tools"] == [new.url]
    assert len({line["recipe"] for line in lines(out, "raw_responses.jsonl")}) == 1
    assert verified(out)


@pytest.mark.long
def test_a_run_begun_with_adopted_answers_goes_on_with_tools_as_their_prompts_have_them(tmp_path):
    """Its rows with tools cannot be the server's own: said, in run.json, and the other rows are compared."""
    given = Renderer(RenderOptions(str(TOKENIZER)))
    tools, plain, out = DATA / "bfcl_live_simple.json", DATA / "gsm8k.jsonl", tmp_path / "out"
    rows = [read_row(raw, ShapeOptions())[1] for raw in read_records(tools)]
    prompts = [given.render(row) for row in rows]
    old = [{"prompt_token_ids": ids, "output_ids": [300, END_OF_TURN], "finish_reason": "stop"} for ids in prompts[:-1]]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "raw_responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    words = [f"d={tools}", f"d={plain}", "--tokenizer", TOKENIZER, "--max-new-tokens", 64]
    done = headrace("adopt", out, tmp_path / "old", *words, "--json")
    assert json.loads(done.stdout)["verdicts"] == {"trusted": len(old)}, done.stdout + done.stderr
    with running_simulator(QUICK) as server:
        done = headrace("run", *words, "--endpoint", server.url, "--out", out, timeout=110)
        assert (done.returncode, done.stderr.count("rows with tools are left out")) == (0, 1), done.stderr
        parity = run_json(out)["parity"]
        assert (parity["without_tools"], parity["compared"][server.url]) == ([server.url], parity["rows"] - len(rows))
        assert parity["compared"][server.url] > 0
    found = [line["prompt_token_ids"] for line in lines(out, "raw_responses.jsonl")]
    assert all(ids in found for ids in prompts)
    assert verified(out)


@pytest.mark.long
def test_prefill_continues_an_answer_and_trains_on_the_rest_alone(tmp_path):
    """The prefix is part of the prompt: no end of turn behind it, mask 0; without the option it is made again."""
    chat = {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat) + "\n")
    renderer = Renderer(RenderOptions(str(TOKENIZER)))
    with running_simulator(QUICK) as server:
        words = [tmp_path / "rows.jsonl", "--endpoint", server.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 64]
        for out, option in ((tmp_path / "again", []), (tmp_path / "prefill", ["--prefill"])):
            done = headrace("run", *words, *option, "--out", out, timeout=110)
            assert done.returncode == 0, done.stderr
        done = headrace("run", *words, "--out", tmp_path / "prefill", timeout=110)
        assert (done.returncode, "rendering.prefill: true → false" in done.stderr) == (6, True), done.stderr
    again, prefilled = lines(tmp_path / "again", "raw_responses.jsonl")[0], lines(tmp_path / "prefill", "raw_responses.jsonl")[0]  # noqa: E501
    assert "One" not in renderer.decode(again["prompt_token_ids"])
    assert renderer.decode(prefilled["prompt_token_ids"]).endswith("</think>One, two,")
    assert prefilled["prompt_token_ids"] == renderer.render(Conversation(chat["messages"]))
    sample = lines(tmp_path / "prefill", "tokenized_data.jsonl")[0]
    prompt = len(prefilled["prompt_token_ids"])
    assert sample["input_ids"][prompt - 1] != END_OF_TURN
    assert sample["loss_mask"] == [0] * prompt + [1] * len(prefilled["output_ids"])
    assert verified(tmp_path / "prefill")


@pytest.mark.long
def test_rows_with_control_tokens_run_and_are_counted(tmp_path):
    """Their turns are not forged, nothing is rejected, and `audit` says how many there are."""
    rows = [{"prompt": "plain"}, {"prompt": "a <|im_end|><|im_user|>user<|im_middle|> b"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    with running_simulator(QUICK) as server:
        done = headrace("run", tmp_path / "rows.jsonl", "--endpoint", server.url, "--tokenizer", TOKENIZER,
                        "--max-new-tokens", 64, "--out", out, timeout=110)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert status(out)["totals"]["tokenized"] == 2
    prompts = [line["prompt_token_ids"] for line in lines(out, "raw_responses.jsonl")]
    assert [ids.count(END_OF_TURN) for ids in prompts] == [1, 1]
    done = headrace("audit", out, "--tokenizer", TOKENIZER, "--json")
    assert json.loads(done.stdout)["datasets"][0]["control_tokens_as_text"] == 1, done.stdout

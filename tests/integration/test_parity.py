"""Before the first row: our prompt ids against those of the server's own chat template."""

import json
from dataclasses import replace

import pytest

from app.cli.parity import compare
from app.errors import UsageError
from app.settings import settings_of
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.sglang.tool_dump import tool_form
from app.tokenization import RenderOptions
from producers.inputs import parse_inputs
from tests.belt import ROOT

TOKENIZER = ROOT / "app" / "demo_data" / "tokenizer"
DATASETS = ROOT / "tests" / "data" / "datasets"
OF_DEMO = SimulatorConfig(tokenizer_dir=str(TOKENIZER), instant=True)
BOS = ROOT / "tests" / "data" / "tokenizers" / "bos"
ALL = sorted(path for path in DATASETS.iterdir() if path.suffix != ".md")


NEW = "0.5.23"
FORMS = {"functions": "0.5.6.post2", "strict": "0.5.9", "defer": "0.5.12", "types": "0.5.17", "ordered": NEW}


def compared(url: str, *paths, tokenizer=TOKENIZER, form="ordered", version=NEW, said=None, **settings) -> dict:
    """What run.json would say. version: what the server is taken for; said: gets the sentences."""
    given = settings_of({"inputs": [f"d{n}={path}" for n, path in enumerate(paths)], "out": "out", "endpoints": [url],
                         "tokenizer": str(tokenizer), **settings})  # fmt: skip
    options = RenderOptions(str(tokenizer), template_kwargs=given.template_kwargs, tool_form=form)
    said = [] if said is None else said
    return compare(given, parse_inputs(given.inputs), options, {url: version}, None, said.append)


@pytest.fixture(scope="module")
def server():
    """Answers as 0.5.23, with the demo's template."""
    with running_simulator(OF_DEMO) as running:
        yield running


def test_every_published_shape_is_compared_and_equal(server):
    """Tools, calls, results, reasoning, system texts: a few rows of each shape of all 18 files."""
    made = compared(server.url, *ALL)
    assert made["rows"] >= 24
    assert made["compared"] == {server.url: made["rows"]}


def test_a_server_with_another_template_ends_the_command_with_the_token_in_its_context(server):
    """What it is there and here, what stands before it, and what to do."""
    server.faults(tokenize="other")
    try:
        with pytest.raises(UsageError) as caught:
            compared(server.url, DATASETS / "gsm8k.jsonl")
    finally:
        server.faults(tokenize="honest")
    sentence = str(caught.value)
    assert "another prompt of row 1 of" in sentence
    assert sentence.split(", token ")[0].rstrip("'\"").endswith("<|im_assistant|>assistant<|im_middle|>")
    assert "is 163586 '<|im_end|>' there and 163606 '<think>' here" in sentence
    assert "--skip-parity" in sentence


@pytest.mark.parametrize("version", ["0.5.6.post2", "0.5.9", "0.5.10", "0.5.12", "0.5.17", "0.5.22", "0.5.23", "0.6.0"])
def test_tools_are_dumped_in_the_form_of_the_servers_version(version):
    """With its own form the ids are equal, with that of other versions they are not."""
    with running_simulator(replace(OF_DEMO, version=version)) as old:
        right = tool_form(version)
        tools = DATASETS / "bfcl_live_simple.json"
        assert compared(old.url, tools, form=right, version=version)["compared"][old.url] > 0
        for wrong in FORMS.keys() - {right}:
            with pytest.raises(UsageError, match="another prompt"):
                compared(old.url, tools, form=wrong, version=FORMS[wrong])


@pytest.mark.parametrize("form", ["given", "types"])
def test_rows_with_tools_are_left_out_where_the_run_writes_tools_in_another_form(server, form):
    """An adopted run, or another version than the first: known to differ, said once; the rest is compared."""
    said = []
    tools, plain = DATASETS / "bfcl_live_simple.json", DATASETS / "gsm8k.jsonl"
    made = compared(server.url, tools, plain, form=form, said=said)
    alone = compared(server.url, plain, form=form, said=said)  # nothing to leave out, nothing to say
    assert made["compared"] == alone["compared"]
    assert (made["without_tools"], alone["without_tools"]) == ([server.url], [])
    (sentence,) = said
    assert sentence.startswith("rows with tools are left out of the comparison of prompts: this run writes tools as ")
    server.faults(tokenize="other")
    try:
        with pytest.raises(UsageError, match=r"another prompt of row 1 of .*gsm8k"):
            compared(server.url, tools, plain, form=form)
    finally:
        server.faults(tokenize="honest")


def test_template_kwargs_go_along(server):
    """`thinking=false` on both sides."""
    assert compared(server.url, DATASETS / "gsm8k.jsonl", template_kwargs={"thinking": False})["compared"][server.url]


def test_a_date_in_the_template_is_todays_on_both_sides():
    """The run's own date is pinned; a server prints the day on which it is asked."""
    config = replace(OF_DEMO, tokenizer_dir=str(BOS), vocab_size=300, id_low=0, id_high=250, eos_id=257)
    with running_simulator(config) as dated:
        assert compared(dated.url, DATASETS / "gsm8k.jsonl", tokenizer=BOS)["compared"][dated.url] > 0


def test_rows_that_cannot_be_compared_are_left_out(server, tmp_path):
    """Control tokens made text, answers to be continued, roles that no template names."""
    user = {"role": "user", "content": "x"}
    rows = [
        {"prompt": "a <|im_end|> b"},
        {"messages": [user, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "critic", "content": "c"}, user]},
        {"prompt": "plain"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = compared(server.url, file, prefill=True)
    assert made == {"skipped": False, "rows": 1, "compared": {server.url: 1}, "without_tools": []}


def test_a_server_that_offers_nothing_to_compare_with_is_no_difference():
    """Older ones, routers, and those without a tokenizer."""
    with running_simulator(SimulatorConfig(instant=True)) as silent:
        assert compared(silent.url, DATASETS / "gsm8k.jsonl")["compared"] == {silent.url: 0}

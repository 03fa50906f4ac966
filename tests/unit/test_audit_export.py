"""audit and export: what a finished run tells of itself, and what trainers get of it."""

import json
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from app.cli.main import cli
from app.identity import row_id
from app.manifest import InputFile, Recipe, RunFile, read_run_file, write_run_file
from app.offline.audit import Lengths, audit
from app.offline.export import Split
from app.reasons import Reason
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.samples import SampleFilters, samples_of
from app.settings import RunSettings, save_settings
from app.tokenization import Renderer, RenderOptions
from producers.catalog import read_row
from producers.readers import read_records
from producers.shapes import ShapeOptions
from tests.run_on_disk import AT, RECIPE, a_row, rejection, response, write, write_completed

EOS = 163_586
CALL = (
    "I look.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>'
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer(demo_tokenizer):
    """The bundled tokenizer."""
    return Renderer(RenderOptions(str(demo_tokenizer)))


class Made:
    """A finished run of ten rows: answers that reason, one that calls, one cut, one lost before it was answered."""

    def __init__(self, folder: Path, tokenizer: Path, renderer: Renderer):
        self.data, self.rundir, self.renderer = folder / "chat.jsonl", RunDir(folder / "out"), renderer
        values = [{"id": n, "prompt": f"Question {n}?", **({"tools": [TOOL]} if n == 2 else {})} for n in range(10)]
        self.data.write_bytes(b"".join(orjson.dumps(value) + b"\n" for value in values))
        self.rows = [read_row(raw, ShapeOptions()) for raw in read_records(self.data)]
        filters = SampleFilters(
            truncated="drop", think_open_ids=tuple(renderer.encode("<think>")),
            think_close_ids=tuple(renderer.encode("</think>")),
        )  # fmt: skip
        records = [self.answer(n) for n in range(9)]
        for record in [*reversed(records[5:]), *records[:5]]:  # as they came in
            write_completed(self.rundir, record, filters=filters)
        write(self.rundir, [rejection(row_id(self.rows[9][0], 1), Reason.TOO_LONG)])
        write_run_file(self.rundir.run_json, RunFile(
            run_id="r", created_at=AT, headrace="0", recipe=Recipe(tokenizer={}, rendering={}, sampling={}),
            recipe_fingerprint=RECIPE, filters=filters.to_json(), servers={"srv1": {"version": "0.5.17"}},
            datasets=[InputFile(dataset="chat", path=str(self.data), size_bytes=1)],
        ))  # fmt: skip
        self.rundir.private.mkdir(exist_ok=True)
        save_settings(self.rundir.private / "settings.json", RunSettings(
            inputs=[str(self.data)], out=self.rundir.out, endpoints=["http://x"], tokenizer=str(tokenizer),
        ))  # fmt: skip

    def answer(self, n: int, index: int = 0):
        """The response to a row."""
        digest, conversation = self.rows[n]
        text = CALL if n == 2 else f"Hm {n}.</think>Answer {n % 8}."
        ids = [*self.renderer.encode(text), EOS]
        changes = {"matched": str(EOS)}
        if n == 4:
            ids, changes = self.renderer.encode("Hm, hm. " * 40), {"matched": "", "finish_reason": "length"}
        return response(
            row_id(digest, 1), index=index, prompt_token_ids=self.renderer.render(conversation), output_ids=ids,
            text=self.renderer.decode(ids, skip_special_tokens=True), source_id=str(n), row_number=n + 1, **changes,
        )  # fmt: skip

    def headrace(self, *words: object) -> dict:
        """Run a command; its JSON."""
        done = CliRunner().invoke(cli, [*map(str, words), "--json"], standalone_mode=False)
        assert done.exception is None, done.exception
        assert done.return_value == 0
        return json.loads(done.stdout)


@pytest.fixture
def made(tmp_path, demo_tokenizer, renderer):
    """A finished run."""
    return Made(tmp_path, demo_tokenizer, renderer)


def chats(to: str) -> list[dict]:
    """All lines of conversations.jsonl, train before eval."""
    return [json.loads(line) for side in ("train", "eval") for path in Path(to).glob(f"{side}/*.jsonl")
            for line in path.read_text().splitlines()]  # fmt: skip


# --- audit ---


def test_the_audit_tells_lengths_endings_and_losses(made):
    """Kept apart from lost, by reason; what was lost before an answer is counted, not measured."""
    (one,) = made.headrace("audit", made.rundir.out)["datasets"]
    assert (one["responses"], one["finish_reasons"]) == (9, {"stop": 8, "length": 1})
    assert (one["kept_output_tokens"]["count"], one["lost_output_tokens"]["truncated"]["count"]) == (8, 1)
    assert one["lost_output_tokens"]["truncated"]["p50"] > one["kept_output_tokens"]["max"]
    assert one["rejected_before_an_answer"] == {"too_long": 1}
    assert one["thinking"] == {"closed": 8, "unclosed": 1}


def test_of_a_rejected_chat_only_the_turn_to_blame_counts_under_its_reason(made, renderer):
    """Its good answers are lost with it, and say nothing of empty ones. A row that asks once is a chat, too."""
    run_file = read_run_file(made.rundir.run_json)
    rendering = run_file.recipe.rendering | {"turns": "all"}
    recipe = run_file.recipe.model_copy(update={"rendering": rendering})
    chat = [response(a_row(70), "multi", turn=n, turns=3, **({"output_ids": [2]} if n == 1 else {})) for n in range(3)]
    write(made.rundir, [*chat, response(a_row(71), "multi")])
    write(made.rundir, samples_of(chat, SampleFilters(), AT))
    seen = audit(made.rundir, run_file.model_copy(update={"recipe": recipe}), None).datasets[-1]
    assert {reason: lengths.counts.total() for reason, lengths in seen.lost.items()} == {
        "empty_output": 1, "other_turn_rejected": 2,
    }  # fmt: skip
    assert (seen.kept.counts.total(), seen.chats) == (1, {"complete": 1})


def test_without_a_tokenizer_what_only_it_can_tell_is_null(made):
    """Unknown is never 0; and the table says what it needs."""
    (one,) = made.headrace("audit", made.rundir.out)["datasets"]
    assert one["tool_calls"] is one["decoding"] is None
    said = CliRunner().invoke(cli, ["audit", str(made.rundir.out)], standalone_mode=False).stdout
    assert "tool calls    not looked at: needs --tokenizer" in said
    assert "times longer than the median kept" in said


def test_with_a_tokenizer_calls_and_decoding_are_looked_at(made, demo_tokenizer):
    """One call, well-formed; every text is what its ids say."""
    (one,) = made.headrace("audit", made.rundir.out, "--tokenizer", demo_tokenizer)["datasets"]
    assert one["tool_calls"] == {"none": 8, "well_formed": 1}
    assert one["decoding"]["same_text"] == one["decoding"]["same_ids"] == one["decoding"]["checked"] == 9


def test_repeated_prompts_and_answers_are_counted(made):
    """Row 8 asked as row 0 does, and answered the same."""
    first = made.answer(0)
    same = {"prompt_token_ids": first.prompt_token_ids, "output_ids": first.output_ids}
    write_completed(made.rundir, response("f" * 24, **same))
    (one,) = made.headrace("audit", made.rundir.out)["datasets"]
    assert (one["repeated_prompts"], one["repeated_outputs"]) == (1, 1)


def test_servers_are_told_apart(made):
    """Endpoint, model, server and the version that run.json has of it."""
    write_completed(made.rundir, response("e" * 24, endpoint="http://other", server="srv2"))
    servers = made.headrace("audit", made.rundir.out)["servers"]
    assert [(one["endpoint"], one["version"], one["output_tokens"]["count"]) for one in servers] == [
        ("http://127.0.0.1:1", "0.5.17", 9), ("http://other", "", 1),
    ]  # fmt: skip


def test_percentiles_are_exact():
    """Of 1 to 100, the median is 50 and the 99th percentile 99."""
    lengths = Lengths()
    for tokens in range(1, 101):
        lengths.add(tokens)
    assert [lengths.percentile(percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]


def test_a_picture_is_drawn_or_its_library_named(made, tmp_path):
    """matplotlib is needed for this alone."""
    done = CliRunner().invoke(cli, ["audit", str(made.rundir.out), "--plot", str(tmp_path / "a.html")],
                              standalone_mode=False)  # fmt: skip
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert done.exception.exit_code == 2
        assert "pip install matplotlib" in str(done.exception)
    else:
        assert "<svg" in (tmp_path / "a.html").read_text()


def test_a_picture_in_an_unknown_format_is_refused(made, tmp_path):
    """The formats are named."""
    done = CliRunner().invoke(cli, ["audit", str(made.rundir.out), "--plot", "a.gif"], standalone_mode=False)
    assert done.exception.exit_code == 2
    assert ".png .svg .pdf .html" in str(done.exception)


def spoil(made: Made, name: str, old: bytes, new: bytes) -> None:
    """Something in the second line of a file."""
    found = lines(made, name)
    assert old in found[1]
    found[1] = found[1].replace(old, new, 1)
    made.rundir.file("chat", name).write_bytes(b"\n".join(found) + b"\n")


@pytest.mark.parametrize("old", [b'"finish_reason"', b'"output_ids":[', b'"meta_info"'])
def test_damaged_raw_lines_stop_neither_audit_nor_export(made, old):
    """They are left out; the export counts them."""
    spoil(made, RAW, old, old.replace(b"i", b"1") if b"[" not in old else old + b"1.5,")
    assert made.headrace("audit", made.rundir.out)["datasets"][0]["output_tokens"]["count"] == 8
    said = made.headrace("export", made.rundir.out, "--format", "conversations", "--eval-fraction", 0)
    assert (said["train"], said["rows_gone"]) == (7, 1)


def test_damaged_rejections_do_not_stop_the_audit(made):
    """A line without its fields says nothing."""
    with made.rundir.file("chat", REJECTED).open("ab") as file:
        file.write(b"{}\n[]\n")
    assert made.headrace("audit", made.rundir.out)["datasets"][0]["dataset"] == "chat"


@pytest.mark.parametrize(("old", "new"), [(b'"input_ids":[', b'"input_ids":[,'), (b'{"id"', b'x"id"')])
def test_damaged_samples_are_left_out_of_the_shards_and_counted(made, old, new):
    """Silently one fewer would be the worst."""
    spoil(made, TOKENIZED, old, new)
    said = made.headrace("export", made.rundir.out, "--format", "parquet", "--eval-fraction", 0)
    assert (said["train"], said["damaged"]) == (7, 1)


# --- export ---


def test_parquet_holds_the_samples_in_the_order_of_the_rows(made):
    """Every sample, of the fixed types, whatever the order in which they came in."""
    said = made.headrace("export", made.rundir.out, "--format", "parquet", "--eval-fraction", 0)
    assert (said["train"], said["eval"]) == (8, 0)
    table = pq.read_table(Path(said["to"]) / "train")
    assert str(table.schema.field("input_ids").type) == "list<element: int32>"
    assert str(table.schema.field("loss_mask").type) == "list<element: int8>"
    assert [json.loads(line)["source_id"] for line in sorted_raw(made)] == ["0", "1", "2", "3", "5", "6", "7", "8"]
    want = {json.loads(line)["id"]: json.loads(line) for line in lines(made, TOKENIZED)}
    order = [json.loads(line)["id"] for line in sorted_raw(made)]
    assert table.to_pylist() == [want[name] for name in order]


def lines(made: Made, name: str) -> list[bytes]:
    """Lines of a file."""
    return made.rundir.file("chat", name).read_bytes().splitlines()


def sorted_raw(made: Made) -> list[bytes]:
    """Raw lines of what has a sample, by row number."""
    kept = {json.loads(line)["id"] for line in lines(made, TOKENIZED)}
    return sorted((line for line in lines(made, RAW) if json.loads(line)["id"] in kept),
                  key=lambda line: json.loads(line)["row_number"])  # fmt: skip


def test_chats_are_the_inputs_messages_and_the_answer_taken_apart(made):
    """Content, reasoning and calls apart; tools as JSON text; every message with the same fields."""
    said = made.headrace("export", made.rundir.out, "--format", "conversations", "--eval-fraction", 0)
    found = chats(said["to"])
    assert len(found) == 8
    user, answer = found[1]["conversations"]
    assert (user["role"], user["content"]) == ("user", "Question 1?")
    assert (answer["role"], answer["reasoning_content"], answer["content"]) == ("assistant", "Hm 1.", "Answer 1.")
    assert answer["tool_calls"] == ""
    called = found[2]["conversations"][1]
    assert json.loads(called["tool_calls"])[0]["function"] == {"name": "find", "arguments": {"q": "x"}}
    assert json.loads(found[2]["tools"]) == [TOOL]
    assert {tuple(message) for chat in found for message in chat["conversations"]} == {tuple(user)}
    assert all(type(value) is str for chat in found for message in chat["conversations"] for value in message.values())


def test_answers_whose_row_is_gone_are_left_out_and_counted(made):
    """The messages are the input's, so without it there are none."""
    made.data.write_bytes(b"".join(made.data.read_bytes().splitlines(keepends=True)[1:]))
    said = made.headrace("export", made.rundir.out, "--format", "conversations", "--eval-fraction", 0)
    assert (said["train"], said["rows_gone"]) == (7, 1)


def test_completions_of_a_row_are_on_one_side(made):
    """Chats of both completions, in their order, on the side of their row; the same side in Parquet."""
    write_completed(made.rundir, *[made.answer(n, index=1) for n in (0, 1, 3, 5, 6, 7, 8)])
    half = ("--eval-fraction", 0.5, "--seed", 3)
    to = made.headrace("export", made.rundir.out, "--format", "conversations", *half)["to"]
    sides = {side: {chat["primary_id"] for chat in map(json.loads, (Path(to) / side / "conversations.jsonl").open())}
             for side in ("train", "eval")}  # fmt: skip
    assert all(sides.values())
    assert not sides["train"] & sides["eval"]
    to = made.headrace("export", made.rundir.out, "--format", "parquet", *half)["to"]
    assert set(pq.read_table(Path(to) / "eval")["primary_id"].to_pylist()) == sides["eval"]
    assert [chat["id"][-1] for chat in chats(to.replace("parquet", "conversations"))[:2]] == ["0", "1"]


def test_exporting_again_gives_the_same_bytes(made):
    """An earlier export is replaced by an equal one."""
    words = ("export", made.rundir.out, "--format", "conversations", "--eval-fraction", 0.3)
    before = chats(made.headrace(*words)["to"])
    assert chats(made.headrace(*words)["to"]) == before


def test_a_folder_with_something_else_in_it_is_left_alone(made, tmp_path):
    """Only an export is replaced."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    done = CliRunner().invoke(
        cli, ["export", str(made.rundir.out), "--format", "parquet", "--to", str(tmp_path / "mine")],
        standalone_mode=False,
    )  # fmt: skip
    assert done.exception.exit_code == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_about_the_fraction_asked_for_is_eval_and_another_seed_chooses_others():
    """Of ten thousand rows; equal rows are on one side."""
    names = [f"chat:{n:024x}" for n in range(10_000)]
    chosen = [{name for name in names if Split(0.1, seed).side_of(name) == "eval"} for seed in (0, 1)]
    assert all(900 < len(some) < 1100 for some in chosen)
    assert len(chosen[0] & chosen[1]) < 200
    assert {Split(0.1, 0).side_of(name + "-2") == Split(0.1, 0).side_of(name) for name in names} == {True}


def test_several_turns_stand_after_the_messages_they_answer(made, renderer):
    """One chat a row, each answer behind its user message; a row with a turn too few is left out."""
    data = made.data.with_name("multi.jsonl")
    data.write_bytes(orjson.dumps({"turns": ["One?", "Two?"]}) + b"\n" + orjson.dumps({"turns": ["A?", "B?"]}) + b"\n")
    saved = made.rundir.private / "settings.json"
    save_settings(saved, RunSettings(**json.loads(saved.read_text()) | {"turns": "all"}))
    for raw, turns in zip(read_records(data), (2, 1), strict=True):
        row = row_id(read_row(raw, ShapeOptions(turns="all"))[0], 1)
        for turn in range(turns):
            ids = [*renderer.encode(f"Hm.</think>Said {turn}."), EOS]
            write_completed(made.rundir, response(row, "multi", turn=turn, turns=2, output_ids=ids, matched=str(EOS)))
    said = made.headrace("export", made.rundir.out, f"multi={data}", "--format", "conversations", "--eval-fraction", 0)
    (chat,) = chats(said["to"])
    assert [one["content"] for one in chat["conversations"]] == ["One?", "Said 0.", "Two?", "Said 1."]

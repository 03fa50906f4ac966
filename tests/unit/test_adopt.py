"""producers.adopt: what another script saved is trusted only where it can be proven."""

import json
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from app.cli.main import cli
from app.ledger import Ledger
from app.manifest import read_run_file
from app.records import Conversation
from app.rundir import RAW, REJECTED, TOKENIZED, RunDir
from app.tokenization import Renderer, RenderOptions
from app.verify import verify

EOS, MOST = 163_586, 16


@pytest.fixture(scope="module")
def renderer(demo_tokenizer):
    """The bundled tokenizer."""
    return Renderer(RenderOptions(str(demo_tokenizer)))


class Old:
    """An input file and what another script made of it: one line a row, with names of its own for some fields."""

    def __init__(self, folder: Path, renderer: Renderer, tokenizer: Path, rows: int):
        self.folder, self.tokenizer = folder, tokenizer
        self.data, self.out, self.directory = folder / "B1.jsonl", folder / "out", folder / "old"
        rows_ = [{"id": f"q{n}", "prompt": f"What is {n} and {n * 7}?"} for n in range(rows)]
        self.data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows_))
        self.lines = [self._line(n, row, renderer) for n, row in enumerate(rows_)]

    def _line(self, n: int, row: dict, renderer: Renderer) -> dict:
        prompt = renderer.render(Conversation([{"role": "user", "content": row["prompt"]}], source_id=row["id"]))
        output = [300 + (n * 13 + i) % 3000 for i in range(5 + n % 7)] + [EOS]
        ending = {"type": "stop", "matched": EOS}
        if n % 10 == 3:
            output = [300 + (n + i) % 3000 for i in range(MOST)]
            ending = {"type": "length", "length": MOST}
        return {
            "sample": row["id"], "prompt_ids": prompt, "output_ids": output,
            "text": renderer.decode(output, skip_special_tokens=True), "model": "/models/teacher",
            "meta_info": {"prompt_tokens": len(prompt), "completion_tokens": len(output), "finish_reason": ending},
        }  # fmt: skip

    def write(self) -> None:
        """Save the script's directory."""
        file = self.directory / "B1" / "raw_responses.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in self.lines))

    def adopt(self, *words: object, code: int = 0) -> dict:
        """Run the command; returns its JSON."""
        self.write()
        done = CliRunner().invoke(cli, [
            "adopt", str(self.out), str(self.directory), str(self.data), "--tokenizer", str(self.tokenizer),
            "--max-new-tokens", str(MOST), "--map", "source_id=sample", "--json", *map(str, words),
        ], standalone_mode=False)  # fmt: skip
        assert done.exception is None, done.exception
        assert done.return_value == code, done.output
        return json.loads(done.stdout)


@pytest.fixture
def old(tmp_path, renderer, demo_tokenizer):
    """Forty rows, all answered well."""
    return Old(tmp_path, renderer, demo_tokenizer, 40)


def doubts(path: Path) -> dict[int, str]:
    """Line number → reason, of the lines that a report does not trust."""
    said = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["line"]: one["verdict"] for one in said if one["verdict"] != "trusted"}


def test_good_answers_are_taken_and_verify_holds(old):
    """Raw lines and samples under our names, the row's own id, where they came from; nothing left to generate."""
    said = old.adopt()
    assert (said["verdicts"], said["wanted"], said["to_generate"]) == ({"trusted": 40}, 40, 0)
    rundir = RunDir(old.out)
    assert verify(rundir).ok, verify(rundir).render()
    record = orjson.loads(rundir.file("B1", RAW).read_bytes().splitlines()[3])
    assert (record["source_id"], record["row_number"], record["finish_reason"]) == ("q3", 4, "length")
    assert orjson.loads(record["meta_info"])["adopted"]["line"] == 4
    with Ledger.open(rundir) as ledger:
        (counts,) = ledger.counts()
    assert (counts.rows, counts.rows_final, counts.tokenized, counts.pending) == (40, True, 40, 0)
    assert read_run_file(rundir.run_json).server == {"model": "teacher"}


def test_a_line_may_name_our_recipe_with_tools_as_any_server_writes_them_and_no_other(old):
    """The first server's version decides that form; adopting knows no server. Another temperature is another recipe."""
    old.adopt()
    recipe = read_run_file(old.out / "run.json").recipe
    ordered = recipe.model_copy(update={"rendering": recipe.rendering | {"tools": "ordered"}})
    hotter = recipe.model_copy(update={"sampling": recipe.sampling | {"temperature": 0.123}})
    for line in old.lines:
        line["recipe"] = ordered.fingerprint
    old.lines[7]["recipe"] = hotter.fingerprint
    old.out = old.folder / "another"
    assert old.adopt(code=5)["verdicts"] == {"trusted": 39, "not_asked": 1}
    assert doubts(old.out / "adopt_report.jsonl") == {8: "not_asked"}


def test_five_rows_altered_in_five_ways_are_found_and_no_other(tmp_path, renderer, demo_tokenizer):
    """Of a thousand: a prompt id, an output id, a cut list, an ending, a row said twice."""
    old = Old(tmp_path, renderer, demo_tokenizer, 1000)
    old.lines[100]["prompt_ids"][3] += 1
    old.lines[250]["output_ids"][2] += 1
    old.lines[477]["output_ids"].pop(1)
    old.lines[613]["meta_info"]["finish_reason"] = {"type": "stop", "matched": None}
    old.lines[888] = dict(old.lines[887])
    said = old.adopt(code=5)
    assert doubts(old.out / "adopt_report.jsonl") == {
        101: "prompt_differs", 251: "text_differs", 478: "wrong_count", 614: "bad_finish_reason", 889: "duplicate",
    }  # fmt: skip
    assert (said["verdicts"]["trusted"], said["to_generate"]) == (995, 5)
    assert verify(RunDir(old.out)).ok


def no_prompt_ids(line):
    """Its field went missing."""
    del line["prompt_ids"]


def foreign_id(line):
    """An id that the model does not have."""
    line["output_ids"][0] = 10**6


def another_model(line):
    """Made by somebody else."""
    line["model"] = "student"


def an_abort(line):
    """The server gave up."""
    line["meta_info"]["finish_reason"] = {"type": "abort"}


def said_to_be_cut(line):
    """Said to be cut, and it ends at a stop."""
    line["meta_info"]["finish_reason"] = {"type": "length", "length": 9}


def two_endings(line):
    """Two places that do not agree, each of which would do."""
    line["finish_reason"] = "stop"
    line["meta_info"]["finish_reason"]["type"] = "length"


def hotter(line):
    """Names a temperature that is not the run's."""
    line["sampling_params"] = {"temperature": 0.3}


def put(**fields):
    """A change of a line's fields."""

    def change(line):
        line.update(fields)

    change.__name__ = str(fields)
    return change


def another_allowance(line):
    """Cut, and it was asked for less than this run asks."""
    line["output_ids"] = line["output_ids"][:8]
    line["text"] = ""
    line["meta_info"] = {"finish_reason": {"type": "length", "length": 8}}
    line["max_new_tokens"] = 8
    del line["text"]


def another_rows_prompt(line):
    """The prompt of another row under this id."""
    line["sample"] = "q9"


def a_boolean_id(line):
    """True is no id."""
    line["output_ids"][0] = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_prompt_ids, "no_ids"), (a_boolean_id, "no_ids"), (foreign_id, "ids_out_of_vocabulary"),
        (another_model, "other_model"), (an_abort, "bad_finish_reason"), (said_to_be_cut, "bad_finish_reason"),
        (two_endings, "bad_finish_reason"), (hotter, "other_sampling"), (another_allowance, "other_sampling"),
        (another_rows_prompt, "prompt_differs"),
        (put(completion_index=1), "not_asked"), (put(completion_index=-1), "not_asked"),
        (put(completion_index="0"), "not_asked"), (put(completion_index=False), "not_asked"),
        (put(turn=1), "not_asked"), (put(turns=3), "not_asked"), (put(dataset="B2"), "not_asked"),
        (put(dataset=1), "not_asked"), (put(recipe="0123456789abcdef"), "not_asked"),
        (put(temperature=0.3), "other_sampling"), (put(temperature="1.0"), "other_sampling"),
        (put(temperature=True), "other_sampling"), (put(sampling_params={"min_p": 0.5}), "other_sampling"),
        (put(sampling_params={"regex": "a+"}), "other_sampling"), (put(sampling_params="hot"), "wrong_type"),
        (put(model=7), "wrong_type"), (put(text=7), "wrong_type"), (put(text={"a": 1}), "wrong_type"),
        (put(max_new_tokens="16"), "wrong_type"), (put(matched=["x"]), "wrong_type"),
        (put(num_output_tokens=True), "wrong_count"), (put(num_output_tokens="6"), "wrong_count"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_what_contradicts_itself_or_the_run_is_not_trusted(old, change, reason):
    """The one line that was changed, for its reason, and no other."""
    change(old.lines[20])
    old.adopt(code=5)
    assert doubts(old.out / "adopt_report.jsonl") == {21: reason}


def test_what_says_nothing_of_the_answer_makes_no_doubt(old):
    """Times and addresses of another type count as not said; a container by a field's name holds other fields."""
    old.lines[20] |= {"endpoint": 5, "started_at": 1_700_000_000, "latency_seconds": "1 s", "response": {"a": 1}}
    old.lines[21] |= {"temperature": 1, "sampling_params": {"n": 4, "seed": 3, "max_new_tokens": MOST}}
    assert old.adopt()["verdicts"] == {"trusted": 40}
    assert verify(RunDir(old.out)).ok, verify(RunDir(old.out)).render()


def test_a_line_that_is_not_trusted_does_not_decide_the_model(old):
    """The first line names a model and is doubtful: those after it are held to the first that is trusted."""
    old.lines[0] |= {"model": "student", "text": "another"}
    assert old.adopt(code=5)["verdicts"] == {"trusted": 39, "text_differs": 1}
    assert read_run_file(old.out / "run.json").server == {"model": "teacher"}


def test_where_nothing_is_trusted_the_run_is_not_begun(old):
    """No server and no model in run.json: the first endpoint still decides how tools are written."""
    for line in old.lines:
        line["prompt_ids"][0] += 1
    old.adopt(code=5)
    run_file = read_run_file(old.out / "run.json")
    assert (run_file.servers, run_file.server) == ({}, {})


def test_a_torn_line_is_counted_and_the_rest_is_taken(old):
    """Half a line at the end: not_json, with its number."""
    old.write()
    file = old.directory / "B1" / "raw_responses.jsonl"
    old.lines.pop()
    said_before = old.adopt("--dry-run")
    assert said_before["to_generate"] == 1
    whole = file.read_bytes()
    old.write = lambda: file.write_bytes(whole + b'{"sample": "q39", "prompt_ids": [1,')
    assert old.adopt(code=5)["verdicts"] == {"trusted": 39, "not_json": 1}


def test_a_dry_run_counts_as_a_hand_would_and_writes_nothing(old):
    """Lines per file and dataset, blank ones apart; derived files are listed and not read."""
    old.write()
    (old.directory / "B1" / TOKENIZED).write_text("{}\n{}\n\n")
    said = old.adopt("--dry-run")
    files = {Path(one["file"]).name: one for one in said["files"]}
    assert (files[RAW]["lines"], files[RAW]["dataset"], files[RAW]["read"]) == (40, "B1", True)
    assert (files[TOKENIZED]["lines"], files[TOKENIZED]["blank"], files[TOKENIZED]["read"]) == (3, 1, False)
    assert not old.out.exists()


def test_adopting_again_takes_nothing_twice(old):
    """The same command again: everything is there already, and no line is added."""
    old.adopt()
    before = (old.out / "B1" / RAW).read_bytes()
    assert old.adopt()["verdicts"] == {"already_there": 40}
    assert (old.out / "B1" / RAW).read_bytes() == before


def test_a_line_without_an_id_is_told_by_its_prompt(old):
    """Positions and ids of the script do not matter: the prompt is the proof."""
    for line in old.lines:
        del line["sample"]
    old.lines.reverse()
    assert old.adopt()["verdicts"] == {"trusted": 40}
    record = orjson.loads((old.out / "B1" / RAW).read_bytes().splitlines()[0])
    assert record["source_id"] == "q39"


def test_answers_that_are_no_samples_are_rejected_as_if_generated(old):
    """Taken, with a rejection: the filters of the run hold for them too."""
    old.lines[7] |= {"output_ids": [EOS], "text": "", "meta_info": {"finish_reason": {"type": "stop", "matched": EOS}}}
    old.adopt()
    (rejected,) = map(orjson.loads, (old.out / "B1" / REJECTED).read_bytes().splitlines())
    assert (rejected["reason"], rejected["stage"]) == ("empty_output", "sample")
    assert verify(RunDir(old.out)).ok


def test_another_recipe_is_refused(old):
    """A run that was started with another allowance takes nothing: exit 6."""
    old.adopt()
    done = CliRunner().invoke(cli, [
        "adopt", str(old.out), str(old.directory), str(old.data), "--tokenizer", str(old.tokenizer),
        "--max-new-tokens", "99",
    ], standalone_mode=False)  # fmt: skip
    assert done.exception.exit_code == 6


def test_a_run_of_several_turns_is_refused_with_the_way_out(old):
    """Its rows are whole chats, and a line is one answer: another OUT, or no adopting."""
    old.adopt()
    settings = old.out / ".headrace" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"turns": "all"}))
    done = CliRunner().invoke(cli, ["adopt", str(old.out), str(old.directory)], standalone_mode=False)
    assert done.exception.exit_code == 2
    assert "started with --turns all: name another OUT for these answers" in str(done.exception)


def test_an_input_that_lies_beside_the_answers_is_not_read_as_answers(old):
    """A folder with everything in it, and no file of our names."""
    old.write()
    answers = old.directory / "B1" / RAW
    answers.rename(old.folder / "answers.jsonl")
    old.write = lambda: answers.parent.rmdir() if answers.parent.exists() else None
    old.directory = old.folder
    assert old.adopt()["verdicts"] == {"trusted": 40}


def test_a_map_names_our_field(old):
    """A field that we do not have is refused with the list of ours."""
    done = CliRunner().invoke(cli, ["adopt", str(old.out), str(old.folder), "--map", "answer=x"], standalone_mode=False)
    assert done.exception.exit_code == 2
    assert "output_ids" in str(done.exception)

"""Resume, with real processes: what is done is known by what it says, and only what is missing is made."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
from click.testing import CliRunner

from app.cli.main import cli
from app.rundir import RunDir
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.tokenization import Renderer, RenderOptions
from app.verify import verify
from tests.acceptance.harness import IDS, TOKENIZER, headrace, ids, run, status, verified
from tests.acceptance.poison import POISON, deadly_token
from tests.belt import until

pytestmark = pytest.mark.timeout(400)  # several whole runs in one test
QUICK = SimulatorConfig(**IDS, output_mean=20, step_seconds=0.002)
#: Some answers take a second, some ten: they come in another order than the rows.
SLOW = SimulatorConfig(**IDS, output_mean=120, output_sigma=1.0, step_seconds=0.02)
ROWS = 20


def write(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def raw(out) -> list[dict]:
    return [json.loads(line) for path in sorted(out.glob("*/raw_responses.jsonl")) for line in path.open("rb")]


def words(server, *data) -> list:
    return [*data, "--endpoint", server.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 256]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Twenty rows, killed at about half, resumed over an input that was shuffled, split, edited and added to."""
    folder = tmp_path_factory.mktemp("interrupted")
    rows = [{"id": f"r{n}", "prompt": f"What is {n} plus {n}?"} for n in range(ROWS)]
    write(folder / "all.jsonl", rows)
    with running_simulator(SLOW) as server:
        with run(folder / "out", *words(server, f"d={folder / 'all.jsonl'}")) as started:
            until(lambda: started.lines() >= ROWS // 2, seconds=90, what="half of the answers")
            for process in started.everything():
                process.send_signal(signal.SIGKILL)
        before = raw(folder / "out")
        write(folder / "one.jsonl", [{"id": f"new{n}", "prompt": f"Say {n}."} for n in range(3)] + rows[:9:-1])
        write(folder / "two.jsonl", [{"id": "r0", "prompt": "What is 0 minus 0?"}, *rows[9:0:-1]])
        again = words(server, f"d={folder / 'one.jsonl'}", f"d={folder / 'two.jsonl'}")
        done = headrace("run", *again, "--out", folder / "out", timeout=110)
        assert done.returncode == 0, done.stderr
    return folder / "out", before


def test_c58_the_rows_of_the_output_are_those_of_the_input_once_each(interrupted):
    """Answers come out of order and the run is killed: nothing is counted, each row is looked for."""
    out, _ = interrupted
    found = ids(out)
    assert len(found) == len(set(found))
    shown = status(out)["totals"]
    assert (shown["rows"], shown["tokenized"], shown["pending"]) == (ROWS + 3, ROWS + 3, 0)


def test_c59_only_rows_that_say_the_same_are_taken_as_done(interrupted):
    """What was answered before the kill stands as it was; the edited row is made anew, under its own prompt."""
    out, before = interrupted
    after = raw(out)
    assert [one for one in after if one["id"] in {old["id"] for old in before}] == before
    renderer = Renderer(RenderOptions(str(TOKENIZER)))
    prompts = {one["source_id"]: renderer.decode(one["prompt_token_ids"]) for one in after if one["row_number"] > 0}
    assert all(f"What is {n} plus {n}?" in prompts[f"r{n}"] for n in range(1, ROWS))
    edited = [renderer.decode(one["prompt_token_ids"]) for one in after if one["source_id"] == "r0"]
    assert sum("What is 0 minus 0?" in prompt for prompt in edited) == 1
    assert verified(out)


@pytest.mark.long
def test_c01_c61_the_same_command_again_does_nothing_and_cuts_nothing(tmp_path):
    """A row with line separators in it is one row, done once; a finished run exits as before and sends no request."""
    write(tmp_path / "rows.jsonl", [{"prompt": "a\u2028b\u0085c\u2029d"}, {"prompt": "x"}])
    out = tmp_path / "out"
    with running_simulator(QUICK) as server:
        given = words(server, tmp_path / "rows.jsonl")
        assert headrace("run", *given, "--out", out, timeout=110).returncode == 0
        files = {path: path.read_bytes() for path in out.glob("rows/*.jsonl")}
        sent = server.stats()["requests"]
        assert headrace("run", *given, "--out", out, timeout=110).returncode == 0
        assert server.stats()["requests"] == sent
    assert {path: path.read_bytes() for path in out.glob("rows/*.jsonl")} == files
    assert len(ids(out)) == 2


@pytest.mark.long
def test_c62_rows_that_failed_are_no_good_rows_and_can_be_asked_again_alone(tmp_path):
    """A server whose numbers fail gives no sample; once it is mended, exactly the failed rows are made."""
    write(tmp_path / "rows.jsonl", [{"prompt": f"What is {n} plus {n}?"} for n in range(ROWS)])
    out = tmp_path / "out"
    with running_simulator(QUICK) as server:
        server.faults(internal_error=0.5)
        given = words(server, tmp_path / "rows.jsonl")
        first = headrace("run", *given, "--out", out, timeout=110)
        assert first.returncode in (0, 5), first.stderr
        failed = status(out)["totals"]["rejected"]
        assert len(ids(out, "tokenized_data.jsonl")) == ROWS - failed
        server.faults(internal_error=0.0)
        if failed:
            assert headrace("retry", out, "--reason", "attempts_exhausted").returncode == 0
        sent = server.stats()["requests"]
        assert headrace("run", *given, "--out", out, timeout=110).returncode == 0
        assert failed <= server.stats()["requests"] - sent <= failed + 2  # and the canary
    assert len(set(ids(out, "tokenized_data.jsonl"))) == ROWS
    assert verified(out)


@pytest.mark.long
def test_c62_a_chat_whose_third_turn_fails_is_in_no_good_file_and_is_made_again_as_a_whole(tmp_path):
    """Two good turns of three are no good row: one rejection, no raw line, no sample. Asked again, it is three turns
    more and no other row is touched."""
    last = {1: f"And {POISON} then?"}
    chats = [[f"{n}, please", "More.", last.get(n, "And then?")] for n in range(3)]
    write(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": t} for t in chat]} for chat in chats])
    out = tmp_path / "out"
    spoken = Renderer(RenderOptions(str(TOKENIZER))).encode("So.</think>")
    with running_simulator(replace(QUICK, frames=((tuple(spoken), ()),))) as server:
        given = [*words(server, tmp_path / "chats.jsonl"), "--turns", "all"]
        server.faults(refuse_on_token=deadly_token())
        first = headrace("run", *given, "--out", out, timeout=110)
        assert first.returncode == 5, first.stderr
        good = raw(out)
        assert [one["turns"] for one in good] == [3] * 6
        (failed,) = [json.loads(line) for line in (out / "chats" / "rejected.jsonl").open("rb")]
        assert failed["id"].split(":")[2:] == ["2", "0"]
        assert failed["primary_id"] not in {one["primary_id"] for one in good}
        assert ids(out, "tokenized_data.jsonl") == [one["id"] for one in good]
        server.faults(refuse_on_token=-1)
        assert CliRunner().invoke(cli, ["retry", str(out), "--reason", failed["reason"]]).exit_code == 0
        sent = server.stats()["requests"]
        assert headrace("run", *given, "--out", out, timeout=110).returncode == 0
        assert 3 <= server.stats()["requests"] - sent <= 5  # and the canary
    assert raw(out)[:6] == good
    assert {one["primary_id"] for one in raw(out)[6:]} == {failed["primary_id"]}
    assert len(ids(out, "tokenized_data.jsonl")) == 9
    assert verify(RunDir(out)).ok


@pytest.mark.long
def test_c62_a_row_of_three_completions_is_not_done_with_the_first(tmp_path):
    """Killed when the first is written, and Redis forgets all: by the files two are wanted still; those are made."""
    write(tmp_path / "rows.jsonl", [{"prompt": "What is one?"}, {"prompt": "What is two?"}])
    out = tmp_path / "out"
    with running_simulator(replace(SLOW, output_lengths="fixed", output_mean=30)) as server:
        given = [*words(server, tmp_path / "rows.jsonl"), "--samples", 3, "--concurrency", 1]
        with run(out, *given) as started:
            until(lambda: started.lines() >= 1, seconds=90, what="the first completion")
            for process in started.everything():
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(out / ".headrace" / "redis")
        before = raw(out)
        assert 1 <= len(before) <= 3
        shown = json.loads(CliRunner().invoke(cli, ["status", str(out), "--json"]).stdout)["totals"]
        assert (shown["rows"], shown["tokenized"], shown["pending"]) == (6, len(before), 6 - len(before))
        sent = server.stats()["requests"]
        assert headrace("run", *given, "--out", out, timeout=110).returncode == 0
        assert server.stats()["requests"] - sent <= 6 - len(before) + 2  # and the canary
    assert raw(out)[: len(before)] == before
    places = sorted(tuple(one["id"].split(":")[1::2]) for one in raw(out))
    assert places == sorted((row, str(k)) for row in {one["row_id"] for one in raw(out)} for k in range(3))
    assert len(places) == len(ids(out, "tokenized_data.jsonl")) == 6
    assert verify(RunDir(out)).ok

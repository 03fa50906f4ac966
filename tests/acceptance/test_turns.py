"""`headrace run --turns all` as its user meets it: whole rows whatever dies on the way, no turn made for nothing."""

import json
import os
import random
import signal
import time
from collections import deque
from itertools import cycle, islice

import pytest
from tokenizers import Tokenizer

from app.sglang.simulator import SimulatorConfig, prompt_hash, running_simulator
from tests.acceptance.harness import IDS, TOKENIZER, headrace, run, status, verified
from tests.belt import until

#: Kills on the way; more by hand: HEADRACE_TEST_KILLS=20.
KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "2"))
VICTIMS = ("worker", "valkey-server", "endpoint", "produce", "collect")
#: From an answer to Redis, on a machine that does other things as well.
ON_ITS_WAY_SECONDS = 1.0
OLD = {"role": "assistant", "content": "an answer that is made again"}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def encoded(text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def write_rows(path, chats: list[list[dict]]) -> None:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def records(out) -> list[dict]:
    return [json.loads(line) for path in sorted(out.glob("*/raw_responses.jsonl")) for line in path.open("rb")]


def assert_groups_are_whole(found: list[dict]) -> None:
    """Each completion's turns stand one after the other, all of them."""
    while found:
        group, found = found[: found[0]["turns"]], found[found[0]["turns"] :]
        assert [one["turn"] for one in group] == list(range(len(group)))
        assert len({(one["primary_id"], one["completion_index"]) for one in group}) == 1


def edit_by_hand(path) -> None:
    """Of a finished run: two turns of one row exchanged, so that no size changes, and a turn of another taken away."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[1], lines[0], *lines[2:7], *lines[8:]]))


class Watch:
    """What an endpoint was asked and has answered, looked at again and again."""

    def __init__(self, endpoint):
        self.endpoint, self.looks = endpoint, deque([(time.monotonic(), {})])

    def completed(self) -> int:
        """Answers so far."""
        prompts = self.endpoint.stats()["prompts"]
        self.looks.append((time.monotonic(), {name: one["completed"] for name, one in prompts.items()}))
        while len(self.looks) > 1 and self.looks[1][0] < time.monotonic() - ON_ITS_WAY_SECONDS:
            self.looks.popleft()
        return sum(self.looks[-1][1].values())

    def under_way(self) -> set[str]:
        """Prompts that it was asked more often than it has answered, or answered so lately that the answer may not be
        in Redis yet."""
        earlier = self.looks[0][1]
        return {
            name for name, one in self.endpoint.stats()["prompts"].items()
            if one["requests"] > one["completed"] or one["completed"] > earlier.get(name, 0)
        }  # fmt: skip


def kill(victim: str, started, watch: Watch) -> set[str]:
    """End a part of the run; returns the prompts that were under way at an endpoint and may be made again for it."""
    before = watch.under_way()
    if victim == "endpoint":
        watch.endpoint.faults(freeze_seconds=0.1, down_seconds=0.5, crashes_left=-1)
        watch.endpoint.crash()
        return before | watch.under_way()
    process = started.child(victim)
    process.send_signal(signal.SIGKILL)
    until(lambda: not process.is_running(), what=f"{victim} is dead")
    return before | watch.under_way() if victim == "worker" else set()


@pytest.mark.timeout(100 + 25 * KILLS)
def test_a_run_of_three_turns_is_whole_whatever_is_killed(tmp_path):
    """SIGKILL of every part of the run in turn: every row has its three lines, no id stands twice, and no turn is made
    twice but those that were at an endpoint when it or their worker died. What is edited by hand is mended by the same
    command."""
    rows, chance = 4 * KILLS + 12, random.Random(5)
    data, out = tmp_path / "chats.jsonl", tmp_path / "out"
    write_rows(data, [[user(f"{n}, please"), OLD, user("More."), OLD, user("And then?")] for n in range(rows)])
    config = SimulatorConfig(
        **IDS, output_lengths="fixed", output_mean=30, step_seconds=0.02, frames=((encoded("So.</think>"), ()),)
    )
    excused: set[str] = set()
    with running_simulator(config) as endpoint:
        watch = Watch(endpoint)
        words = [data, "--endpoint", endpoint.url, "--tokenizer", TOKENIZER, "--max-new-tokens", 128, "--turns", "all"]
        with run(out, *words, "--concurrency", 10) as started:
            for victim in islice(cycle(VICTIMS), KILLS):
                goal = watch.completed() + chance.randint(6, 12)
                until(lambda goal=goal: watch.completed() >= goal, 90, f"turns made before {victim} dies")
                excused |= kill(victim, started, watch)
            assert started.wait(60 + 10 * KILLS) == 0, started.text()
        completed = {name: one["completed"] for name, one in endpoint.stats()["prompts"].items()}
        edit_by_hand(out / "chats" / "raw_responses.jsonl")
        again = headrace("run", "--out", out, *words)
        assert again.returncode == 0, again.stderr
        assert "1 chats had their turns in another order" in again.stderr
        assert "1 chats lack a turn that was there" in again.stderr
    found = records(out)
    assert len(found) == len({one["id"] for one in found}) == 3 * rows
    assert {one["turns"] for one in found} == {3}
    assert_groups_are_whole(found)
    assert verified(out)
    totals = status(out)["totals"]
    assert (totals["rows"], totals["tokenized"], totals["samples"]) == (rows, rows, 3 * rows)
    changed = headrace("run", "--out", out, *words[:-2])
    assert (changed.returncode, "rendering.turns" in changed.stderr) == (6, True), changed.stderr
    twice = {name for name in (prompt_hash(one["prompt_token_ids"]) for one in found) if completed[name] > 1}
    print(f"{KILLS} kills, {3 * rows} turns, {len(twice)} made twice, {len(excused)} were under way at a kill")
    assert twice <= excused

"""The comparison with others, without any of them: drivers, readers, translator, and the table that the page shows."""

import ast
import gzip
import json
import re
import urllib.error
import urllib.request

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from benchmarks.peers.compare import compared
from benchmarks.peers.dialect import vllm_dialect
from benchmarks.peers.roster import HERE, PEERS, Job, records
from benchmarks.peers.table import ending, lines
from tests.acceptance.harness import IDS
from tests.belt import ROOT

RECORDED = json.loads((ROOT / "docs" / "evidence" / "peers.json").read_text())
WELL = {"exit": 0, "lost": 0, "failed": 0, "doubled": 0, "truth": True, "repeated": 0}


def test_each_driver_parses_and_has_a_place_in_the_roster(tmp_path):
    """A driver that nobody starts, or a start without its driver, would go unseen: no test runs them."""
    job = Job("http://h", tmp_path / "prompts.jsonl", tmp_path / "out", "python")
    started = {word for peer in PEERS.values() for word in peer.command(job) if word.endswith("_driver.py")}
    there = {str(path) for path in HERE.glob("*_driver.py")}
    assert started == there
    for path in there:
        ast.parse((HERE / path).read_text(), path)


def test_each_peer_from_pypi_is_set_up_at_one_version():
    """Figures of a version that nobody pinned could not be repeated."""
    script = (HERE / "setup.sh").read_text()
    for peer in filter(None, (peer.package for peer in PEERS.values())):
        assert re.search(rf"^venv {peer} .*?'?{peer}(\[\w+\])?==[\d.]+", script, re.M | re.S), peer


def test_the_page_shows_the_recorded_figures():
    """The table is what was measured, not what somebody typed."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [line for line in lines(RECORDED) if line not in page.splitlines()] == []
    assert set(PEERS) <= set(RECORDED["peers"])


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (WELL, "all rows once, exit 0"),
        (WELL | {"repeated": 3}, "all rows once, exit 0, 3 made again"),
        (WELL | {"lost": 2, "truth": False, "again": {"exit": 0, "lost": 0}},
         "**2 of 9 rows missing**, **exit 0**, once more: all rows, exit 0"),
        (WELL | {"lost": 2, "failed": 1, "exit": 1, "again": {"exit": None, "lost": 1}},
         "**2 of 9 rows missing**, 1 of them called failed, exit 1, once more: 1 missing, **does not end**"),
        (WELL | {"doubled": 4}, "**4 rows twice**, exit 0"),
    ],
)  # fmt: skip
def test_an_ending_is_told_in_words(figures, words):
    assert ending(figures, 9) == words


def test_a_torn_line_and_an_open_archive_are_read_as_far_as_they_go(tmp_path):
    """What a SIGKILL leaves."""
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text('{"id": 1}\n{"id": ')
    packed.write_bytes(gzip.compress(b'{"id": 1}\n' * 9)[:-8])
    assert [*records(plain)] == [{"id": 1}]
    assert [*records(packed)] == [{"id": 1}] * 9
    assert [*records(tmp_path / "none")] == []


def test_the_translator_puts_ids_where_vllm_has_them_and_is_away_with_its_server():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "return_token_ids": True}
    with running_simulator(SimulatorConfig(**IDS, instant=True)) as server, vllm_dialect(server.url) as url:
        answer = _ask(url, body)
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
        assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        server.refuse()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            _ask(url, body)
        server.accept()
        assert _ask(url, body)["prompt_token_ids"] == answer["prompt_token_ids"]


def _ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


@pytest.mark.long
def test_the_plays_see_what_a_script_without_patience_does():
    """Killed, it resumes; away for longer than its tries, it leaves rows out and says nothing; again, it makes them."""
    figures = compared("evening", None, 200, 10.0)
    steady, killed, away = (figures[play] for play in ("steady", "killed", "away"))
    assert (steady["exit"], steady["lost"], steady["doubled"], steady["truth"]) == (0, 0, 0, True)
    assert steady["rows_per_second"] > 10
    assert steady["memory_mb"] > 10
    assert (killed["lost"], killed["doubled"], killed["truth"]) == (0, 0, True)
    assert (away["exit"], away["truth"], away["again"]) == (0, False, {"exit": 0, "lost": 0})
    assert away["lost"] > 0

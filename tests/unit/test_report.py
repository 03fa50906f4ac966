"""`headrace report`: one page that says what the files say, safe to open, nothing from the network."""

import dataclasses
import itertools
import re
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from app.cli.main import cli
from app.eventlog import note
from app.inventory import inventory
from app.ledger import Ledger
from app.manifest import InputFile, Recipe, RunFile, write_run_file
from app.offline.report import gather, page
from app.offline.report.charts import outages, thinned
from app.offline.report.gather import BIN_SECONDS, Course, latency_bin, latency_edge
from app.reasons import Reason
from app.rundir import RunDir
from tests.run_on_disk import AT, RECIPE, a_row, rejection, response, write, write_completed

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def rundir(tmp_path):
    """Two answers at two endpoints a minute and a half apart, one row refused with a text that would be markup."""
    made = RunDir(tmp_path / "out")
    made.private.mkdir(parents=True)
    at = [START.timestamp(), START.timestamp() + 90]
    for n, (second, url, attempt) in enumerate(zip(at, ("http://a:1", "http://b:1"), (1, 3), strict=True)):
        write_completed(made, response(
            a_row(n), endpoint=url, attempt=attempt, latency_seconds=10.0, output_ids=[8] * 99 + [2],
            started_at=datetime.fromtimestamp(second, UTC).isoformat(),
        ))  # fmt: skip
    write(made, [dataclasses.replace(rejection(a_row(7), Reason.TOO_LONG), detail="<script>alert(1)</script>")])
    write_run_file(made.run_json, RunFile(
        run_id="run7", created_at=AT, headrace="0", recipe=Recipe(tokenizer={}, rendering={}, sampling={"top_p": 0.9}),
        recipe_fingerprint=RECIPE, servers={"srv1": {"version": "0.5.17"}},
        datasets=[InputFile(dataset="chat", path="/data/chat.jsonl", size_bytes=1234, sha256="ab" * 32)],
    ))  # fmt: skip
    return made


def gathered(rundir: RunDir):
    """The report of a run on disk."""
    from app.cli.inspect import existing_run
    from app.cli.watching import facts_of

    _, run_file = existing_run(rundir.out)
    with Ledger.open(rundir) as ledger:
        ledger.catch_up()
        return gather(rundir, run_file, inventory(facts_of(rundir, run_file, None), ledger.counts(), None))


def test_tokens_over_time_add_up_to_the_tokens_there_are(rundir):
    report = gathered(rundir)
    points = report.tokens.points()
    area = sum(value * (until - at) for (at, value), (until, _) in itertools.pairwise(points))
    assert area == pytest.approx(200)
    assert report.total_tokens == 200


def test_a_stretch_with_nothing_in_flight_is_a_pause_and_no_working_time(rundir):
    report = gathered(rundir)
    [(start, end)] = report.pauses
    assert start - START.timestamp() == pytest.approx(10, abs=BIN_SECONDS)
    assert end - START.timestamp() == pytest.approx(90, abs=BIN_SECONDS)
    assert report.working_seconds == pytest.approx(20, abs=2 * BIN_SECONDS)


def test_requests_beyond_one_an_answer_are_counted(rundir):
    assert gathered(rundir).extra_requests == 2


def test_an_outage_lasts_until_the_endpoint_answers_again(rundir):
    note(rundir, "endpoint_down", endpoint="http://a:1", detail="refused")
    note(rundir, "endpoint_up", endpoint="http://a:1")
    with rundir.events.open("ab") as file:
        file.write(b'{"at": "2026-')  # torn by a kill
    report = gathered(rundir)
    assert [event["event"] for event in report.events] == ["endpoint_down", "endpoint_up"]
    assert len(outages(report)) == 1


def test_the_page_says_what_the_files_say_and_escapes_what_is_in_them(rundir):
    text = page(gathered(rundir))
    for said in ("run7", "too_long", "http://a:1", "0.5.17", "/data/chat.jsonl", "top_p", "abababab"):
        assert said in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_the_page_needs_no_network_and_no_script(rundir):
    text = page(gathered(rundir))
    addresses = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(https?:[^"')\s]+)""", text))
    assert all("w3.org" in address or "purl.org" in address for address in addresses), addresses  # names, not places
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == text.count("</svg>") >= 3


def test_a_run_that_has_nothing_yet_has_a_page_too(tmp_path):
    made = RunDir(tmp_path / "out")
    made.private.mkdir(parents=True)
    write_run_file(made.run_json, RunFile(
        run_id="r", created_at=AT, headrace="0", recipe=Recipe(tokenizer={}, rendering={}, sampling={}),
        recipe_fingerprint=RECIPE, datasets=[],
    ))  # fmt: skip
    assert "No row was rejected" in page(gathered(made))


def test_the_command_writes_beside_the_results_or_where_it_is_told(rundir, tmp_path):
    run = CliRunner().invoke
    assert run(cli, ["report", str(rundir.out)], standalone_mode=False).return_value == 0
    assert (rundir.out / "report.html").exists()
    run(cli, ["report", str(rundir.out), "--to", str(tmp_path / "deep" / "a.html")], standalone_mode=False)
    assert (tmp_path / "deep" / "a.html").exists()
    refused = run(cli, ["report", str(rundir.out), "--to", str(tmp_path)], standalone_mode=False)
    assert "is a directory" in str(refused.exception)


def test_no_point_of_a_course_is_above_what_there_was_at_once():
    """Four slots, in each one answer of 0.7 s after the other: four at once, never five."""
    course = Course()
    for n in range(400):
        at = 1000 + (n // 4) * 0.7
        course.add(at, at + 0.7, 1)
    values = [value for _, value in course.points()]
    assert max(values) == pytest.approx(4)
    assert values[-1] == 0
    inside = [value for at, value in course.points() if 1001 <= at < 1068]
    assert inside == pytest.approx([4] * len(inside))


def test_thinning_keeps_the_area():
    course = Course()
    for n in range(5000):
        course.add(n * 7, n * 7 + 3, n % 13)
    points = course.points()
    times, values = thinned(points, 100)
    area = sum(value * (until - at) for (at, value), (until, _) in itertools.pairwise(points))
    thin = sum(value * (until - at) for at, until, value in zip(times, times[1:], values, strict=False))
    assert len(times) == 101
    assert thin == pytest.approx(area, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.5, 10.0, 3600.0])
def test_a_latency_lies_in_its_bin(seconds):
    number = latency_bin(seconds)
    assert latency_edge(number) <= max(seconds, 0.001) * 1.0001
    assert max(seconds, 0.001) <= latency_edge(number + 1)


def test_an_event_that_cannot_be_written_is_no_fault(tmp_path):
    note(RunDir(tmp_path / "none"), "endpoint_down")
    assert not (tmp_path / "none").exists()

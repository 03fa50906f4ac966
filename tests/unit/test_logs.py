"""Logs: a line an event, with a stable name, as text or JSON."""

import json
import logging

import pytest

from app.cli.logs import log_to
from app.cli.reference import logged_events
from app.errors import UsageError


@pytest.fixture(autouse=True)
def _put_back():
    """The handlers of the test run."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_every_log_call_begins_with_the_name_of_its_event():
    assert [text for event, _, text in logged_events() if not event] == []


def test_json_lines_have_the_event_and_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
    log_to(tmp_path / "log")
    logging.getLogger("workers").warning("endpoint_open %s: %s", "http://a", 'said "no"\n')
    logging.getLogger("kombu").error("Connection lost")
    ours, theirs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (ours["event"], ours["level"], ours["logger"]) == ("endpoint_open", "WARNING", "workers")
    assert ours["text"] == 'endpoint_open http://a: said "no"\n'
    assert ours["at"].endswith("+00:00")
    assert theirs["event"] == ""


def test_a_traceback_stays_in_its_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
    log_to(tmp_path / "log")
    try:
        raise ValueError("deep")
    except ValueError:
        logging.getLogger("x").exception("work_failed")
    [line] = (tmp_path / "log").read_text().splitlines()
    assert "deep" in json.loads(line)["traceback"]


@pytest.mark.parametrize(("name", "value"), [("HEADRACE_LOG_FORMAT", "xml"), ("HEADRACE_LOG_LEVEL", "LOUD")])
def test_an_unknown_setting_is_told(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name):
        log_to(tmp_path / "log")

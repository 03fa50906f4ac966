"""app.cli.view: a picture that fits, a line that says enough, no colour where nobody sees it."""

import io

import pytest
from rich.console import Console

from app.cli.view import View, line, picture
from app.snapshot import snapshot
from tests.unit.test_snapshot import FACTS, WASTEFUL, counts, endpoint, now, wasteful


def drawn(seen, width, height=24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(picture(seen, 75, width, height))
    return console.file.getvalue().splitlines()


def full(datasets=2, endpoints=2):
    names = ["glaive_toolcall_v2_filtered", *(f"d{n}" for n in range(1, datasets))]
    many = [counts(name, 10_000_000, 9_876_543, too_long=1234) for name in names]
    urls = [f"http://gpu{n:02}.cluster.example:30000" for n in range(endpoints)]
    return snapshot(FACTS, many, now(
        endpoints=[endpoint(url, 412, model="/models/Kimi-K2.5") for url in urls],
        queued=dict.fromkeys(names, 5000), in_flight=dict.fromkeys(names, 1000),
    ))  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_of_the_picture_fits_its_terminal(width):
    """Large numbers and long names included; at 80 columns and more no number is cut."""
    lines = drawn(full(), width)
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert any(" 9,876,543 10,000,000 " in one for one in lines)
        assert any("gpu00.cluster.example:30000  412 requests" in one for one in lines)
        assert not any("●" in one and "…" in one for one in lines)  # what does not fit is left out as a whole


@pytest.mark.parametrize("height", [12, 24, 50])
def test_a_hundred_endpoints_and_datasets_fit_and_those_in_trouble_are_seen(height):
    """What is left out is said, and is what is well."""
    seen = full(100, 100)
    broken = endpoint("http://broken:1", open_since=1.0, evidence="connection refused")
    lines = drawn(snapshot(FACTS, [], now(endpoints=[*seen.endpoints, broken])), 80, height)
    assert any("broken" in one and "connection refused" in one for one in lines)
    assert any("more, all well" in one for one in lines)
    assert len(drawn(seen, 80, height)) <= max(height, 16)


@pytest.mark.parametrize("height", [16, 24, 50])
def test_what_would_be_better_is_said_once_and_fits(height):
    """With its number, whole, however many endpoints are like that."""
    endpoints = [wasteful(url=f"http://gpu{n:02}.cluster.example:30000") for n in range(20)]
    lines = drawn(snapshot(FACTS, [counts()], now(endpoints=endpoints, **WASTEFUL)), 80, height)
    said = " ".join(one.strip() for one in lines)
    assert said.count("--schedule-conservativeness 0.3") == said.count("--stage-tokens ") == 1
    assert "(and 19 more like it)" in said
    assert max(map(len, lines)) <= 80
    assert len(lines) <= max(height, 18)


def test_the_line_says_where_the_run_stands():
    """One sentence for a log: progress, rate, estimate, how full the endpoints are."""
    assert line(snapshot(FACTS, [counts(too_long=2)], now())) == (
        "running: 40 of 100 rows done, 2 rejected, 58 pending, 10 in flight, 2.0 rows/s, 500 tokens/s, "
        "about 2 min left, KV 22% of budget"
    )


def test_a_pipe_gets_lines_without_a_single_escape(capsys):
    """Not a terminal: no colour, no cursor movement, and not more than one line in its time."""
    with View(line_seconds=30.0, console=Console(file=io.StringIO())) as view:
        for _ in range(3):
            view.show(full())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "\x1b" not in err


def terminal(size=(80, 24)) -> Console:
    return Console(file=io.StringIO(), width=size[0], height=size[1], force_terminal=True)


def test_a_terminal_is_drawn_in_place_and_never_cleared(monkeypatch):
    """Calm: after the first picture only the cursor moves up; the screen is cleared for a new size alone."""
    console = terminal()
    with View(console=console) as view:
        for _ in range(3):
            view._next_at = 0.0
            view.show(full())
        assert "\x1b[2J" not in console.file.getvalue()
        console.width = 100
        view._next_at = 0.0
        view.show(full())
        assert "\x1b[2J" in console.file.getvalue()


def test_no_color_is_heeded(monkeypatch):
    """NO_COLOR: the picture without a colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal()
    with View(console=console) as view:
        view.show(full())
    assert "\x1b[3" not in console.file.getvalue().replace("\x1b[39", "")


def test_an_endpoint_that_goes_and_comes_is_told_once_each(capsys):
    """Sentences that stay, beside the picture that does not."""
    away = now(endpoints=[endpoint(open_since=1.0, evidence="connection refused, at http://gpu1:30000")])
    with View(console=Console(file=io.StringIO())) as view:
        for state in (now(), away, away, now(), now()):
            view.show(snapshot(FACTS, [counts()], state))
    told = [one for one in capsys.readouterr().err.splitlines() if "gpu1" in one and "waiting" not in one]
    assert told[0].endswith("is away: connection refused")
    assert "answers again" in told[1]
    assert len(told) == 2

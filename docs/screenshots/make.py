"""Pictures for the documentation, and whether they show what they must: Flower's pages and the live view during a run,
the report after it.

    make screenshots      (needs `chromium` on PATH: apt install chromium; about a minute and a half)

Starts a run against two simulated endpoints, one of which crashes on the way, with Flower; a headless Chromium shows
each page, is asked for what stands there, and takes its picture. Exits 1 with a sentence for everything that a page
must show and does not, shows and must not (a secret, `undefined`), or hides beyond the edge of a narrow window.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from browser import Page, browser
from rich.console import Console

from app.cli.demo import simulated_server
from app.cli.view import picture
from app.cli.watching import sight_of
from app.rundir import RunDir
from app.store.embedded import noted_address

HERE = Path(__file__).parent
DEMO = HERE.parent.parent / "app" / "demo_data"
_WINDOW, _WIDTHS, _COLUMNS = (1440, 800), (390, 820, 1280), (80, 120)
_API_KEY = "sk-never-to-be-seen"
_LOGIN = ("headrace", "screenshots")
_FLOWER = "http://127.0.0.1:5555"
_CRASH = {"crash_after_completions": 400, "crashes_left": 1, "freeze_seconds": 1.0, "down_seconds": 4.0}
_MOST_BYTES = 150_000
#: What no page may show: values that JavaScript or Python have in place of one.
_NEVER = re.compile(r"\b(undefined|NaN|None|null)\b")


def main() -> int:
    """Make all pictures; 1 if something is wrong with one."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [stack.enter_context(simulated_server(DEMO / "tokenizer", faults)) for faults in ({}, _CRASH)]
        page, started = stack.enter_context(browser()), time.monotonic()
        with _run(place, urls) as out:
            faults = [*_flower(page, out), *_live_view(page, place, out, started)]
        faults += _report(page, place, out)
    sizes = {path.name: path.stat().st_size for path in HERE.glob("*.png")}
    faults += [f"{name} has {size:,} bytes" for name, size in sizes.items() if size > _MOST_BYTES]
    print("\n".join(faults) or f"{len(sizes)} pictures are in {HERE}")
    return 1 if faults else 0


@contextlib.contextmanager
def _run(place: Path, urls: list[str]) -> Iterator[Path]:
    """A run in its midst, drained at the end: the demo's datasets, a long one, and one whose rows are no prompts."""
    long, bad, out = place / "arithmetic.jsonl", place / "scraped.jsonl", place / "teacher"
    long.write_text("".join(json.dumps({"prompt": f"What is {n} times {n + 1}?"}) + "\n" for n in range(20_000)))
    bad.write_text('{"prompt": ""}\n{"title": "no prompt"}\n{"prompt": "Why?"}\n{\n')
    environment = {"HEADRACE_API_KEY": _API_KEY, "HEADRACE_BASIC_AUTH": ":".join(_LOGIN)}
    bundled = [shutil.copy(DEMO / name, place) for name in ("gsm8k.jsonl", "glaive_tools.json")]
    inputs = [*bundled, long, bad]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "run", *inputs, *(word for url in urls for word in ("--endpoint", url)),
         "--out", out, "--tokenizer", DEMO / "tokenizer", "--max-new-tokens", "512", "--workers", "2", "--slots", "200",
         "--flower"], env=os.environ | environment, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        _until(lambda: sum(1 for _ in (out / "arithmetic" / "raw_responses.jsonl").open("rb")) > 1500)
        yield out
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def _flower(page: Page, out: Path) -> Iterator[str]:
    _until(lambda: len(_ask("/api/workers?refresh=1")) == 2 and _done_tasks())
    worker, (task, facts) = sorted(_ask("/api/workers"))[0], next(iter(_done_tasks().items()))
    socket = noted_address(RunDir(out).redis).removeprefix("unix://")
    page.log_in(*_LOGIN)
    page.be(*_WINDOW)
    for name, path, words in (
        ("workers", "/workers", ["Online", worker, "short-long@"]),
        ("tasks", "/tasks", ["arithmetic:", "arithmetic row ", "long@", "STARTED"]),
        ("task", f"/task/{task}", [task, facts["args"], "SUCCESS", "short-long@"]),
        ("broker", "/broker", ["lane.short", "lane.long", socket]),
        ("worker", f"/worker/{worker}", [worker, "Workers.pool:LoopPool", "Grow", "Shrink", "200"]),
    ):
        yield from _picture(page, f"flower-{name}.png", _FLOWER + path, words)


def _done_tasks() -> dict[str, dict]:
    found = _ask("/api/tasks?limit=50&state=SUCCESS")
    return {name: task for name, task in found.items() if task["args"]}


def _ask(path: str) -> dict:
    login = base64.b64encode(":".join(_LOGIN).encode()).decode()
    request = urllib.request.Request(_FLOWER + path, headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
    except OSError:
        return {}


def _live_view(page: Page, place: Path, out: Path, started: float) -> Iterator[str]:
    """As a terminal of 80 and of 120 columns shows it."""
    for columns in _COLUMNS:
        console = Console(record=True, width=columns, height=24, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with sight_of(out, None) as sight:
            console.print(picture(sight.take(), time.monotonic() - started, columns, 24))
        drawn = place / f"view-{columns}.svg"
        console.save_svg(str(drawn), title=f"headrace watch, {columns} columns")
        width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn.read_text()).groups()
        page.be(round(float(width)), round(float(height)))
        shown = drawn.with_suffix(".html")  # a picture alone has no words to be asked for
        shown.write_text(f"<meta charset=utf-8><style>body {{ margin: 0 }}</style>{drawn.read_text()}")
        words = ["arithmetic", "glaive_tools", "gsm8k", "tokens/s", "requests", "KV ", "queued", "rejected"]
        yield from _picture(page, f"view-{columns}.png", shown.as_uri(), words)


def _report(page: Page, place: Path, out: Path) -> Iterator[str]:
    """A phone, a tablet, a desk; by day and by night."""
    file = place / "report.html"
    subprocess.run([sys.executable, "-m", "app.cli.main", "report", out, "--to", file], check=True, capture_output=True)
    words = [
        "arithmetic", "glaive_tools", "gsm8k", "scraped", "empty_prompt", "unknown_shape", "output tokens per second",
        "requests in flight", "Orange", "endpoint down", "endpoint up", "temperature", "0.5.23", "tokens per second",
    ]  # fmt: skip
    for width in _WIDTHS:
        for scheme in ("light", "dark"):
            page.be(width, 1000, scheme)
            page.open(file.as_uri(), words)
            page.be(width, page.height, scheme)
            yield from _picture(page, f"report-{width}-{scheme}.png", file.as_uri(), words)


def _picture(page: Page, name: str, url: str, words: list[str]) -> Iterator[str]:
    """Take one; what is wrong with it."""
    yield from (f"{name} does not show {word!r}" for word in page.open(url, words))
    page.photograph(HERE / name)
    yield from (f"{name} shows a secret" for secret in (_API_KEY, _LOGIN[1]) if secret in page.text)
    yield from (f"{name} shows {found!r}" for found in sorted(set(_NEVER.findall(page.text))))
    if (hidden := page.hidden_width) > 0:
        yield f"{name}: {hidden} pixels lie beyond the right edge"


def _until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise SystemExit("The run did not come far enough to take pictures of it.")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())

"""Pictures for the documentation: Flower's pages and the live view during a run, and whether they show what they must.

    python docs/screenshots/make.py [FOLDER]      (needs `chromium` on PATH: apt install chromium)

Starts a run against a simulated endpoint, with Flower; a headless Chromium takes each page's picture and its text.
Exits 1 with a sentence for everything that a page must show and does not, or shows and must not (keys of endpoints).
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
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from app.cli.demo import simulated_server
from app.cli.view import picture
from app.cli.watching import sight_of
from app.rundir import RunDir
from app.store.embedded import noted_address

HERE = Path(__file__).parent
TOKENIZER = HERE.parent.parent / "app" / "demo_data" / "tokenizer"
_SIZE = (1440, 800)
_API_KEY = "sk-never-to-be-seen"
_LOGIN = ("headrace", "screenshots")
_BASE = "http://127.0.0.1:5555"


def main() -> int:
    """Make all pictures; 1 if something is wrong with one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as place, simulated_server(TOKENIZER, {}) as endpoint:
        with _run(Path(place), endpoint) as out:
            faults = [*_flower(folder, Path(place), out), *_live_view(folder, Path(place), out)]
    print("\n".join(faults) or f"all pictures are in {folder}")
    return 1 if faults else 0


@contextlib.contextmanager
def _run(place: Path, endpoint: str) -> Iterator[Path]:
    """A run in its midst."""
    data, out = place / "questions.jsonl", place / "out"
    data.write_text("".join(json.dumps({"prompt": f"What is {n} times {n + 1}?"}) + "\n" for n in range(20_000)))
    environment = {"HEADRACE_API_KEY": _API_KEY, "HEADRACE_BASIC_AUTH": ":".join(_LOGIN)}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", "run", f"arithmetic={data}", "--endpoint", endpoint, "--out", str(out),
         "--tokenizer", str(TOKENIZER), "--max-new-tokens", "512", "--workers", "2", "--slots", "200", "--flower"],
        env=os.environ | environment, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        _until(lambda: sum(1 for _ in (out / "arithmetic" / "raw_responses.jsonl").open("rb")) > 150)
        yield out
    finally:
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


# Flower


def _flower(folder: Path, place: Path, out: Path) -> Iterator[str]:
    _until(lambda: len(_ask("/api/workers?refresh=1")) == 2 and _done_tasks())
    worker, (task, facts) = sorted(_ask("/api/workers"))[0], next(iter(_done_tasks().items()))
    socket = noted_address(RunDir(out).redis).removeprefix("unix://")
    for name, path, words in (
        ("workers", "/workers", ["Online", worker, "short-long@"]),
        ("tasks", "/tasks", ["arithmetic:", "arithmetic row ", worker, "STARTED"]),
        ("task", f"/task/{task}", [task, facts["args"], "SUCCESS", worker]),
        ("broker", "/broker", ["lane.short", "lane.long", socket]),
        ("worker", f"/worker/{worker}", [worker, "LoopPool", "Grow", "Shrink", "200", "lane.short", "lane.long"]),
    ):
        text = _photograph(folder / f"flower-{name}.png", place, f"http://{':'.join(_LOGIN)}@127.0.0.1:5555{path}")
        yield from (f"flower-{name}.png does not show {word!r}" for word in words if word not in text)
        yield from (f"flower-{name}.png shows a secret" for secret in (_API_KEY, _LOGIN[1]) if secret in text)


def _done_tasks() -> dict[str, dict]:
    found = _ask("/api/tasks?limit=50&state=SUCCESS")
    return {name: task for name, task in found.items() if task["args"]}


def _ask(path: str) -> dict:
    login = base64.b64encode(":".join(_LOGIN).encode()).decode()
    request = urllib.request.Request(_BASE + path, headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
    except OSError:
        return {}


# the live view


def _live_view(folder: Path, place: Path, out: Path) -> Iterator[str]:
    """As a terminal of 80 and of 120 columns shows it."""
    for columns in (80, 120):
        console = Console(record=True, width=columns, height=24, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with sight_of(out, None) as sight:
            console.print(picture(sight.take(), 754, columns, 24))
        page = place / f"view-{columns}.svg"
        console.save_svg(str(page), title=f"headrace watch, {columns} columns")
        width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', page.read_text()).groups()
        size = (round(float(width)), round(float(height)))
        _photograph(folder / f"view-{columns}.png", place, page.as_uri(), size)
        text = page.read_text().replace("&#160;", " ")
        words = ("arithmetic", "tokens/s", "requests", "KV ", "queued")
        yield from (f"view-{columns}.png does not show {word!r}" for word in words if word not in text)


# Chromium


def _photograph(target: Path, place: Path, url: str, size: tuple[int, int] = _SIZE) -> str:
    """Save a picture of a page; returns its DOM as text."""
    command = [
        shutil.which("chromium") or "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={place / 'chromium'}", f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=8000",
    ]  # fmt: skip
    subprocess.run([*command, f"--screenshot={target.absolute()}", url], capture_output=True, check=True, timeout=90)
    _shrink(target)
    return subprocess.run([*command, "--dump-dom", url], capture_output=True, check=True, timeout=90, text=True).stdout


def _shrink(path: Path) -> None:
    """Fewer colours: a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def _until(condition, seconds: float = 120.0) -> None:
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

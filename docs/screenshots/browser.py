"""A headless Chromium (`apt install chromium`), told what to do through its own DevTools protocol on loopback."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

_START_SECONDS, _PAGE_SECONDS = 60.0, 30.0
_MOST_BYTES = 2**27


class Page:
    """One page of the browser; every method waits for its end."""

    def __init__(self, runner: asyncio.Runner, socket: WebSocketClientConnection):
        self._runner, self._socket, self._numbers = runner, socket, itertools.count(1)
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; its result. Raises RuntimeError if the browser refuses it."""
        return self._runner.run(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(await self._socket.read_message())
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return told["result"]

    def be(self, width: int, height: int, scheme: str = "light") -> None:
        """A window of this size in CSS pixels. scheme: "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def log_in(self, user: str, password: str) -> None:
        """Send this login with everything from now on."""
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.call("Network.enable")
        self.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {token}"})

    def open(self, url: str, words: list[str]) -> list[str]:
        """Show an address; the words that did not come in time."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + _PAGE_SECONDS
        while missing := [word for word in words if word not in self.text]:
            if time.monotonic() > deadline:
                return missing
            time.sleep(0.2)
        return []

    def ask(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    @property
    def text(self) -> str:
        """What it shows, values of fields included."""
        fields = "[...document.querySelectorAll('input')].map(one => one.value).join(' ')"
        text = self.ask(f"document.body ? document.body.innerText + ' ' + {fields} : ''") or ""
        return text.replace("\xa0", " ")

    @property
    def hidden_width(self) -> int:
        """CSS pixels that scrolling sideways alone would show, of the page and of what scrolls within it."""
        within = "[...document.querySelectorAll('.wide')].map(one => one.scrollWidth - one.clientWidth)"
        return self.ask(f"Math.max(document.documentElement.scrollWidth - window.innerWidth, ...{within})")

    @property
    def height(self) -> int:
        """CSS pixels of the whole page."""
        return self.ask("document.documentElement.scrollHeight")

    def photograph(self, target: Path) -> None:
        """The window as a PNG of few colours: a third of the bytes."""
        from PIL import Image

        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        with Image.open(target) as image:
            image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start one, and end it. Raises SystemExit if there is none here."""
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("There is no `chromium` on PATH: apt install chromium.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, asyncio.Runner() as runner:
        process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-port=0",
             "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            socket = runner.run(_connect(_page_address(Path(profile) / "DevToolsActivePort")))
            yield Page(runner, socket)
            socket.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def _connect(url: str) -> WebSocketClientConnection:
    return await websocket_connect(url, max_message_size=_MOST_BYTES)


def _page_address(note: Path) -> str:
    """Where the browser's first page listens; it notes its port once it does."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, IndexError, StopIteration):
            port = note.read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                return next(one["webSocketDebuggerUrl"] for one in json.load(answer) if one["type"] == "page")
        time.sleep(0.1)
    raise SystemExit("Chromium did not start.")

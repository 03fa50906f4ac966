"""Where the commands of the pages are played: a folder with the files that they name, servers and a Redis behind the
addresses that they give. Words of a page stay as they are but for these stand-ins."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from app.cli.main import main
from app.records import Conversation
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.live import workers_at
from app.tokenization import Renderer, RenderOptions
from tests.acceptance.harness import DEMO, IDS, TOKENIZER
from tests.belt import until
from tests.docs.pages import ROOT, Line

#: Read or write files alone, so they are played in this process.
OFFLINE = ("status", "verify", "plan", "audit", "tokenize", "retry", "report", "export", "adopt")
#: Look at a run that goes on, or change it: OUT is such a run, whatever the page calls it.
LOOKING = ("watch", "flower", "metrics", "workers", "endpoints")
#: Stay until they are stopped, and so do the next commands of their block need them: what they say when they are ready.
STAYS = {
    "simulate": "http://", "worker": "", "collect": "", "enqueue": "", "watch": "running", "flower": "Flower at http",
    "metrics": "http://",
}  # fmt: skip
_OUT = re.compile(r"out|try|runs/\w+")
_ROWS, _GOING_ROWS, _EOS = 12, 20_000, 163_586
_SERVER = SimulatorConfig(**IDS, output_mean=40, step_seconds=0.01, max_running_requests=64)


def questions(name: str) -> list[str]:
    """The demo's first prompts, in the words of this file alone: a run takes no file twice."""
    rows = (DEMO / "gsm8k.jsonl").read_text().splitlines()[:_ROWS]
    return [f"{json.loads(row)['question']} ({name})" for row in rows]


def furnish(folder: Path) -> None:
    """The files that the pages name: inputs, and what another script made of some of them."""
    (folder / "data").mkdir(parents=True)
    for name in ("prompts.jsonl", "data.jsonl", "b1.jsonl", "data/glaive.jsonl"):
        _write_lines(folder / name, [{"prompt": text} for text in questions(name)])
    for name in ("b2.parquet", "data/code.parquet"):
        pq.write_table(pa.table({"prompt": questions(name)}), folder / name)
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    _write_lines(folder / "chats.jsonl", [
        {"messages": [*turns, {"role": "user", "content": text}]} for text in questions("chats.jsonl")
    ])  # fmt: skip
    renderer = Renderer(RenderOptions(str(TOKENIZER)))
    for of, saved in (("b1.jsonl", "old/B1"), ("data/glaive.jsonl", "old_dir/B1_glaive")):
        answers = [_old_answer(n, text, renderer) for n, text in enumerate(questions(of))]
        _write_lines(folder / saved / "raw_responses.jsonl", answers)
    (folder / "restart.sh").write_text("#!/bin/sh\n")


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _old_answer(n: int, text: str, renderer: Renderer) -> dict:
    prompt = renderer.render(Conversation([{"role": "user", "content": text}]))
    ids = [*(300 + (n * 13 + i) % 3000 for i in range(20)), _EOS]
    return {"prompt_token_ids": prompt, "output_ids": ids, "finish_reason": "stop", "model": "teacher"}


@dataclass
class Stage:
    """One folder; use as a context manager. Servers come when a command names them."""

    folder: Path
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _addresses: dict[str, str] = field(default_factory=dict)
    _staying: list[tuple[Line, subprocess.Popen, Path]] = field(default_factory=list)

    def __enter__(self) -> "Stage":
        furnish(self.folder)
        self._stack.callback(self._kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play_here(self, line: Line) -> tuple[int, str]:
        """Exit code and what it said, in this process; its OUT is there."""
        words = self._words(line)
        for out in filter(_OUT.fullmatch, words if words[0] != "adopt" else ()):
            self._run_on_disk(self.folder / out)
        said = io.StringIO()
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(words)
        except SystemExit as ended:
            return int(ended.code or 0), said.getvalue()

    def play(self, line: Line) -> tuple[int, str]:
        """Exit code and what it said. One that stays gives 0 as soon as it is ready, and goes on until `end_block`."""
        words = self._words(line)
        if words[0] in OFFLINE:
            return self.play_here(line)
        if words[0] in LOOKING:
            going = str(self._going())
            words = [going if _OUT.fullmatch(word) else word for word in words]
        log = self.folder / f"{len(list(self.folder.glob('*.said')))}.said"
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.cli.main", *words], stdout=said, stderr=said, cwd=self.folder,
                stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self._staying.append((line, process, log))
        if words[0] not in STAYS:
            code = process.wait(120)
            self._staying.pop()
            return code, log.read_text()
        until(lambda: process.poll() is not None or self._is_ready(words, log), 60, f"{line}: {log.read_text()}")
        return process.poll() or 0, log.read_text()

    def end_block(self) -> list[str]:
        """Producers come to their end, all that stays besides is stopped; what went wrong."""
        faults = []
        for line, process, log in sorted(self._staying, key=lambda one: one[0].words[1] != "enqueue"):
            name = line.words[1]
            if name != "enqueue":
                process.send_signal(signal.SIGINT if name == "watch" else signal.SIGTERM)
            if (code := process.wait(90)) != 0:
                faults.append(f"{line} ended with {code}:\n{log.read_text()}")
        self._staying.clear()
        return faults

    def _is_ready(self, words: list[str], log: Path) -> bool:
        if words[0] == "enqueue":
            return (self.folder / words[words.index("--out") + 1] / ".headrace" / "settings.json").exists()
        if words[0] == "worker":
            with contextlib.closing(connect(self._address("redis"))) as client:
                return bool(workers_at(client))
        return STAYS[words[0]] in log.read_text()

    def _words(self, line: Line) -> list[str]:
        """The command's words without `headrace`, every address and foreign path replaced."""
        text = re.sub(r"/models/[\w.-]+|app/demo_data/tokenizer", str(TOKENIZER), line.text)
        text = re.sub(r"http://(gpu\d|router|127\.0\.0\.1):30000", lambda found: self._address(found[1]), text)
        text = re.sub(r"redis://box:6379/0", lambda _: self._address("redis"), text)
        text = re.sub(r"a1\.short-long@gpu7", lambda _: self._a_worker(), text)
        text = re.sub(r"(?<=--port )30000", lambda _: self._address("127.0.0.1").rsplit(":")[-1], text)
        words = Line(line.page, line.number, line.block, text).words[1:]
        return [*words, "--port", "0"] if words[0] in ("flower", "metrics") else words

    def _address(self, name: str) -> str:
        """Of the server that a page calls so. 127.0.0.1 is the one that it starts itself."""
        if name not in self._addresses:
            self._addresses[name] = self._started(name)
        return self._addresses[name]

    def _started(self, name: str) -> str:
        if name == "redis":
            server = PrivateServer(self.folder / "box")
            server.start()
            self._stack.callback(server.stop)
            return server.url
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(running_simulator(_SERVER)).url
            if name != "127.0.0.1":  # of that one only its free port is wanted
                self._stack.push(stack.pop_all())
        return url

    def _a_worker(self) -> str:
        with contextlib.closing(connect(self._address("redis"))) as client:
            return workers_at(client)[0].name

    def _going(self) -> Path:
        """A run that goes on, at gpu1."""
        out = self.folder / "going" / "out"
        if not out.exists():
            out.parent.mkdir()
            rows = "".join(json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(_GOING_ROWS))
            (out.parent / "rows.jsonl").write_text(rows)
            process = subprocess.Popen(
                [sys.executable, "-m", "app.cli.main", "run", out.parent / "rows.jsonl", "--out", out,
                 "--endpoint", self._address("gpu1"), "--tokenizer", TOKENIZER],
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            self._stack.callback(process.wait, 60)
            self._stack.callback(process.terminate)
            until(lambda: any(out.glob("*/tokenized_data.jsonl")), 60, "the run that goes on")
        return out

    def _run_on_disk(self, out: Path) -> None:
        """A run of two datasets, one half done, as `adopt` makes it of what another script saved."""
        base = self.folder / "base"
        if not base.exists():
            line = Line("", 0, 0, "headrace adopt base old/ B1=b1.jsonl B2=b2.parquet --tokenizer /models/a"
                        " --max-new-tokens 8192")  # fmt: skip
            code, said = self.play_here(line)
            assert code == 0, said
        if not out.exists():
            shutil.copytree(base, out)

    def _kill(self) -> None:
        for _, process, _ in self._staying:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""`headrace doctor`: one line per layer, each in order or with its remedy. Looks, and changes nothing.

What a command line names is looked at; what it does not name is skipped with a word of how to name it. Needs no run.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import SecretStr

from app.cli.limits import slots_within_limits
from app.cli.talk import show
from app.errors import OK, STORAGE, USAGE, HeadraceError, StorageError, UsageError

_LEAST_PYTHON = (3, 11)
_SLOTS = 1000
#: Bytes in the two files for each token, prompt and answer: ids as text twice, mask, text. Measured on a run of short
#: rows with six-digit ids; long rows need less.
BYTES_PER_TOKEN = 24
_CLOCK_SECONDS = 2.0
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ok None: not looked at."""

    layer: str
    ok: bool | None
    text: str
    remedy: str = ""
    exit_code: int = USAGE

    def line(self) -> str:
        """For people."""
        mark = {True: "ok", False: "FAULT", None: "-"}[self.ok]
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{mark:<6}{self.layer:<12}{self.text}{remedy}"


def doctor_command(values: Mapping[str, Any]) -> int:
    """`headrace doctor`. 0 if nothing is wrong, else the exit code that a run would end with (2 or 4)."""
    findings: list[Finding] = []
    for finding in examine(values):
        findings.append(finding)
        if not values["as_json"]:
            show(finding.line())  # line by line: an endpoint may take its time
    if values["as_json"]:
        keys = ("layer", "ok", "text", "remedy")
        show(json.dumps([{key: getattr(one, key) for key in keys} for one in findings], ensure_ascii=False))
    faults = [one.exit_code for one in findings if one.ok is False]
    return USAGE if USAGE in faults else STORAGE if faults else OK


def examine(values: Mapping[str, Any]) -> Iterator[Finding]:
    """All findings, cheap layers first."""
    yield _python()
    yield _packages()
    yield _open_files()
    yield from _redis(values["redis"])
    infos = yield from _endpoints(values["endpoints"], values["api_key"], values["out"])
    yield from _tokenizer(values, infos)
    yield from _output(values)


def _python() -> Finding:
    good = sys.version_info[:2] >= _LEAST_PYTHON
    remedy = "" if good else f"use Python {'.'.join(map(str, _LEAST_PYTHON))} or newer"
    return Finding("Python", good, f"{platform.python_version()}, {os.cpu_count()} cores", remedy)


def _packages() -> Finding:
    """What is installed against what this version of Headrace asks for."""
    wrong, shown = [], []
    for text in importlib.metadata.requires("headrace") or []:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
        if wanted.name in ("celery", "redis", "httpx", "transformers"):
            shown.append(f"{wanted.name} {version}")
    remedy = "pip install --require-hashes -r requirements.txt" if wrong else ""
    return Finding("packages", not wrong, ", ".join(wrong or shown), remedy)


def _open_files() -> Finding:
    held = slots_within_limits(_SLOTS)
    if held >= _SLOTS:
        return Finding("open files", True, f"enough for {_SLOTS:,} requests a worker")
    return Finding("open files", False, f"a worker can hold {held:,} requests", f"ulimit -n {_SLOTS + 100}")


def _redis(url: str | None) -> Iterator[Finding]:
    from app.store.connection import check, connect, safe_url, translated
    from app.store.embedded import server_binary

    if url is None:
        yield _looked("Redis", lambda: f"private: {server_binary()}")
        return
    client = None
    try:
        client = connect(url)
        check(client, url)
        with translated(url):
            server, memory, stored = client.info("server"), client.info("memory"), client.info("persistence")
            seconds, micro = client.time()
    except HeadraceError as exc:
        yield _fault("Redis", exc)
        return
    finally:
        if client is not None:
            client.close()
    name = "Valkey" if "valkey_version" in server else "Redis"
    version = server.get("valkey_version") or server.get("redis_version")
    most = memory.get("maxmemory") or 0
    room = f"{memory['used_memory'] / _GB:.2f} of {most / _GB:.2f} GB" if most else \
        f"{memory['used_memory'] / _GB:.2f} GB, no limit"  # fmt: skip
    aof = bool(stored.get("aof_enabled"))
    yield Finding(
        "Redis", True, f"{safe_url(url)}: {name} {version}, noeviction, AOF {'on' if aof else 'off'}, {room}",
        "" if aof else "after its restart queues are made again from the files; `CONFIG SET appendonly yes` keeps them",
    )  # fmt: skip
    ahead = seconds + micro / 1e6 - time.time()
    note = "" if abs(ahead) < _CLOCK_SECONDS else " (leases follow Redis; only times in the records differ)"
    yield Finding("clock", True, f"Redis is {abs(ahead):.1f} s {'behind' if ahead < 0 else 'ahead of'} this host{note}")


def _endpoints(urls: Sequence[str], api_key: str | None, out: Path | None):
    """A finding each, and one where it could be used better; returns what those that answered say of themselves.
    out: where a run may have answers, for their lengths."""
    from app.cli.meet import small_pool
    from app.sglang.client import SGLangClient
    from app.sglang.faults import Fault
    from app.sglang.wire import EndpointInfo, Loads
    from app.urls import normalise

    if not urls:
        yield Finding("endpoint", None, "not looked at", "--endpoint URL")
        return []

    async def ask(url: str) -> tuple[EndpointInfo, Loads | None, float | None] | Fault:
        async with SGLangClient(SecretStr(api_key) if api_key else None) as client:
            loads, conservativeness = None, None
            with contextlib.suppress(Fault):  # a router does not tell; and who is away is told below
                loads = await client.loads(url)  # before the canary has waited for its turn
                conservativeness = (await client.launch(url)).conservativeness
            try:
                await client.canary(url, {"max_new_tokens": 1, "temperature": 0.0})
                return await client.info(url), loads, conservativeness
            except Fault as fault:
                return fault

    found: list[EndpointInfo] = []
    for text in urls:
        try:
            url = normalise(text)
        except UsageError as exc:
            yield _fault("endpoint", exc)
            continue
        told = asyncio.run(ask(url))
        if isinstance(told, Fault):
            yield Finding("endpoint", False, str(told), "start it, or correct --endpoint or HEADRACE_API_KEY")
            continue
        info, loads, conservativeness = told
        found.append(info)
        kv = f"{info.kv_tokens:,} KV tokens" if info.kv_tokens else "KV tokens not told (use --concurrency N)"
        context = f"context {info.context_length:,}" if info.context_length else "context not told"
        yield Finding("endpoint", True, f"{url}: {info.model}, SGLang {info.version}, {kv}, {context}, generates",
                      small_pool(info) or "")  # fmt: skip
        if sentence := _load(info, loads, conservativeness, out):
            yield Finding("load", True, f"{url}: {sentence}")
    models = {info.model for info in found}
    if len(models) > 1:
        yield Finding("endpoints", False, f"they serve {len(models)} models", "one run needs one model")
    return found


def _load(info: Any, loads: Any, conservativeness: float | None, out: Path | None) -> str | None:
    """What to change at a busy server."""
    from app.cli.inspect import answers_of, load_advice

    if loads is None or not info.kv_tokens:
        return None
    answers = None
    with contextlib.suppress(UsageError):  # there is no run yet, or none of its answers
        answers = answers_of(out) if out and loads.waiting else None
    return load_advice(info, loads, conservativeness, answers)


def _tokenizer(values: Mapping[str, Any], infos: Sequence[Any]) -> Iterator[Finding]:
    if not values["tokenizer"]:
        yield Finding("tokenizer", None, "not looked at", "--tokenizer DIR")
        return
    from app.cli.meet import model_vocabulary
    from app.records import Conversation
    from app.tokenization import Renderer, RenderOptions

    template = values["chat_template"]
    try:
        renderer = Renderer(RenderOptions(
            values["tokenizer"], values["trust_remote_code"], str(template) if template else None,
        ))  # fmt: skip
        prompt = renderer.render(Conversation(messages=[{"role": "user", "content": "Hello"}], tools=[]))
    except HeadraceError as exc:
        yield _fault("tokenizer", exc)
        return
    except Exception as exc:  # noqa: BLE001 - a template is its author's program
        yield Finding("tokenizer", False, f"its chat template fails on a plain question: {exc}", "--chat-template FILE")
        return
    model = renderer.model_vocab_size or next((size for size in map(model_vocabulary, infos) if size), None)
    has = f"the model has {model:,}" if model else "the model's vocabulary is not told (`headrace run --vocab-size N`)"
    question = f"a plain question is {len(prompt)} ids and ends in {renderer.decode(prompt[-2:])!r}"
    yield Finding("tokenizer", True, f"{renderer.vocab_size:,} ids, {has}; {question}")


def _output(values: Mapping[str, Any]) -> Iterator[Finding]:
    out: Path | None = values["out"]
    if out is None:
        yield Finding("output", None, "not looked at", "--out DIR")
        return
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Finding("output", False, f"{there} is no directory that can be written", "another --out", STORAGE)
        return
    free = shutil.disk_usage(there).free
    if not values["rows"]:
        yield Finding("output", True, f"{there}: {free / _GB:,.0f} GB free", "--rows N tells whether it is enough")
        return
    needed = values["rows"] * values["avg_tokens"] * BYTES_PER_TOKEN
    good = free > needed
    yield Finding("output", good, f"{there}: {free / _GB:,.0f} GB free, about {needed / _GB:,.1f} GB needed",
                  "" if good else "free some, or another --out", STORAGE)  # fmt: skip


def _looked(layer: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(layer, True, look())
    except HeadraceError as exc:
        return _fault(layer, exc)


def _fault(layer: str, exc: HeadraceError) -> Finding:
    code = STORAGE if isinstance(exc, StorageError) else USAGE
    return Finding(layer, False, str(exc).rstrip("."), exit_code=code)

"""Before the first row is sent: which endpoints answer, what they are, and whether they take the run's parameters."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import SecretStr

from app.errors import Incomplete, UsageError
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault, FaultKind
from app.sglang.wire import EndpointInfo, Readiness

_RETRY_SECONDS = 0.5
_FIRST_SAY_SECONDS, _SAY_SECONDS = 1.0, 10.0  # trouble is said soon, then patiently
_OTHERS_SECONDS = 5.0  # once one answers, those not heard of have this long to be in the first survey

_REMEDY = {
    FaultKind.UNAUTHORIZED: "set HEADRACE_API_KEY (or --api-key) to the key that it was started with",
    FaultKind.BAD_PARAMETERS: "change --sampling or the option that it names",
    FaultKind.UNUSABLE_VERSION: "then repeat the command",
}

LOADING, PAUSED = "it is loading", "it is paused, until somebody calls its /continue_generation"
_PATIENT = {Readiness.LOADING: LOADING, Readiness.PAUSED: PAUSED}  # waited for, however long it takes
Survey = dict[str, EndpointInfo | str]  # what it said of itself, or why it cannot be used yet


def survey(
    urls: Sequence[str], sampling: dict[str, Any], *, api_key: SecretStr | None, vocab_size: int, wait_seconds: float,
    say: Callable[[str], None],
) -> Survey:  # fmt: skip
    """Wait until an endpoint generates with the run's parameters. Raises Incomplete if none does in time, UsageError
    for what waiting cannot mend (a wrong key, no SGLang there, refused parameters, a version without output ids)."""

    async def work() -> Survey:
        async with SGLangClient(api_key) as client:
            return await _Surveyor(client, sampling, vocab_size, wait_seconds, say).survey(urls)

    return asyncio.run(work())


class _Surveyor:
    def __init__(self, client: SGLangClient, sampling: dict[str, Any], vocab_size: int, wait: float, say: Callable):
        self._client, self._sampling, self._vocab_size, self._wait, self._say = client, sampling, vocab_size, wait, say
        self._found: Survey = {}
        self._urls: Sequence[str] = ()
        self._loading: set[str] = set()

    async def survey(self, urls: Sequence[str]) -> Survey:
        self._urls = urls
        tasks = {asyncio.create_task(self._ask(url)) for url in urls}
        started, say_at = time.monotonic(), _FIRST_SAY_SECONDS
        try:
            while not self._usable():
                done, tasks = await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                waited = time.monotonic() - started
                if waited > self._wait and not self._loading and not self._usable():
                    raise Incomplete(
                        f"No endpoint answered within {self._wait:g} s: {self._troubles()}; start one or correct "
                        "its URL, then repeat the command (--endpoint-wait SECONDS waits longer)."
                    )
                if waited >= say_at and not self._usable():
                    say_at = waited + _SAY_SECONDS
                    self._say(f"waiting for an endpoint: {self._troubles()}")
            others_until = time.monotonic() + _OTHERS_SECONDS
            while tasks and len(self._found) < len(urls) and time.monotonic() < others_until:
                done, tasks = await asyncio.wait(tasks, timeout=0.1)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {url: self._found.get(url, "it has not answered yet") for url in urls}

    async def _ask(self, url: str) -> None:
        while True:
            try:
                readiness = await self._client.is_ready(url)
                (self._loading.add if readiness in _PATIENT else self._loading.discard)(url)
                if readiness in _PATIENT:
                    self._found[url] = _PATIENT[readiness]
                if readiness is Readiness.AWAY:
                    await self._client.info(url)  # the probe keeps the evidence to itself; this one tells it
                else:  # also while it says that it is not ready: only a generation proves anything
                    await self._client.canary(url, self._sampling, vocab_size=self._vocab_size)
                    info = await self._client.info(url)
                    if sentence := info.drops(self._sampling):
                        remedy = "give --endpoint the servers behind it, or leave that parameter out"
                        raise UsageError(f"{url}: {sentence}; {remedy}.")
                    self._found[url] = info
                    return
            except Fault as fault:
                if fault.fatal_for_run:
                    raise UsageError(f"{fault.detail}; {_REMEDY.get(fault.kind, 'correct --endpoint')}.") from fault
                if url not in self._loading:
                    self._found[url] = fault.detail
            await asyncio.sleep(_RETRY_SECONDS)

    def _usable(self) -> bool:
        return any(isinstance(found, EndpointInfo) for found in self._found.values())

    def _troubles(self) -> str:
        found = {url: str(self._found.get(url, "no answer yet")) for url in self._urls}
        return "; ".join(f"{url}: {text.removesuffix(f', at {url}')}" for url, text in found.items())

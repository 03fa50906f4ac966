"""Before the first row is sent: which endpoints answer, what they are, and whether they take the run's parameters."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import SecretStr

from app.errors import Incomplete, UsageError
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault
from app.sglang.wire import EndpointInfo, Readiness

_RETRY_SECONDS = 0.5
_OTHERS_SECONDS = 5.0  # once one answers, the others have this long to be in the first survey

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
        self._loading = False

    async def survey(self, urls: Sequence[str]) -> Survey:
        tasks = {asyncio.create_task(self._ask(url)) for url in urls}
        started, said = time.monotonic(), 0.0
        try:
            while not self._usable():
                done, tasks = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                waited = time.monotonic() - started
                if waited > self._wait and not self._loading and not self._usable():
                    raise Incomplete(f"No endpoint answered within {self._wait:g} s: {self._troubles()}")
                if waited - said >= 5.0:
                    said = waited
                    self._say(f"waiting for an endpoint: {self._troubles()}")
            if tasks:
                done, tasks = await asyncio.wait(tasks, timeout=_OTHERS_SECONDS)
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
                self._loading = readiness is Readiness.LOADING
                if readiness in (Readiness.READY, Readiness.UNKNOWN):
                    await self._client.canary(url, self._sampling, vocab_size=self._vocab_size)
                    self._found[url] = await self._client.info(url)
                    return
                self._found[url] = f"it is {readiness}"
            except Fault as fault:
                if fault.fatal_for_run:
                    raise UsageError(f"{fault.detail}.") from fault
                self._found[url] = fault.detail
            await asyncio.sleep(_RETRY_SECONDS)

    def _usable(self) -> bool:
        return any(isinstance(found, EndpointInfo) for found in self._found.values())

    def _troubles(self) -> str:
        return "; ".join(f"{url}: {found}" for url, found in self._found.items()) or "no answer yet"

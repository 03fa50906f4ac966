"""A bare HTTP client for tests of the simulated server: no pool, no retries, errors as http.client raises them."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """Status, headers and bytes of one answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body read as JSON."""
        return json.loads(self.body)


def call(url: str, path: str, body: Any = None, method: str = "", headers: dict[str, str] | None = None) -> Reply:
    """One exchange. body: bytes as they are, anything else as JSON. Waits at most 20 s."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if headers is None else headers
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def generate(url: str, ids: list[int], max_new_tokens: int = 64, rid: str | None = None, **sampling: Any) -> Reply:
    """POST /generate for one prompt."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": max_new_tokens, **sampling}}
    return call(url, "/generate", body if rid is None else {**body, "rid": rid})


def together(calls: list) -> list:
    """Runs all callables at once in threads; results in order."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [future.result() for future in [pool.submit(one) for one in calls]]



def until(server: Any, **wanted: int) -> None:
    """Waits until those statistics of a running simulator have those values; fails after 10 s."""
    deadline = time.monotonic() + 10
    while (now := {name: server.stats()[name] for name in wanted}) != wanted:
        assert time.monotonic() < deadline, f"still {now}, not {wanted}"
        time.sleep(0.002)

"""One spelling for every endpoint URL, so that leases, breakers and learned capacity of an endpoint never split in two.

Invariant: `normalise` is idempotent, and what it returns can be followed by `/generate`.
"""

import ipaddress
import re
from functools import lru_cache
from hashlib import blake2b
from urllib.parse import SplitResult, urlsplit

from app.errors import UsageError

_FORM = "an endpoint looks like http://host:port"
_DEFAULT_PORT = {"http": 80, "https": 443}
_HOST = re.compile(r"(?=.*[a-z])[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
# What people paste along from an OpenAI base URL or from SGLang's own log; longest first.
_TAILS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/generate", "/health", "/v1")


def normalise(url: str) -> str:
    """`scheme://host[:port][/prefix]`: http unless given, host in lower case, default port and known tails dropped.

    Raises UsageError for everything else, credentials included: they would end up in logs and records.
    """
    text = url.strip()
    shown = re.split(r"[?#]", text)[0].rpartition("@")[2]  # what may stand in a message: no user, no query
    if "@" in text:
        raise UsageError(f"The endpoint URL …@{shown} holds credentials; give keys with --api-key; {_FORM}.")
    if "?" in text or "#" in text:
        raise UsageError(f"The endpoint URL {shown} has a query or a fragment; {_FORM}.")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = "" if parts.port in (None, _DEFAULT_PORT.get(parts.scheme)) else f":{parts.port}"
        return f"{parts.scheme}://{_host(parts)}{port}{_prefix(parts.path)}"
    except ValueError as exc:
        raise UsageError(f"{text!r} is no endpoint URL ({exc}); {_FORM}.") from exc


@lru_cache(maxsize=4096)
def endpoint_key(url: str) -> str:
    """12 hex digits that stand for an endpoint in the names of Redis keys, however its URL is spelled."""
    return blake2b(normalise(url).encode(), digest_size=6, person=b"endpoint").hexdigest()


def _host(parts: SplitResult) -> str:
    """The host in lower case, IPv6 in brackets. Raises ValueError."""
    if parts.scheme not in _DEFAULT_PORT:
        raise ValueError("the scheme must be http or https")
    host = (parts.hostname or "").lower()
    if parts.port == 0 or host in _DEFAULT_PORT:
        raise ValueError("port 0, or one slash too few")
    if ":" in host:
        return f"[{ipaddress.IPv6Address(host)}]"
    if not _HOST.fullmatch(host):
        return str(ipaddress.IPv4Address(host))
    return host


def _prefix(path: str) -> str:
    """The path without slashes and known tails at its end: "" for nearly everybody, a gateway's prefix for some."""
    path = path.rstrip("/")
    while tail := next((tail for tail in _TAILS if path.endswith(tail)), ""):
        path = path.removesuffix(tail).rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~%:+=-]+)+", path):
        raise ValueError("no server has such a path")
    return path

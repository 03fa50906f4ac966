"""Whether anybody listens at an address: the cheapest question there is, for asking it often."""

import asyncio
from urllib.parse import urlsplit

_KNOCK_SECONDS = 1.0
_PORTS = {"http": 80, "https": 443}


async def listens(url: str) -> bool:
    """Whether a connection to an endpoint's URL is accepted within a second. Nothing is sent."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_KNOCK_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or _PORTS[parts.scheme])
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

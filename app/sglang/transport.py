"""The network under the SGLang client: httpx on top of an aiohttp session, and every way in which it can fail.

httpx's own pool looks at every connection for every request, which costs milliseconds from a few hundred in flight on
(docs/decisions/0001-httpx-over-aiohttp.md). aiohttp doesn't, so it moves the bytes; httpx keeps requests, responses
and exceptions. Invariant: no aiohttp, OS, TLS or asyncio exception leaves this room as itself; each becomes one httpx
exception by the table below, and each httpx exception one Fault by the table after it.
"""

import errno
import os
import ssl

import aiohttp
import httpx
import yarl

from app.sglang.faults import Fault, FaultKind

# The nearest class in the exception's own order of resolution decides, so subclasses need a line only to differ.
_HTTPX_CLASS: dict[type[BaseException], type[httpx.RequestError]] = {
    aiohttp.ClientConnectorError: httpx.ConnectError,  # refused, no such host, TLS, certificate
    aiohttp.ConnectionTimeoutError: httpx.ConnectTimeout,
    aiohttp.ServerFingerprintMismatch: httpx.ConnectError,
    aiohttp.ClientProxyConnectionError: httpx.ProxyError,
    aiohttp.ClientHttpProxyError: httpx.ProxyError,
    aiohttp.ServerDisconnectedError: httpx.RemoteProtocolError,  # sent, then closed without a whole response head
    aiohttp.ClientPayloadError: httpx.RemoteProtocolError,  # a head, then less body than it promised
    aiohttp.ClientResponseError: httpx.RemoteProtocolError,  # what came back is not HTTP
    aiohttp.ServerTimeoutError: httpx.ReadTimeout,
    aiohttp.ClientConnectionResetError: httpx.WriteError,  # the connection was closing as we wrote
    aiohttp.UploadAbortedError: httpx.WriteError,
    aiohttp.ClientConnectionError: httpx.ReadError,  # resets, and whatever aiohttp adds: may have reached the server
    aiohttp.InvalidURL: httpx.UnsupportedProtocol,
    aiohttp.NonHttpUrlClientError: httpx.UnsupportedProtocol,
    aiohttp.RedirectClientError: httpx.TooManyRedirects,
    aiohttp.ClientError: httpx.ReadError,
    TimeoutError: httpx.ReadTimeout,
    ssl.SSLError: httpx.ReadError,
    OSError: httpx.ReadError,
}
MAPPED = (aiohttp.ClientError, TimeoutError, OSError)

# What httpx says, as the fault it is. httpx.HTTPStatusError is absent on purpose: statuses are read, never raised.
_KIND: dict[type[BaseException], FaultKind] = {
    httpx.ConnectError: FaultKind.UNREACHABLE,
    httpx.ProxyError: FaultKind.UNREACHABLE,
    httpx.ConnectTimeout: FaultKind.CONNECT_TIMEOUT,
    httpx.PoolTimeout: FaultKind.LOCAL_RESOURCES,
    httpx.TimeoutException: FaultKind.TIMEOUT,
    httpx.NetworkError: FaultKind.RESET,
    httpx.ProtocolError: FaultKind.DISCONNECTED,
    httpx.LocalProtocolError: FaultKind.MISUSE,
    httpx.UnsupportedProtocol: FaultKind.BAD_URL,
    httpx.InvalidURL: FaultKind.BAD_URL,
    httpx.DecodingError: FaultKind.BAD_BODY,
    httpx.TooManyRedirects: FaultKind.NOT_FOUND,
    httpx.HTTPError: FaultKind.RESET,
    httpx.CookieConflict: FaultKind.MISUSE,
    httpx.StreamError: FaultKind.MISUSE,
}
HTTPX_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)

# aiohttp adds nothing of its own, above all no offer of encodings that httpx can't read.
_AUTO_HEADERS = frozenset({"User-Agent", "Content-Type", "Accept", "Accept-Encoding"})

# The machine we run on is short of something: no row and no endpoint is to blame.
_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def fault_from_exception(exc: BaseException) -> Fault:
    """The fault behind an httpx exception; its detail holds class names and the OS's words, nothing of the request.

    Shortage of descriptors, ports or memory on this machine is found by the errno of whatever caused it.
    """
    cause = _os_error(exc)
    if cause is not None and cause.errno in _LOCAL_ERRNOS:
        return Fault(FaultKind.LOCAL_RESOURCES, f"this machine can't open a connection: {os.strerror(cause.errno)}")
    kind = next((_KIND[cls] for cls in type(exc).__mro__ if cls in _KIND), FaultKind.MISUSE)
    if kind is FaultKind.UNREACHABLE and _is_out_of_descriptors():  # a resolver says anything but that
        return Fault(FaultKind.LOCAL_RESOURCES, f"this machine can't open a connection: {os.strerror(errno.EMFILE)}")
    said = f"{type(exc).__name__}: {os.strerror(cause.errno)}" if cause is not None else type(exc).__name__
    return Fault(kind, f"{kind.sentence} ({said})")


def httpx_class_of(exc: BaseException) -> type[httpx.RequestError]:
    """Which httpx exception stands for one of MAPPED."""
    return next(_HTTPX_CLASS[cls] for cls in type(exc).__mro__ if cls in _HTTPX_CLASS)


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Whole requests out, whole responses in; no streaming, cookies, redirects, proxies or retries.

    Any number of connections; an idle one is dropped after keepalive_seconds, which must be less than the server
    keeps it (SGLang: 5 s), so that we never send into a connection that is being closed. Belongs to one event loop.
    """

    def __init__(self, keepalive_seconds: float = 2.0):
        self._keepalive_seconds = keepalive_seconds
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send and read to the end. Honours the connect and read entries of httpx's timeout. Raises httpx errors."""
        limits = request.extensions.get("timeout", {})
        try:
            async with self._open().request(
                request.method,
                yarl.URL(str(request.url), encoded=True),
                data=await request.aread() or None,
                headers=request.headers,
                skip_auto_headers=_AUTO_HEADERS,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(connect=limits.get("connect"), sock_read=limits.get("read")),
            ) as response:
                content = await response.read()
        except MAPPED as exc:
            raise httpx_class_of(exc)(type(exc).__name__, request=request) from exc
        return httpx.Response(response.status, headers=response.raw_headers, content=content, request=request)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_seconds),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # httpx does it, from the same header
                trust_env=False,
            )
        return self._session


def _is_out_of_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return True
    return False


def _os_error(exc: BaseException | None) -> OSError | None:
    """The innermost cause that carries an errno."""
    found = None
    while exc is not None:
        # TLS puts a number of its own where the OS's errno stands, the resolver a negative one.
        if isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError) and (exc.errno or 0) > 0:
            found = exc
        exc = exc.__cause__ or exc.__context__
    return found

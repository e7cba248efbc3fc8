"""Access control before a request is parsed: host names, API keys, and the size of the body.

Host names are checked against DNS rebinding, by which another site's page would count as the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.net.loopback import is_loopback
from paceline.serve.http.clock import ARRIVED
from paceline.serve.http.failures import ApiError, RequestRefused, error_response
from paceline.serve.settings import ServeConfig

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"})
"""Paths without a key: probes, metrics and the web page, which asks the user for the key."""
ADMIN = "/admin/"
"""Path prefix that requires the admin key."""
FORWARDED = ("origin", "forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Headers of requests that come from a web page or through a proxy."""
DISCARD_BYTES = 64 * 2**20
"""Most bytes of a rejected request's body that are read before the connection is closed."""
DISCARD_PAUSE_S = 2.0
"""Seconds without data after which a rejected client's body counts as ended."""


class Gate:
    """ASGI middleware that passes a request on if its Host header, API key and body are valid; else it sends an error
    response. Paths under /admin/ have a key of their own; OPEN_PATHS and files of the web page need no key."""

    def __init__(self, app: ASGIApp, config: ServeConfig, refused: Callable[[str], None]) -> None:
        self._app, self._config, self._refused = app, config, refused
        self._hosts = allowed_hosts(config)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._admin_digests = [hashlib.sha256(key.encode()).digest() for key in config.admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(receive, self._config)
        try:
            headers = Headers(scope=scope)
            check_headers(headers, self._hosts)
            if scope["path"].startswith(ADMIN):
                self._check_admin(scope, headers)
            elif self._digests and scope["path"] not in OPEN_PATHS and not scope["path"].startswith("/page/"):
                self._check_key(headers, self._digests, "invalid_api_key", headers.get("x-api-key"))
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await body.read(headers.get("content-length", "0"))
        except ClientDisconnect:
            return
        except ApiError as error:
            self._refused(error.code or "limit")
            await _refuse(error, scope["path"], body, send)
            return
        scope[ARRIVED] = time.perf_counter()
        await self._app(scope, body.replay, send)

    def _check_admin(self, scope: Scope, headers: Headers) -> None:
        """Check the admin key; without one, accept only direct requests from this machine (no web page, no proxy)."""
        if self._admin_digests:
            self._check_key(headers, self._admin_digests, "invalid_admin_key")
            return
        address = (scope.get("client") or ("", 0))[0]
        is_near = is_loopback(address) and is_loopback(host_name(headers.get("host", "")), "localhost")
        if self._digests or not is_near or any(name in headers for name in FORWARDED):
            raise ApiError.known("admin_closed")

    def _check_key(self, headers: Headers, digests: list[bytes], code: str, bare: str | None = None) -> None:
        """Compare the key with all valid keys in constant time. `bare`: the x-api-key header, used if Authorization is
        missing. Raises ApiError."""
        default = "" if bare is None else f"Bearer {bare}"
        scheme, _, key = headers.get("authorization", default).partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(given, digest) for digest in digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError.known(code)


class Body:
    """Reads the body of one request into memory, within the limits of size and time, or discards it after an early
    error response."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive, self._config = receive, config
        self._due = asyncio.get_running_loop().time() + config.body_seconds
        self._data = bytearray()
        self._is_whole = self._is_replayed = False

    async def read(self, length: str) -> None:
        """Read the whole body into memory. `length`: value of the Content-Length header. Raises ApiError if the body is
        too large or too slow, ClientDisconnect if the client disconnects."""
        most = self._config.max_body_bytes
        if not length.isdecimal() or int(length[:19]) > most:
            raise ApiError.known("body_too_large", most=most)
        try:
            async with asyncio.timeout_at(self._due):
                while not self._is_whole:
                    self._data += await self._next()
                    if len(self._data) > most:
                        raise ApiError.known("body_too_large", most=most)
        except TimeoutError:
            raise ApiError.known("body_timeout", seconds=self._config.body_seconds) from None

    async def discard(self) -> None:
        """Read and drop the rest of the body, because a client that is still sending would not read the response. Stops
        after `DISCARD_BYTES`, after `DISCARD_PAUSE_S` without data, and at the time limit for the body."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout_at(self._due):
                while not self._is_whole and num_bytes < DISCARD_BYTES:
                    num_bytes += len(await asyncio.wait_for(self._next(), DISCARD_PAUSE_S))

    async def replay(self) -> Message:
        """ASGI function `receive` for the application. The first call returns the whole body as one message. Later
        calls wait for the server's next message, which is http.disconnect."""
        if self._is_replayed:
            return await self._receive()
        self._is_replayed = True
        return {"type": "http.request", "body": bytes(self._data), "more_body": False}

    async def _next(self) -> bytes:
        """Return the next chunk. Raises ClientDisconnect."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._is_whole = not message.get("more_body", False)
        return message.get("body", b"")


async def _refuse(error: ApiError, path: str, body: Body, send: Send) -> None:
    """Send the error response, discard the rest of the body, then close the connection."""
    response = error_response(error, path)
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_headers(headers: Headers, hosts: frozenset[str] | None) -> None:
    """Raises RequestRefused if a request has both Content-Length and Transfer-Encoding, ApiError if its Host header is
    not in `hosts` (see `allowed_hosts`; None allows every host)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        # Request smuggling: a proxy may see another end of the body and take the rest for a new request.
        message = "a request has either Content-Length or Transfer-Encoding: leave one out"
        raise RequestRefused(message, code="invalid_http")
    name = host_name(headers.get("host", ""))
    if hosts is not None and name and name not in hosts:
        raise ApiError.known("host_not_allowed", name=name[:100])


def allowed_hosts(config: ServeConfig) -> frozenset[str] | None:
    """Return the host names that a Host header may contain, without ports; None if every name is allowed."""
    names = config.allowed_hosts
    if not names and is_loopback(config.host, "localhost"):
        names = (config.host, "localhost", "127.0.0.1", "::1")
    return None if not names or "*" in names else frozenset(map(host_name, names))


def host_name(host: str) -> str:
    """Return the host name in a Host header, in lower case, without port and IPv6 brackets."""
    host = host.strip().lower()
    name = (
        host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0] if host.count(":") == 1 else host
    )
    return name.rstrip(".")

"""Who may call, by which name, and how much they may send: before anything of a request is parsed.

Names, since a page of another site whose name was pointed at this address (DNS rebinding) would count as this server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.failures import ApiError, RequestRefused, error_response
from paceline.serve.settings import ServeConfig

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"})
"""Need no key: probes, scrapers and the page, which asks for the key itself; as little do its parts, under /page/."""
DISCARD_BYTES = 64 * 2**20
"""How much of a refused request's body is read and thrown away before its connection is closed."""
DISCARD_PAUSE_S = 2.0
"""A client that sends nothing for so long has seen that it was refused."""


class Gate:
    """Lets a request through when its host and key are right and its body arrives whole, in time and within the limit."""

    def __init__(self, app: ASGIApp, config: ServeConfig, refused: Callable[[str], None]) -> None:
        self._app, self._config, self._refused = app, config, refused
        self._hosts = allowed_hosts(config)
        self._digests = [_digest(key.encode()) for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(receive, self._config)
        try:
            headers = Headers(scope=scope)
            if "transfer-encoding" in headers and "content-length" in headers:
                # A proxy before this server may see the body end elsewhere and take its rest for a request of its own.
                message = "a request has either Content-Length or Transfer-Encoding: leave one out"
                raise RequestRefused(message, code="invalid_http")
            self._check_host(headers)
            if self._digests and scope["path"] not in OPEN_PATHS and not scope["path"].startswith("/page/"):
                self._check_key(headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await body.read(headers.get("content-length", "0"))
        except ClientDisconnect:
            return
        except ApiError as error:
            self._refused(error.code or "limit")
            await _refuse(error, body, send)
            return
        await self._app(scope, body.replay, send)

    def _check_host(self, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if self._hosts is not None and name and name not in self._hosts:
            message = f"this server is not called {name[:100]}: start it with --allowed-host {name[:100]} if it should be"
            raise ApiError(421, message, code="host_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        """Compares with every key, each in the same time, so that nothing is learned from how long it took."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "this server needs an API key: send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class Body:
    """A request's body as it arrives: read whole within its limits, or discarded after an answer that did not wait for it."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive, self._config = receive, config
        self._due = asyncio.get_running_loop().time() + config.body_seconds
        self._data = bytearray()
        self._is_whole = self._is_replayed = False

    async def read(self, length: str) -> None:
        """Read it; `length` is the header's.

        Raises ApiError when it is too long or too slow, ClientDisconnect when the client left.
        """
        most = self._config.max_body_bytes
        if not length.isdecimal() or int(length[:19]) > most:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._due):
                while not self._is_whole:
                    self._data += await self._next()
                    if len(self._data) > most:
                        raise self._too_large()
        except TimeoutError:
            message = f"the request's body did not arrive within {self._config.body_seconds:g} s"
            raise ApiError(408, message, code="body_timeout") from None

    async def discard(self) -> None:
        """Take the rest and forget it: a client that is still sending reads no answer, and a connection that is closed under it
        is reset. Ends after `DISCARD_BYTES`, when nothing has come for `DISCARD_PAUSE_S`, and when the body is overdue."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout_at(self._due):
                while not self._is_whole and num_bytes < DISCARD_BYTES:
                    num_bytes += len(await asyncio.wait_for(self._next(), DISCARD_PAUSE_S))

    async def replay(self) -> Message:
        """A `receive` that gives the body once, then whatever follows: the client's leaving."""
        if self._is_replayed:
            return await self._receive()
        self._is_replayed = True
        return {"type": "http.request", "body": bytes(self._data), "more_body": False}

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._is_whole = not message.get("more_body", False)
        return message.get("body", b"")

    def _too_large(self) -> ApiError:
        message = f"the request's body is longer than {self._config.max_body_bytes:,} bytes: send less"
        return ApiError(413, message, code="body_too_large")


async def _refuse(error: ApiError, body: Body, send: Send) -> None:
    """The whole answer at once; the connection is closed when the client has sent what it had to send."""
    response = error_response(error)
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def allowed_hosts(config: ServeConfig) -> frozenset[str] | None:
    """The names that may stand in a request's Host header, without ports; None for any."""
    names = config.allowed_hosts
    if not names and _is_loopback(config.host):
        names = (config.host, "localhost", "127.0.0.1", "::1")
    return None if not names or "*" in names else frozenset(map(host_name, names))


def host_name(host: str) -> str:
    """A Host header without its port, in lower case; IPv6 addresses without brackets."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0] if host.count(":") == 1 else host
    return name.rstrip(".")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

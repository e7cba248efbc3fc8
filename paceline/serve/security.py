"""Who may call, by which name, and how much they may send: before anything of a request is parsed.

Names, since a page of another site whose name was pointed at this address (DNS rebinding) would count as this server's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.failures import ApiError, error_response
from paceline.serve.settings import ServeConfig

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"})
"""Need no key: probes, scrapers and the page, which asks for the key itself."""


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
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            if self._digests and scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
        except ApiError as error:
            self._refused(error.code or "limit")
            await error_response(error)(scope, receive, send)
            return
        if body is None:
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if self._hosts is not None and name and name not in self._hosts:
            message = f"this server is not called {name[:100]}: start it with --allowed-host {name[:100]} if it should be"
            raise ApiError(421, message, code="host_not_allowed", headers={"connection": "close"})

    def _check_key(self, headers: Headers) -> None:
        """Compares with every key, each in the same time, so that nothing is learned from how long it took."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "this server needs an API key: send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer", "connection": "close"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, or None when the client left. Raises ApiError when it is too long or too slow."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:19]) > self._config.max_body_bytes:
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read(receive), self._config.body_seconds)
        except TimeoutError:
            message = f"the request's body did not arrive within {self._config.body_seconds:g} s"
            raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None

    async def _read(self, receive: Receive) -> bytes | None:
        pieces: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self._config.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self) -> ApiError:
        message = f"the request's body is longer than {self._config.max_body_bytes:,} bytes: send less"
        return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


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


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then whatever follows: the client's leaving."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay

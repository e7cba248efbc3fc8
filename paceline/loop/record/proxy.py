"""The recording proxy: forwards every request to the upstream server and streams the answer back unchanged.

With `RecordConfig.add_fields` it sets fields of completion requests that are whole JSON bodies of at most MAX_BYTES.

The bytes of each completion request and its complete answer are parsed later in another thread (`exchange.py`).
Clients see the upstream server's behaviour: its status codes, truncated answers, and backpressure in both directions.
If the client disconnects, the upstream request is cancelled. Only hop-by-hop headers (RFC 9110, 7.6.1) are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import httpcore2
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from paceline.loop.record.exchange import ADDED, MAX_BYTES, Body, Observed, with_fields
from paceline.serve.http.failures import ApiError, error_response
from paceline.serve.http.security import allowed_hosts, check_headers
from paceline.serve.replies.events import unless_gone
from paceline.serve.settings import ServeConfig

OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
CUT_OFF = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)
CONNECT_S = 10.0
IDLE_S = 2.0
"""Seconds for which an idle upstream connection is kept. Uvicorn servers, such as vLLM's, close one after 5 s."""
log = logging.getLogger("paceline.loop.record")
RawHeaders = list[tuple[bytes, bytes]]


class Proxy:
    """The recording proxy as an ASGI application: forwards requests to the server with the URL `upstream`. `keep`:
    function that receives each chat or completion request together with its complete answer, if the status is 200; it
    must not block. `add_fields`: "vllm" or "sglang" adds the request fields that make this server return token ids;
    "none" adds none."""

    def __init__(
        self, upstream: str, config: ServeConfig, keep: Callable[[Observed], None], add_fields: str = "none"
    ) -> None:
        parts = urlsplit(upstream)
        self._scheme, self._port = parts.scheme.encode(), parts.port
        self._base = parts.path.rstrip("/").encode()
        self._host = (parts.hostname or "").encode("idna")
        self._authority = parts.netloc.encode("idna")
        self._hosts = allowed_hosts(config)
        self._keep, self._added = keep, ADDED[add_fields]
        self.num_requests = self.num_open = 0
        """Chat and completion requests since the start, and those in flight."""
        self._pool = httpcore2.AsyncConnectionPool(max_connections=None, keepalive_expiry=IDLE_S)

    async def close(self) -> None:
        await self._pool.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body = _RequestBody(receive)
        try:
            check_headers(Headers(scope=scope), self._hosts)  # here, as the client's Host header is not forwarded
            # `receive` yields the request's body first, then the client's disconnect.
            await unless_gone(body.gone, self._pass_on(scope, body, send))
        except ClientDisconnect:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except CUT_OFF as error:  # uvicorn closes the connection of an answer that has no end
            log.warning("an answer was cut off: %s", error)

    async def _pass_on(self, scope: Scope, body: _RequestBody, send: Send) -> None:
        observed = Observed.of(scope)
        if observed is None:
            return await self._exchange(scope, body, send, None)
        body.recorded = observed.request
        self.num_requests += 1
        self.num_open += 1
        try:
            if added := self._added[observed.is_chat]:
                await body.add(added)
            await self._exchange(scope, body, send, observed)
        finally:
            self.num_open -= 1

    async def _exchange(self, scope: Scope, body: _RequestBody, send: Send, observed: Observed | None) -> None:
        try:
            response = await self._pool.handle_async_request(self._request(scope, body))
        except CUT_OFF as error:
            log.warning("no answer from upstream: %s", error or type(error).__name__)
            raise ApiError.known("upstream_unreachable") from error
        try:
            headers = _passed_on(response.headers)
            if observed:
                observed.begins(response.status, headers)
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.stream:  # pyright: ignore[reportGeneralTypeIssues]  # both kinds have one type
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if observed:
                    observed.take(piece)
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if observed and observed.is_answered:
            observed.ends()
            self._keep(observed)

    def _request(self, scope: Scope, body: _RequestBody) -> httpcore2.Request:
        raw: RawHeaders = scope["headers"]
        headers = [(b"host", self._authority), *(pair for pair in _passed_on(raw) if pair[0] != b"host")]
        if body.length is not None:
            length = str(body.length).encode()
            headers = [(name, length if name == b"content-length" else value) for name, value in headers]
        if any(name == b"transfer-encoding" for name, _ in raw):
            headers.append((b"transfer-encoding", b"chunked"))
        query = scope["query_string"]
        target = self._base + (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
        url = httpcore2.URL(scheme=self._scheme, host=self._host, port=self._port, target=target)
        timeout = {"timeout": {"connect": CONNECT_S}}
        return httpcore2.Request(scope["method"], url, headers=headers, content=body, extensions=timeout)


class _RequestBody:
    """Streams a request's body, then waits for the client's disconnect."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = asyncio.Event()
        self._held: list[bytes] = []
        self.recorded: Body | None = None
        """Receives a copy of each piece, as the client sent it."""
        self.length: int | None = None
        """Number of bytes of a body that `add` changed."""

    async def add(self, names: tuple[str, ...]) -> None:
        """Sets fields of the body (`with_fields`). Reads it first, at most about MAX_BYTES: longer ones stay."""
        num_bytes = 0
        async for piece in self._pieces():
            self._held.append(piece)
            num_bytes += len(piece)
            if num_bytes > MAX_BYTES:
                return
        self._held = [with_fields(b"".join(self._held), names)]
        self.length = len(self._held[0])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held, self._held = self._held, []
        for piece in held:
            yield piece
        if not self._is_whole.is_set():
            async for piece in self._pieces():
                yield piece

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            if not more:
                self._is_whole.set()
            if piece := message.get("body", b""):
                if self.recorded:
                    self.recorded.take(piece)
                yield piece

    async def gone(self) -> Message:
        """Returns the message after the body: the client's disconnect."""
        await self._is_whole.wait()
        return await self._receive()


def _passed_on(headers: RawHeaders) -> RawHeaders:
    """Removes hop-by-hop headers and those named by the Connection header."""
    named = {
        name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")
    }
    left_out = OF_ONE_CONNECTION | named
    return [pair for pair in headers if pair[0].lower() not in left_out]

"""Requests to a remote server from many threads, retried while the server is down.

A request is retried while the server is unreachable or busy (408, 425, 429, 5xx), after a pause that doubles up to some
seconds, until no request has succeeded for `patience_s` seconds. Other 4xx and 3xx statuses are final: redirects are
not followed. The key is read from the environment only.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from paceline.errors import DownloadError, PacelineError
from paceline.net import streaming

KEY = "PACELINE_REMOTE_KEY"
"""Environment variable that holds the server's key."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
PASSING = frozenset({408, 425, 429})
"""Statuses that are retried, in addition to 5xx."""
MAX_JSON_BYTES = 256 * 2**20
TIMEOUT_S = 1800.0
"""Seconds that one response may take: a busy server needs long for 16k tokens."""


class Refused(PacelineError):
    """The server rejected a request with a status that is not retried, or sent an unusable response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text.split())[:300]}")
        self.status = status


class Client:
    """Sends requests to one HTTP server, and retries them while the server is down or busy (status 408, 425, 429 or
    5xx). A request fails when the server has given no other response to this client for `patience_s` seconds. Threads
    may share a client."""

    def __init__(self, url: str, option: str, patience_s: float) -> None:
        """`url`: the server's address, with or without /v1. `option`: its option's name, for error messages. Raises
        ConfigError for an invalid address or key."""
        self._http = streaming.Client(url, os.environ.get(KEY) or None, TIMEOUT_S, option, keeps=False, key_name=KEY)
        self.url, self.option, self.patience_s = self._http.url, option, patience_s
        self._closed = threading.Event()
        self._answered_s = time.monotonic()
        """Time of the latest response that was not retried."""

    def close(self) -> None:
        """Stop retrying: a request that waits to be retried fails at once with DownloadError."""
        self._closed.set()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request with `body` as JSON (None: no body) and return the parsed JSON of the response. Raises Refused
        if the server rejects the request, or if the response is not JSON or longer than MAX_JSON_BYTES. Raises
        DownloadError if the server has been down or busy for `patience_s` seconds or the client was closed."""
        data = self.bytes(method, path, body, MAX_JSON_BYTES)
        try:
            return json.loads(data)
        except ValueError as error:
            raise Refused(200, f"the answer of {self.url}{path} is no JSON") from error

    def bytes(self, method: str, path: str, body: Any, most: int) -> bytes:
        """Send a request with `body` as JSON (None: no body) and return the body of the response, at most `most` bytes.
        Raises Refused if the server rejects the request or the response is too long. Raises DownloadError if the server
        has been down or busy for `patience_s` seconds or the client was closed."""
        data, pause_s = None if body is None else json.dumps(body).encode(), FIRST_PAUSE_S
        began = time.monotonic()
        while True:
            stream = self._http.ask(method, path, data, most=most)
            is_lost = stream.failure is not None and stream.status != streaming.TOO_LONG
            is_final = not is_lost and stream.status < 500 and stream.status not in PASSING
            if is_final:
                self._answered_s = time.monotonic()
            if is_final and stream.status < 300:
                return stream.body
            text = stream.failure or stream.body.decode(errors="replace")
            if is_final:
                raise Refused(stream.status, text)
            if time.monotonic() - max(began, self._answered_s) > self.patience_s or self._closed.wait(pause_s):
                raise DownloadError(
                    f"{self.option} {self.url} has not answered for {self.patience_s / 60:g} minutes "
                    f"({text[:200]}): start it and run the same command, it goes on where it stopped"
                )
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

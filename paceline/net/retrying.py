"""Requests to a server elsewhere, from many threads: patient with one that is down, and never in a hurry to give up.

A server that cannot be reached, or is too busy (408, 425, 429, 5xx), is asked again after a pause that doubles up to some
seconds, until it has answered nobody for `patience_s`. What it refuses (other 4xx) is refused at once. The key comes from the
environment alone and goes to this address alone: redirects are not followed.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError, DownloadError, PacelineError

KEY = "PACELINE_ELSEWHERE_KEY"
"""Environment variable of the server's key."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
PASSING = frozenset({408, 425, 429})
"""Statuses that are worth another try, beside 5xx."""
MAX_JSON_BYTES = 256 * 2**20
TIMEOUT_S = 1800.0
"""An answer of 16k tokens from a busy server takes its time."""


class Refused(PacelineError):
    """The server does not want this request, however often it is sent."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text.split())[:300]}")
        self.status = status


class Client:
    """Requests to one HTTP server, tried again for `patience_s` while it is down. Threads may share a client."""

    def __init__(self, url: str, option: str, patience_s: float) -> None:
        """`url` with or without /v1; `option` is what an error names. Raises ConfigError."""
        self.url, self.option, self.patience_s = url.rstrip("/").removesuffix("/v1"), option, patience_s
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"{option} {url!r} is no address: write it as http://HOST:PORT") from error
        if parts.username or parts.password:
            raise ConfigError(f"{option} holds a password: give the key in the environment variable {KEY}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{option} {url!r} is no address of a server: write it as http://HOST:PORT")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"User-Agent": "paceline", "Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            if not key.isascii() or not key.isprintable():
                raise ConfigError(f"{KEY} must be printable ASCII text: HTTP headers carry nothing else")
            self._headers["Authorization"] = f"Bearer {key}"
        self._closed = threading.Event()
        self._answered_s = time.monotonic()
        self.num_retries = 0

    def close(self) -> None:
        """Requests under way end at their next pause."""
        self._closed.set()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer as JSON. Raises Refused, DownloadError."""
        data = self.bytes(method, path, body, MAX_JSON_BYTES)
        try:
            return json.loads(data)
        except ValueError as error:
            raise Refused(200, f"the answer of {self.url}{path} is no JSON") from error

    def bytes(self, method: str, path: str, body: Any, most: int) -> bytes:
        """The answer's body, of at most so many bytes. Raises Refused, DownloadError when patience is over."""
        data, pause_s = None if body is None else json.dumps(body).encode(), FIRST_PAUSE_S
        began = time.monotonic()
        while True:
            status, told = self._once(method, path, data, most)
            if 200 <= status < 300:
                self._answered_s = time.monotonic()
                return told
            if 300 <= status < 500 and status not in PASSING:
                self._answered_s = time.monotonic()
                raise Refused(status, told.decode(errors="replace"))
            self.num_retries += 1
            if time.monotonic() - max(began, self._answered_s) > self.patience_s or self._closed.wait(pause_s):
                raise DownloadError(
                    f"{self.option} {self.url} has not answered for {self.patience_s / 60:g} minutes "
                    f"({told.decode(errors='replace')[:200]}): start it and run the same command, it goes on where it stopped"
                )
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, data: bytes | None, most: int) -> tuple[int, bytes]:
        """(status, body); status 599 for a server that gave no whole answer."""
        if self._ssl:
            connection = HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._ssl)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
            told = response.read(most + 1)
            if len(told) > most:
                return 413, f"the answer has more than {most} bytes".encode()
            return response.status, told
        except (OSError, HTTPException) as error:
            return 599, (str(error) or type(error).__name__).encode()
        finally:
            connection.close()

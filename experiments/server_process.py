"""A free port, and a request in JSON to a server on this machine, for the scripts that start or ask one."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

HOST, CHAT = "127.0.0.1", "/v1/chat/completions"
TIMEOUT_S = 600.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


def post(port: int, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = CHAT) -> tuple[int, Any]:
    """A request in JSON: the status of its answer, and what that says."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

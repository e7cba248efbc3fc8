"""Processes of servers, for the scripts that start or ask one: free ports, processes with a log, requests in JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HOST, CHAT = "127.0.0.1", "/v1/chat/completions"
TIMEOUT_S, STOP_S = 600.0, 60.0
Started = subprocess.Popen[bytes]


class Missed(Exception):
    """Raised when something did not come about; says what."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.settimeout(1.0)
        return attempt.connect_ex((HOST, port)) == 0


def post(port: int, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = CHAT) -> tuple[int, Any]:
    """A request in JSON: the status of its answer, and what that says."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def process(words: Sequence[str], log: Path, added: Mapping[str, str] | None = None) -> Iterator[Started]:
    """A process in a group of its own, which gets SIGTERM at the end of the block, and SIGKILL a minute later."""
    with log.open("w") as output:
        started = subprocess.Popen(
            [*words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=added,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        try:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(STOP_S)
        finally:  # also after a second Ctrl-C: vLLM's engine is a child of its server
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def wait_until(what: str, is_so: Callable[[], bool], started: Started, log: Path, seconds: float) -> None:
    """Raises Missed if the process ends first, or after these seconds; with the end of its log."""
    ends = time.monotonic() + seconds
    while not is_so():
        status = started.poll()
        if status is not None or time.monotonic() > ends:
            how = f"not within {seconds:.0f} s" if status is None else f"it ended with status {status}"
            raise Missed(f"{what}: {how}; see {log}: {' '.join(log.read_text(errors='replace')[-600:].split())}")
        time.sleep(0.5)

"""A server as a process of its own, for the scripts that ask one: started, asked, and ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

HOST, CHAT = "127.0.0.1", "/v1/chat/completions"
TIMEOUT_S = 600.0


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """A server as a process: itself, its port, and the seconds until it took requests."""
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            text = ""
            while "\nready: " not in text:
                time.sleep(0.05)
                log.seek(0)
                text = log.read()
                if process.poll() is not None:
                    raise RuntimeError(f"the server did not start: {text}")
            yield process, int(re.findall(r"http://127.0.0.1:(\d+)", text)[0]), time.monotonic() - began
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            sys.stderr.write("".join(line for line in log if "Error" in line or "Traceback" in line))


def stop(process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """SIGTERM, and wait until it has ended: what it keeps is then on disk. Raises subprocess.TimeoutExpired."""
    process.send_signal(signal.SIGTERM)
    process.wait(seconds)


def post(port: int, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = CHAT) -> tuple[int, Any]:
    """A request in JSON: the status of its answer, and what that says."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

"""Both ends of a worker of `decode_vs_peers.py`: an engine in a process of its own, asleep in a read of its standard
input between its turns. Requests and answers are JSON lines:

    {"load": way}                                             -> {"about": {...}}
    {"run": way, "prompts": [[1, 2]], "num_tokens": [64]}     -> {"token_ids": [[...]], "wall_s": ..., "peak_bytes":
    ..., ...}

A way is what drafts: "none" is plain decoding. This file needs the standard library only: vLLM's Python runs it too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Protocol

Prompts = list[list[int]]


class WorkerError(RuntimeError):
    """A worker refused, or ended by itself."""


class Worker:
    """The driver's end."""

    def __init__(self, python: str, script: Path, options: list[str], environment: dict[str, str]) -> None:
        self._name, self._log = script.name, tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(script), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises WorkerError with what the worker printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # said below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise WorkerError(f"{self._name} ended by itself: {self._log.read()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """A worker ends with its input; one that does not is killed."""
        with self._log, self._process:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Peer(Protocol):
    """The worker's end: an engine for at most `--streams` requests at once."""

    pid: int
    """The process whose memory is told."""

    def load(self, way: str) -> dict[str, Any]:
        """Make the way ready, and say how it runs: versions, flags, formats."""
        ...

    def run(self, way: str, prompts: Prompts, num_tokens: list[int]) -> dict[str, Any]:
        """Greedy answers of exactly so many tokens, all prompts at once, nothing kept from call to call.

        token_ids; wall_s; prefill_s: seconds until the first token, and num_first: tokens that came with it, when they
        are known; tokens_per_round.
        """
        ...

    def close(self) -> None: ...


def arguments(ways: tuple[str, ...]) -> argparse.Namespace:
    """Options of every worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a GGUF file, or a folder for vLLM")
    parser.add_argument("--draft", help="the same of a smaller model")
    parser.add_argument("--dflash", help="a folder with a DFlash checkpoint")
    parser.add_argument("--form", default="", help="how the peer runs, where it can in several ways")
    parser.add_argument("--isa", default="auto", help="instruction set of our native pass")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--ways", nargs="+", choices=ways, required=True)
    return parser.parse_args()


def own_output() -> Any:
    """The pipe to the driver; whatever is printed from now on goes to the log."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def serve(peer: Peer, pipe: Any) -> None:
    """Answer until the input ends."""
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if "load" in request:
                    answer = {"about": peer.load(request["load"])}
                else:
                    answer = {**peer.run(request.pop("run"), **request), "peak_bytes": peak_bytes(peer.pid)}
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=pipe, flush=True)
    finally:
        peer.close()


def peak_bytes(pid: int) -> int | None:
    """The most memory a process has had at once, pages of files included; None where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

"""A real vLLM of another environment: PEERS_VENV/vllm/bin/python, as experiments/peers.sh installs it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import fleet_servers
from fleet_servers import process, wait_until
from loopback import free_port

from paceline.loop.adapt.servers.counters import is_up
from paceline.net.streaming import Client

HOME = os.environ.get("PEERS_VENV", "")
PYTHON = Path(HOME, "vllm", "bin", "python")
IS_MISSING = not (HOME and PYTHON.is_file())
ROOT, MODULE = fleet_servers.ROOT, fleet_servers.VLLM_MODULE
MISSING = "PEERS_VENV names no folder with vllm/bin/python"
SMALL = ("--enforce-eager", "--max-num-batched-tokens", "256", "--max-num-seqs", "4")
MOST_START_S = 1200.0


def environment(cache: Path) -> dict[str, str]:
    """Environment of a vLLM process, which finds paceline's classes; `cache`: its folder for compiled files."""
    return fleet_servers.environment(PYTHON, cache)


def serving(words: list[str], log: Path, **more: str) -> AbstractContextManager[str]:
    """vLLM, started with the words behind `vllm serve`, the model first; its address. `more`: its environment's."""
    port = free_port()
    command = [str(PYTHON), "-m", MODULE, "--model", *words, *SMALL, "--host", "127.0.0.1", "--port", str(port)]
    return running(command, f"http://127.0.0.1:{port}", log, **more)


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path, **more: str) -> Iterator[str]:
    """vLLM, started by `command`, from the time when it answers at `url`; `more`: its environment's."""
    with process(command, log, environment(log.parent / "cache") | more) as server:
        with contextlib.closing(Client(url, timeout_s=5.0)) as client:
            wait_until("vLLM", lambda: is_up(client), server, log, MOST_START_S)
        yield url

"""A real vLLM of another environment: PEERS_VENV/vllm/bin/python, as experiments/peers.sh installs it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from loopback import free_port

HOME = os.environ.get("PEERS_VENV", "")
PYTHON = Path(HOME, "vllm", "bin", "python")
IS_MISSING = not (HOME and PYTHON.is_file())
MISSING = "PEERS_VENV names no folder with vllm/bin/python"
ROOT = Path(__file__).parents[2]
MODULE = "vllm.entrypoints.openai.api_server"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SMALL = ("--enforce-eager", "--max-num-batched-tokens", "256", "--max-num-seqs", "4")
MOST_START_S = 1200.0


def environment(cache: Path) -> dict[str, str]:
    """Environment of a vLLM process, which finds paceline's classes; `cache`: its folder for compiled files."""
    preload = [str(file) for file in PYTHON.parents[1].glob("lib/libiomp5.so")]
    changes = {**SETTINGS, "PYTHONPATH": str(ROOT), "VLLM_CACHE_ROOT": str(cache)}
    return os.environ | changes | ({"LD_PRELOAD": preload[0]} if preload else {})


def serving(words: list[str], log: Path, **more: str) -> AbstractContextManager[str]:
    """vLLM, started with the words behind `vllm serve`, the model first; its address. `more`: its environment's."""
    port = free_port()
    command = [str(PYTHON), "-m", MODULE, "--model", *words, *SMALL, "--host", "127.0.0.1", "--port", str(port)]
    return running(command, f"http://127.0.0.1:{port}", log, **more)


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path, **more: str) -> Iterator[str]:
    """vLLM, started by `command`, from the time when it answers at `url`; `more`: its environment's."""
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=environment(log.parent / "cache") | more, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + MOST_START_S
        while not is_up(url):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(1.0)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False

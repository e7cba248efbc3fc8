"""The journey from a vLLM to a drafter that is kept fitted, as docs/how-to/vllm-sglang.md has it: every line is a step.

Lines come from the page itself; tests replace names (model, addresses, folders) by small ones, and run them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command_lines import section, shell_lines
from live_server import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "vllm-sglang.md"
HEADINGS = (
    "From a vLLM on eight GPUs to a drafter for it",
    "Replace the drafter of running servers",
    "vLLM without a restart",
)
STEPS = {
    "record": "paceline record ",
    "worth it": "paceline advise ",
    "plan": "--dry-run",
    "train here": "torchrun ",
    "states from vLLM": "--features-from ",
    "serve": "paceline serve --engine vllm ",
    "watch and roll out": "--restart deploy/restart/systemd.sh",
    "gate by hand": "paceline adapt gate ",
    "export": "paceline export ",
    "roll out or back by hand": "PACELINE_SERVER=",
    "key": "export PACELINE_ADMIN_KEY=",
    "vLLM for hot weights": "vllm serve ",
    "watch with hot weights": "--hot-swap",
    "hot weights by hand": "curl ",
}
"""Step -> words that its line alone has."""
MODEL = "Qwen/Qwen3-8B"


def lines() -> list[str]:
    text = [section(PAGE, heading) for heading in HEADINGS]
    return [line for each in text for line in shell_lines(each)]


def line_of(step: str, names: Mapping[str, object]) -> str:
    """A step's line, with these names in place of those on the page. Fails if a name is not there."""
    (line,) = [line for line in lines() if STEPS[step] in line.replace("\\\n", " ")]
    for name, value in names.items():
        replaced = re.subn(rf"(?<![\w/]){re.escape(name)}(?![\w-])", str(value).replace("\\", r"\\"), line)
        assert replaced[1], f"{name} is not in {line}"
        line = replaced[0]
    return line


def words_of(step: str, names: Mapping[str, object]) -> list[str]:
    """The words behind `paceline` of a step's line."""
    words = shlex.split(line_of(step, names).replace("\\\n", " "))
    return words[words.index("paceline") + 1 :]


@contextlib.contextmanager
def recorder(words: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """`paceline record` as a process on a free port: its address, and a list that has its JSON line once it has
    ended."""
    command = [sys.executable, "-m", "paceline", *words, "--port", "0", "--json"]
    done = list[dict[str, Any]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        line = process.stderr.readline()
        address = re.search(r"http://127.0.0.1:\d+", line)
        if address is None:
            raise AssertionError(line + process.stderr.read())
        wait_until(lambda: is_up(address[0]), 60)
        try:
            yield address[0], done
        finally:
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        done.append(json.loads(output.splitlines()[-1]))


def is_up(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return answer.status == 200
    return False


def post(url: str, body: dict[str, Any], seconds: float = 300.0) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.loads(answer.read())


def chat(url: str, number: int, max_tokens: int) -> None:
    """Sends different questions, greedy, four at a time."""
    name = json.loads(urllib.request.urlopen(f"{url}/v1/models", timeout=60).read())["data"][0]["id"]

    def ask(at: int) -> None:
        question = [{"role": "user", "content": f"What is {at} and {at * at}?"}]
        body = {"model": name, "messages": question, "max_tokens": max_tokens, "temperature": 0}
        assert post(f"{url}/v1/chat/completions", body)["choices"]

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(ask, range(number)):
            pass


def program(folder: Path, name: str, text: str) -> None:
    """A program of this name in `folder`, of Python."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{text}")
    (folder / name).chmod(0o755)


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"

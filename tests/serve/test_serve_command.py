"""`paceline serve` as a process: what it says, a signal, errors in one line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from called import Call, call
from live_server import idle_collector, quick_end, talker, wait_until
from small_llm import tiny_model

from paceline.serve.admin.metrics import Metrics
from paceline.serve.run import run
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.worker import EngineWorker

__all__ = ["call"]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """Servers that run in this process leave their own."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def has_ended(process: subprocess.Popen[str], seconds: float) -> bool:
    """Waits for its end, but not for longer."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    words = ("--drafter", "words=ngram", "--drafter", "blocks=random-dflash", "--route", "tag", "--dtype", "float32")
    words += ("--max-batch", "2", "--served-name", "mine", "--traces", str(tmp_path / "traces"))
    words += ("--drain-seconds", "300")  # a busy machine needs more than the 30 s that a server waits otherwise
    process = start("--model", str(tiny_model(tmp_path / "tiny", 2048)), *words)
    with process:
        try:
            assert process.stderr
            line = process.stderr.readline()
            port = int(re.findall(r"http://127.0.0.1:(\d+)", line)[0])
            lines = [process.stderr.readline() for _ in range(3)]
            assert re.search(
                r"drafters words, blocks \(weights \d+ MB, cache \d+ MB\) \(together, .*\); weights ", lines[0]
            )
            assert f"http://127.0.0.1:{port}/ in a browser" in lines[1]
            assert lines[2].startswith("curl http://127.0.0.1")
            yield process, port
        finally:
            process.kill()


def ask(port: int, body: dict[str, object], tag: str = "words") -> tuple[int, bytes]:
    """Status and text of a completion."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as client:
        headers = {"content-type": "application/json", "x-paceline-tag": tag}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = client.getresponse()
        return answer.status, answer.read()


def num_requests(port: int) -> tuple[int, int]:
    """Requests that wait, and that run."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
    waiting, running = (
        re.findall(rf"vllm:num_requests_{name}\{{.*\}} (\S+)", metrics)[0] for name in ("waiting", "running")
    )
    return int(float(waiting)), int(float(running))


def test_sigterm_under_load_finishes_what_waits_too_and_refuses_the_rest(
    running: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    """Rows for two of twelve: most wait in the queue, and all are answered; who comes then is told so, to the last
    moment.

    Before, a request that names one of the drafters is answered with it."""
    process, port = running
    answer = json.loads(ask(port, {"prompt": "abc", "max_tokens": 4, "return_metrics": True}, tag="blocks")[1])
    assert answer["metrics"]["speculative_decoding"]["drafter"] == "blocks"
    answers: list[bytes] = []
    body: dict[str, object] = {"prompt": "abc", "max_tokens": 800, "temperature": 0, "ignore_eos": True}
    clients = [
        threading.Thread(target=lambda: answers.append(ask(port, body | {"stream": True})[1])) for _ in range(12)
    ]
    for client in clients:
        client.start()
    num_waiting = num_running = 0
    while num_waiting < 2 or num_waiting + num_running + len(answers) < 12:
        num_waiting, num_running = num_requests(port)
        assert len(answers) < 9, "the test needs requests that wait"
    process.send_signal(signal.SIGTERM)
    refused = 0
    while not has_ended(process, 0.05):
        try:
            status, text = ask(port, body | {"max_tokens": 1})
        except (OSError, http.client.HTTPException):
            continue  # the very end: nobody listens any more
        if status == 503:
            assert json.loads(text)["error"]["code"] == "draining"
            refused += 1
        else:
            assert refused == 0, "taken after others were refused"
    for client in clients:
        client.join()
    assert refused > 0
    assert len(answers) == 12
    for text in answers:
        assert b'"finish_reason":"length"' in text and text.endswith(b"data: [DONE]\n\n")
    assert process.wait(120) == 0
    assert process.stderr
    assert process.stderr.read() == ""
    assert len(list((tmp_path / "traces").glob("*.parquet"))) == 1


def test_ctrl_c_ends_an_idle_server() -> None:
    """In this process: the signal comes when the server has said that it is ready."""
    worker, lines = EngineWorker(talker(), ServeConfig(port=0), Metrics("test")), list[str]()

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("ready"):
            signal.raise_signal(signal.SIGINT)

    with idle_collector(), quick_end():
        run(worker, say=say, introduce=lambda llm: llm.config.model)
    wait_until(lambda: worker.state == "stopped")
    assert lines[0].startswith("listening on http://127.0.0.1:") and lines[1] == "fake"


def test_options_from_a_file(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    for text, message in (
        ("host: 127.0.0.1\nmax-queue: -1\n", "--max-queue must be 0 or more"),
        ("api-key: [a, 'ü']\n", "ASCII"),
        ("speed: 3\n", "'speed', which is no option"),
        ("drafter: none=ngram\n", "cannot be called 'none'"),
        ("drafter: [a=ngram, b]\n", "'b' is one of several and needs a name"),
        ("[1", "cannot be read"),
        ("3", "holds no settings by name"),
        ("port: 8000\nport: 8001\n", "line 2: port stands twice, first in line 1"),
        ("max-queue: 1\nmax_queue: 2\n", "has max_queue twice"),
        ("max-queue: 2.7\n", "max-queue cannot be 2.7: it takes integer"),
        ("max-queue: true\n", "max-queue cannot be true"),
        ("speculate: off\n", "speculate cannot be false"),
        ("model: [a, b]\n", "model cannot be ['a', 'b']: it takes text"),
        ("port:\n", "port cannot be None"),
    ):
        file.write_text(text)
        done = call("serve", "--config", str(file))
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
    file.write_text("max-queue: -1\n")
    assert "deadline" in call("serve", "--config", str(file), "--max-queue", "3", "--deadline", "-1").stderr


def test_plain_decoding_may_be_the_first_of_several_drafters(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr("paceline.commands.serve._run", lambda llm, *rest: started.append((llm.drafter, rest[2])))
    words = ("serve", "--model", str(tmp_path), "--route", "tag", "--drafter", "plain=none", "--drafter", "acme=ngram")
    assert call(*words).returncode == call(*words, "--speculate", "off").returncode == 0
    assert started == [("none", {"plain": "none", "acme": "ngram"}), ("none", None)]
    done = call(*words, "--route", "auto", "--speculate", "4")
    assert done.returncode == 2 and "it needs --speculate auto" in done.stderr


def test_what_cannot_start_says_why_in_one_line(call: Call, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, message in (
            (("--model", str(tmp_path / "nothing")), "no"),
            (("--port", str(port)), "cannot listen on 127.0.0.1"),
            (("--speculate", "sometimes"), "--speculate"),
            (("--api-key-file", str(tmp_path / "none")), "cannot read the API keys"),
            (("--trace-sample", "0.5"), "--traces must be given"),
            (("--max-body", "big"), "--max-body"),
            (("--drafter", "ngram", "--drafter", "none"), "'ngram' is one of several and needs a name"),
            (("--drafter", "none=ngram"), "cannot be called 'none'"),
            (("--route", "random"), "--route must be auto, tag or header:NAME"),
            (("--drafter", "a=ngram", "--drafter", "b=ngram", "--speculate", "4"), "it needs --speculate auto"),
            (("--admin-key", "ü"), "an admin key must be ASCII text"),
            (("--features",), "features need an API key: set PACELINE_API_KEY"),
        ):
            done = call("serve", "--port", "0", *words)
            lines = [line for line in done.stderr.splitlines() if not line.startswith("listening")]
            assert done.returncode == 2, done.stderr
            assert len(lines) == 1
            assert lines[0].startswith("error: ")
            assert message in lines[0]

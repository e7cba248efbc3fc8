"""Runs `paceline serve --engine vllm|sglang`: starts that engine with a drafter, waits until it answers, and checks it.

    code = serve_with(Start("vllm", "Qwen/Qwen3-8B", "runs/mine/drafter"), OtherEngineConfig(engine="vllm"), print)

The engine runs in its own process session. Each signal to this process is forwarded to it once, and its exit status is
returned. It writes to this process's output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from paceline.errors import ConfigError, DownloadError, DrafterMismatchError, PacelineError, reraised
from paceline.loop.adapt.config import OtherEngineConfig
from paceline.loop.adapt.servers.counters import ask, is_up
from paceline.loop.adapt.servers.vllm_sglang.check import Comparison, brings, prompt_ids, served
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, command_of, environment_of, given_to
from paceline.net.streaming import Client
from paceline.runs.masking import masked_command

POLL_S = 0.2
STOP_S = 60.0
"""Seconds that an engine may take to end; then it is killed with all its child processes."""
Say = Callable[[str], None]


def serve_with(start: Start, config: OtherEngineConfig, say: Say) -> int:
    """Starts the engine of `start` with its drafter, checks its acceptance length once it is ready, and waits until it
    ends. Forwards SIGTERM and SIGINT to the engine. Returns the engine's exit status, or 128 + n if signal n killed it;
    0 if it ended because of a forwarded signal and reported no failure. `say` receives progress texts.

    Raises DrafterMismatchError if drafter and target do not fit, ConfigError if the engine cannot be started or ends
    before it is ready, DownloadError if it is not ready in time.

    If acceptance length is clearly lower than in paceline, or cannot be measured, `say` receives a warning. With
    `config.strict` no warning is given: a lower acceptance length raises DrafterMismatchError, a failed measurement
    DownloadError."""
    with tempfile.TemporaryDirectory(prefix="paceline-engine-") as scratch:
        given = given_to(start, Path(scratch))
        say(f"{start.drafter} fits {start.model}: {given.method}, {given.num_drafted} drafts a round")
        for note in given.notes:
            say(f"note: {note}")
        prompts = prompt_ids(start.model) if config.check else []
        expected = config.expected
        if config.check and expected is None:
            say("measuring here what it brings on twenty prompts")
            expected = brings(start.model, given.folder, given.num_drafted, prompts, start.dtype)
            say(f"{expected:.2f} tokens a round here")
        with _started(start, given, say) as engine:
            client = Client(start.url, start.api_key)
            with contextlib.closing(client):
                name = engine.wait_until_ready(client, 60 * config.ready_minutes)
                if expected is not None and config.check and not engine.is_asked_to_stop:
                    _check(engine, client, name, prompts, expected, start, config.strict)
                if not engine.is_asked_to_stop:
                    say(f"ready: {start.url}/v1")
                engine.process.wait()
        code = engine.process.returncode
        return 0 if engine.is_asked_to_stop and code <= 0 else 128 - code if code < 0 else code


class _Engine:
    """Process of an engine; forwards signals to it."""

    def __init__(self, process: subprocess.Popen[bytes], say: Say) -> None:
        self.process, self.is_asked_to_stop, self.say = process, False, say

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_asked_to_stop = True
        self.process.send_signal(number)

    def wait_until_ready(self, client: Client, limit_s: float) -> str:
        """Wait until the engine is healthy; returns the name of its model, or "" if the engine ended after a signal.

        Raises ConfigError if it ends by itself, DownloadError at the time limit."""
        began = time.monotonic()
        while not (name := _model_of(client)):
            if self.process.poll() is not None:
                if self.is_asked_to_stop:
                    return ""
                status = self.process.returncode
                raise ConfigError(f"the engine ended with status {status} before it answered: see its words")
            if time.monotonic() > began + limit_s:
                minutes = f"{limit_s / 60:g} minutes"
                raise DownloadError(f"{client.url} does not answer after {minutes}: raise --ready-minutes")
            time.sleep(POLL_S)
        self.say(f"{client.url} answers after {time.monotonic() - began:.0f} s")
        return name

    def end(self) -> None:
        """Terminate the engine and all its child processes."""
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _model_of(client: Client) -> str:
    """Name of the served model once the server is healthy, else ""."""
    if not is_up(client):
        return ""
    with contextlib.suppress(DownloadError, LookupError, TypeError):
        return str(ask(client, "GET", "/v1/models")["data"][0]["id"])
    return ""


def _check(
    engine: _Engine, client: Client, name: str, prompts: list[list[int]], expected: float, start: Start, strict: bool
) -> None:
    """Report how the engine's acceptance compares with paceline's.

    With `strict` raises DrafterMismatchError if it is clearly lower, and DownloadError if it cannot be measured."""
    try:
        compared = Comparison(expected, served(start.engine, client, name, prompts))
    except DownloadError as error:
        if not engine.is_asked_to_stop:
            _object(DownloadError(f"it could not be checked: {error}"), strict, engine.say)
        return
    if compared.is_low:
        command = f"paceline inspect {start.drafter} --model {start.model} --vary"
        text = f"{start.engine} brings {compared.text}; {command} tells which setting may be read otherwise"
        _object(DrafterMismatchError(text), strict, engine.say)
    else:
        engine.say(f"checked: {start.engine} brings {compared.text}")


def _object(error: PacelineError, strict: bool, say: Say) -> None:
    if strict:
        raise error
    say(f"WARNING: {error}")


@contextlib.contextmanager
def _started(start: Start, given: Given, say: Say) -> Iterator[_Engine]:
    command = command_of(start, given)
    _check_port(start)
    say(f"starting: {masked_command(command)}")
    remedy = f"install {start.engine} in this environment, or give --engine-command"
    environment = os.environ | environment_of(start)
    with reraised(ConfigError, f"{command[0]} cannot be started", remedy, OSError):
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    engine = _Engine(process, say)
    before = {number: signal.signal(number, engine.pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield engine
    finally:
        engine.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_port(start: Start) -> None:
    """Raises ConfigError if the port is in use: another server there would be mistaken for the engine."""
    where, remedy = f"cannot listen on {start.host}:{start.port}", "choose another --host or --port"
    with reraised(ConfigError, where, remedy, OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(start.host, start.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)

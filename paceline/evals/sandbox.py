"""Code that a model wrote, run where it can do nothing: no network, no files but a small /tmp, bounded time, memory, processes.

    Sandbox().run("assert 1 + 1 == 2")          # Ran(outcome="passed", wall_s=..., cpu_s=..., peak_bytes=...)

`jail.py` has how: Linux namespaces, a filter of system calls, the kernel's limits. Where the machine refuses these (no Linux, a
container without user namespaces) nothing is run: `SandboxError` says what to do. `unsafe` runs it all the same with limits of
time and memory alone, for code that one trusts.

Answer and tests are one process: an answer written to cheat could say that its tests passed. The machine is protected, not the
score; `os._exit` and `sys.exit` pass nothing.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.bench.tasks import runs
from paceline.bounds import Count, Positive, at_least, check
from paceline.errors import SandboxError
from paceline.tables import printable

JAIL = Path(__file__).with_name("jail.py")
GRACE_S = 5.0
"""Seconds beyond the limit after which whatever is left is killed from outside."""
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
Outcome = Literal["passed", "ended", "time", "cpu", "memory", "killed", "setup"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run of code may take at most. Raises ConfigError on impossible values."""

    wall_s: Positive = 10.0
    cpu_s: Count = 5
    """Of all its processes together; the kernel holds each to it as well."""
    memory_bytes: Annotated[int, at_least(64 * 2**20)] = 512 * 2**20
    """Address space of a process, and memory of all of them together."""
    processes: Count = 16
    """Processes and threads at once."""
    disk_bytes: Count = 16 * 2**20
    """Of its /tmp."""
    open_files: Annotated[int, at_least(16)] = 64

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it."""

    outcome: Outcome
    """"passed": all was carried out. "ended": an error, a failed test, or it ended itself. "time", "cpu", "memory": beyond a
    limit. "killed": it did not end, and was killed from outside."""
    said: str = ""
    """The end of what it wrote to stderr: text of a stranger."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def why(self) -> str:
        """For people, in a line."""
        if self.outcome in ("time", "cpu", "memory"):
            return f"beyond its limit of {'processor time' if self.outcome == 'cpu' else self.outcome}"
        last = self.said.strip().splitlines()[-1:] or [self.outcome]
        return printable(last[0])[:160]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs Python programs, each in a sandbox of its own."""

    limits: Limits = field(default_factory=Limits)
    readable: tuple[str, ...] = ()
    """Folders that the code may read, beside Python and the system's libraries."""
    unsafe: bool = False
    """Run it without protection where there is none."""

    def check(self) -> None:
        """Raises SandboxError when code cannot be run here."""
        refusal = _refusal(self)
        if refusal and not self.unsafe:
            raise SandboxError(refusal)

    def run(self, code: str) -> Ran:
        """Run a program to its end or its limits. Raises SandboxError where there is no sandbox."""
        self.check()
        if _refusal(self):
            return Ran("passed" if runs(code) else "ended")
        return self._run(code)

    def _run(self, code: str) -> Ran:
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        readable = list(dict.fromkeys([*SYSTEM, os.path.realpath(sys.base_prefix), *map(os.path.realpath, self.readable)]))
        word = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="paceline-jail-") as root:
            job = {"code": code, "limits": asdict(self.limits), "readable": readable, "python": python, "word": word}
            asked = json.dumps(job | {"root": os.path.realpath(root)}).encode()
            command = [python, "-I", "-S", str(JAIL)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            try:
                told, errors = process.communicate(asked, timeout=self.limits.wall_s + GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return Ran("killed", wall_s=self.limits.wall_s + GRACE_S)
        return _read(told, errors)


def _read(told: bytes, errors: bytes) -> Ran:
    """The warden's word; nothing of the answer but text comes through."""
    try:
        return Ran(**json.loads(told))
    except (ValueError, TypeError):
        return Ran("setup", errors.decode(errors="replace")[-500:] or "the sandbox said nothing")


@functools.cache
def _refusal(sandbox: Sandbox) -> str:
    """Why there is no sandbox here; "" when there is one: a program that does nothing has run in it."""
    if sys.platform != "linux":
        said = f"Linux is needed, this is {sys.platform}"
    else:
        done = Sandbox(sandbox.limits, sandbox.readable)._run("pass")
        if done.passed:
            return ""
        said = done.why
    return (
        f"code of a model cannot be kept apart from this machine ({said}): run it on Linux 5.12 or newer where user namespaces "
        "are allowed (in Docker: --security-opt seccomp=unconfined; elsewhere: sysctl kernel.unprivileged_userns_clone=1), or "
        "add --unsafe-code if you trust it"
    )

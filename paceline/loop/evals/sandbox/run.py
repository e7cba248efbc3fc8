"""Sandbox for model-written code: no network, no files but a small /tmp, bounded time, memory and processes.

    Sandbox().run("assert 1 + 1 == 2")          # Ran(outcome="passed", wall_s=..., cpu_s=..., peak_bytes=...)

`jail.py` implements it with Linux namespaces, a system call filter and kernel limits. Where namespaces are refused, as
in most containers, Landlock and a stricter filter replace them, and the code cannot start processes. Without either,
`SandboxError` is raised; `unsafe` then runs trusted code with limits of time and memory only.

Answer and tests share a process, so a malicious answer can fake a pass: the sandbox protects the machine, not the
score. An answer that calls `os._exit` or `sys.exit` does not pass.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.bench.tasks import runs
from paceline.bounds import Checked, Count, Timeout, at_least
from paceline.errors import SandboxError
from paceline.report.tables import printable

JAIL = Path(__file__).with_name("jail.py")
CALLS = Path(__file__).with_name("syscalls.json")
GRACE_S = 5.0
"""Seconds after the wall-clock limit at which the whole sandbox is killed from outside."""
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
Outcome = Literal["passed", "ended", "time", "cpu", "memory", "disk", "killed", "setup"]
Kind = Literal["namespaces", "landlock", "none"]


@dataclass(frozen=True, slots=True)
class Limits(Checked):
    """Limits of one run of code. Raises ConfigError on impossible values."""

    wall_s: Timeout = 10.0
    cpu_s: Count = 5
    """CPU seconds of all processes together; the kernel also limits each process to it."""
    memory_bytes: Annotated[int, at_least(64 * 2**20)] = 512 * 2**20
    """Address space of each process, and memory of all processes together."""
    processes: Count = 16
    """Number of concurrent processes and threads."""
    disk_bytes: Count = 16 * 2**20
    """Size of /tmp."""
    open_files: Annotated[int, at_least(16)] = 64


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of one run of code."""

    outcome: Outcome
    """"passed": ran to its end. "ended": an error, a failed test, or an early exit. "time", "cpu", "memory", "disk":
    exceeded that limit. "killed": killed from outside. "setup": the sandbox could not be set up."""
    stderr: str = ""
    """End of the program's stderr; untrusted text."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def why(self) -> str:
        """Reason of the outcome, in one line: the exceeded limit, else the last line of stderr, else the outcome."""
        if self.outcome in ("time", "cpu", "memory", "disk"):
            return f"beyond its limit of {'processor time' if self.outcome == 'cpu' else self.outcome}"
        last = self.stderr.strip().splitlines()[-1:] or [self.outcome]
        return printable(last[0])[:160]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs Python programs, each in a sandbox of its own."""

    limits: Limits = field(default_factory=Limits)
    unsafe: bool = False
    """Run the code unprotected if the machine supports no kind of sandbox."""
    kinds: tuple[Kind, ...] = ("namespaces", "landlock")
    """Accepted kinds of sandbox; the first that works is used."""
    python: str | None = None
    """Python interpreter for the code [default: this one]."""

    def check(self) -> None:
        """Raises SandboxError if no kind of sandbox works on this machine, unless `unsafe` allows runs without a
        sandbox."""
        _, refusal = _probed(self)
        if refusal and not self.unsafe:
            raise SandboxError(refusal)

    @property
    def kind(self) -> Kind:
        """Kind of sandbox that is used: the first of `kinds` that works on this machine, or "none"."""
        return _probed(self)[0]

    def run(self, code: str) -> Ran:
        """Runs a program until it ends or exceeds a limit. If no kind of sandbox works on this machine, the program
        runs unprotected if `unsafe` is True; otherwise raises SandboxError."""
        self.check()
        if self.kind == "none":
            return Ran("passed" if runs(code) else "ended")
        return self.run_in(self.kind, code)

    def run_in(self, kind: Kind, code: str) -> Ran:
        """Runs a program in this kind of sandbox; the outcome is "setup" if the machine does not support it."""
        python = self.python or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        readable = [*SYSTEM, os.path.realpath(sys.base_prefix)]
        job = {"code": code, "limits": asdict(self.limits), "readable": readable, "python": python}
        job |= {"namespaces": kind == "namespaces", "calls": _calls(kind), "word": secrets.token_hex(16)}
        if not job["calls"]:
            return Ran("setup", f"a processor of kind {platform.machine()}")
        with tempfile.TemporaryDirectory(prefix="paceline-jail-") as root:
            stdin = json.dumps(job | {"root": os.path.realpath(root)}).encode()
            command = [python, "-I", "-S", str(JAIL)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            try:
                output, errors = process.communicate(stdin, timeout=self.limits.wall_s + GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return Ran("killed", wall_s=self.limits.wall_s + GRACE_S)
        try:
            return Ran(**json.loads(output))  # written by the warden, never by the answer
        except (ValueError, TypeError):
            return Ran("setup", errors.decode(errors="replace")[-500:] or "the sandbox said nothing")


def _calls(kind: Kind) -> dict[str, Any]:
    """Returns this processor's system call numbers, including the refused ones; empty for an unsupported processor."""
    table = json.loads(CALLS.read_text(encoding="utf-8"))
    if platform.machine() not in table:
        return {}
    own, names = table[platform.machine()], ["refused"]
    if kind != "namespaces":
        names.append("refused_without_namespaces")
    refused = [number for part in (own, table["everywhere"]) for name in names for number in part[name].values()]
    return {"refused": refused, **{name: own[name] for name in ("arch", "clone", "pivot_root")}}


@functools.cache
def _probed(sandbox: Sandbox) -> tuple[Kind, str]:
    """Returns the first kind that runs an empty program, and ""; or "none" and the reasons of the failures."""
    reasons = [] if sys.platform == "linux" else [f"Linux is needed, this is {sys.platform}"]
    for kind in sandbox.kinds if sys.platform == "linux" else ():
        ran = sandbox.run_in(kind, "pass")
        if ran.passed:
            return kind, ""
        reasons.append(f"{kind}: {ran.why}")
    return "none", (
        f"code of a model cannot be kept apart from this machine ({'; '.join(reasons)}): run it on Linux 5.12 or newer "
        "where user namespaces are allowed (sysctl kernel.unprivileged_userns_clone=1; in Docker --security-opt "
        "seccomp=unconfined), or on 6.2 or newer with Landlock (as root with a Python that all users may run), or add "
        "--unsafe-code if you trust it"
    )

"""Code that a model wrote, run where it can do nothing: no network, no files but a small /tmp, bounded time, memory, processes.

    Sandbox().run("assert 1 + 1 == 2")          # Ran(outcome="passed", wall_s=..., cpu_s=..., peak_bytes=...)

`jail.py` has how: Linux namespaces, a filter of system calls, the kernel's limits. Where the machine refuses namespaces, as
most containers do, Landlock and a stricter filter take their place: then the code cannot start processes. Where there is
neither, nothing is run: `SandboxError` says what to do. `unsafe` runs it all the same with limits of time and memory alone, for
code that one trusts.

Answer and tests are one process: an answer written to cheat could say that its tests passed. The machine is protected, not the
score; `os._exit` and `sys.exit` pass nothing.
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
from paceline.bounds import Count, Positive, at_least, check
from paceline.errors import SandboxError
from paceline.report.tables import printable

JAIL = Path(__file__).with_name("jail.py")
CALLS = Path(__file__).with_name("syscalls.json")
GRACE_S = 5.0
"""Seconds beyond the limit after which whatever is left is killed from outside."""
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
Outcome = Literal["passed", "ended", "time", "cpu", "memory", "disk", "killed", "setup"]
Kind = Literal["namespaces", "landlock", "none"]


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
    """"passed": all was carried out. "ended": an error, a failed test, or it ended itself. "time", "cpu", "memory", "disk":
    beyond a limit. "killed": it did not end, and was killed from outside."""
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
        if self.outcome in ("time", "cpu", "memory", "disk"):
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
    kinds: tuple[Kind, ...] = ("namespaces", "landlock")
    """What may protect this machine, the first that it allows."""
    python: str | None = None
    """Which Python runs it [default: this one]."""

    def check(self) -> None:
        """Raises SandboxError when code cannot be run here."""
        _, refusal = _found(self)
        if refusal and not self.unsafe:
            raise SandboxError(refusal)

    @property
    def kind(self) -> Kind:
        """What protects this machine."""
        return _found(self)[0]

    def run(self, code: str) -> Ran:
        """Run a program to its end or its limits. Raises SandboxError where there is no sandbox."""
        self.check()
        if self.kind == "none":
            return Ran("passed" if runs(code) else "ended")
        return self.run_in(self.kind, code)

    def run_in(self, kind: Kind, code: str) -> Ran:
        """As `run`, in this kind of sandbox; its outcome is "setup" where the machine has none."""
        python = self.python or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        readable = list(dict.fromkeys([*SYSTEM, os.path.realpath(sys.base_prefix), *map(os.path.realpath, self.readable)]))
        job = {"code": code, "limits": asdict(self.limits), "readable": readable, "python": python}
        job |= {"namespaces": kind == "namespaces", "calls": _calls(kind), "word": secrets.token_hex(16)}
        if not job["calls"]:
            return Ran("setup", f"a processor of kind {platform.machine()}")
        with tempfile.TemporaryDirectory(prefix="paceline-jail-") as root:
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


def _calls(kind: Kind) -> dict[str, Any]:
    """Numbers of system calls on this processor, and those that are refused; empty where they are not known."""
    table = json.loads(CALLS.read_text(encoding="utf-8"))
    if platform.machine() not in table:
        return {}
    own, names = table[platform.machine()], ["refused"] if kind == "namespaces" else ["refused", "refused_without_namespaces"]
    refused = [number for part in (own, table["everywhere"]) for name in names for number in part[name].values()]
    return {"refused": refused, **{name: own[name] for name in ("arch", "clone", "pivot_root")}}


def _read(told: bytes, errors: bytes) -> Ran:
    """The warden's word; nothing of the answer but text comes through."""
    try:
        return Ran(**json.loads(told))
    except (ValueError, TypeError):
        return Ran("setup", errors.decode(errors="replace")[-500:] or "the sandbox said nothing")


@functools.cache
def _found(sandbox: Sandbox) -> tuple[Kind, str]:
    """What protects this machine, a kind in which a program that does nothing has run; else "none", and why not."""
    said = [] if sys.platform == "linux" else [f"Linux is needed, this is {sys.platform}"]
    for kind in sandbox.kinds if sys.platform == "linux" else ():
        done = sandbox.run_in(kind, "pass")
        if done.passed:
            return kind, ""
        said.append(f"{kind}: {done.why}")
    return "none", (
        f"code of a model cannot be kept apart from this machine ({'; '.join(said)}): run it on Linux 5.12 or newer where "
        "user namespaces are allowed (sysctl kernel.unprivileged_userns_clone=1; in Docker --security-opt seccomp=unconfined), "
        "or on 6.2 or newer with Landlock (as root with a Python that all users may run), or add --unsafe-code if you trust it"
    )

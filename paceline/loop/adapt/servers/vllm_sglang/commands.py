"""Runs a user's command (`--publish`, `--restart`) in a process group of its own, and ends one that a killed daemon
left running.

A process is identified by "PID START", its id and its start time in clock ticks since boot: an id alone may belong to
another process by now. Where the system has no /proc, processes have no identity and are not ended."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

log = logging.getLogger("paceline.loop.adapt")
IDENTITY = re.compile(r"[1-9]\d{0,9} \d{1,20}", re.ASCII)
"""A process's id and start time, as `identity` returns them."""
STATE, START_TIME = 0, 19
"""Positions in /proc/PID/stat after the process's name, which may contain spaces (fields 3 and 22 of the file)."""
END_S, POLL_S = 10.0, 0.05


def run_command(
    words: Sequence[str], environment: Mapping[str, str], limit_s: float, begun: Callable[[str | None], None]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; returns its status and output. It is ended with its process group after `limit_s`
    seconds, which raises TimeoutExpired, and after any other exception. `begun` receives its identity while it runs.
    Raises OSError or ValueError if it cannot be run."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            begun(identity(process.pid))
            output, errors = process.communicate(timeout=limit_s)
        except BaseException:  # also if the daemon is stopped
            _kill_group(process.pid)
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def identity(pid: int) -> str | None:
    """Returns the identity of a process; None if it has ended, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return f"{pid} {fields[START_TIME].decode()}" if fields[STATE] not in (b"Z", b"X") else None


def end_command(command: str) -> None:
    """End the command with this identity and its process group, if it still runs; wait until it has ended, at most 10 s
    (END_S). A command of another user (sudo) can only be waited for."""
    pid, until = int(command.split()[0]), time.monotonic() + END_S
    if identity(pid) != command:
        return
    log.warning("process %d is a command of an earlier daemon, which was killed: it is ended", pid)
    _kill_group(pid)
    while identity(pid) == command:
        if time.monotonic() > until:
            log.warning("process %d did not end within %g s", pid, END_S)
            return
        time.sleep(POLL_S)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended already; another user's
        os.killpg(pid, signal.SIGKILL)

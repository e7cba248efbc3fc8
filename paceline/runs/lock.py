"""Allows one run per folder, by a kernel lock (flock) on the file runs/x/.lock.

The file holds the latest owner's process id, activity and torchrun group. Two runs in one folder would write lines
twice and delete each other's unfinished files. The kernel releases the lock when the process ends, also when it is
killed. All processes of one torchrun share the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from paceline.errors import CacheError, ConfigError, reraised
from paceline.runs.folder import REMEDY
from paceline.runs.ranks import Ranks

PATIENCE_S = 5.0
"""Seconds that a process waits while another process of its torchrun group takes the lock."""


@contextlib.contextmanager
def only_run(folder: Path, doing: str, ranks: Ranks, say: Callable[[str], None]) -> Iterator[None]:
    """Context manager that locks the folder while the block runs, so that no other run writes there. Processes of one
    torchrun (`ranks`) share the lock. `doing`: what this run does, such as "training"; the error of a run that finds
    the folder locked shows it. `say`: function that prints a line; called if the file system has no locks. Raises
    ConfigError if another run has the lock, CacheError if the folder cannot be written."""
    with reraised(CacheError, f"cannot write {folder}", REMEDY, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab+", buffering=0)  # a buffer would be written again when it is closed
    with file:
        group = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if ranks.world > 1 else None
        try:
            is_taken = _take(file, {"pid": os.getpid(), "doing": doing, "group": group})
        except CacheError:
            raise
        except OSError as error:
            say(f"note: the disk of {folder} knows no locks ({error}): see to it that no other run writes there")
            is_taken = True
        if not is_taken:
            other = {"doing": "at work", "pid": "unknown", **_holder(file)}
            raise ConfigError(
                f"another run is {other['doing']} here: {folder} (pid {other['pid']}): wait until it "
                "ends, or stop it and run the same command, which goes on where it stopped; or choose another --out"
            )
        yield


def _take(file: IO[bytes], owner: dict[str, Any]) -> bool:
    """Take the lock, exclusive or shared with the same group; returns True on success."""
    give_up_at = time.monotonic() + (PATIENCE_S if owner["group"] else 0.0)
    while True:
        if _locks(file, fcntl.LOCK_EX):
            with reraised(CacheError, f"cannot write {file.name}", REMEDY, OSError):
                file.truncate(0)
                file.write(json.dumps(owner).encode())
            if owner["group"] is None or _locks(file, fcntl.LOCK_SH):
                return True
        elif owner["group"] and _locks(file, fcntl.LOCK_SH):
            return _holder(file).get("group") == owner["group"]
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(0.05)


def _locks(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[bytes]) -> dict[str, Any]:
    file.seek(0)
    text = file.read()
    return json.loads(text) if text.endswith(b"}") else {}  # the other run may be writing it just now

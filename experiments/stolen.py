"""How often the hypervisor has given this machine's processors to others, for experiments that time steps side by
side."""

from __future__ import annotations

from pathlib import Path

_FILE = Path("/proc/stat")
_STEAL = 8
"""Place of the stolen ticks in the first line of /proc/stat, after "cpu"."""


def stolen_ticks() -> int:
    """Hundredths of a second that were taken from all processors since the start; 0 where the system does not say.

    A step during which they grew says nothing of the program: steps of 12 ms were seen to take a second then.
    """
    if not _FILE.exists():
        return 0
    fields = _FILE.read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(fields[_STEAL]) if len(fields) > _STEAL else 0

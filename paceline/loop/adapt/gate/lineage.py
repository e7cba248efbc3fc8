"""Reads and writes lineage.json: every drafter trained or tried here, the drafters that it was trained from (parents),
and the verdict of the gate, which compares a candidate with the serving drafter.

{"drafters": [{"drafter": "runs/adapt/tickets-20261103", "weights": "sha256:...", "parents": ["default"],
               "window": {"since": 494500, "until": 494548, "requests": 812, "sha256": "..."}, "gate": {...},
               "state": "serving"}]}
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.runs.folder import plain, write_whole


@dataclass(frozen=True, slots=True)
class Lineage:
    """Reads and writes lineage.json: the history of all drafters that were trained or tried, with their parents, states
    and verdicts. Every call reads the file again, since users may edit it."""

    path: Path

    def entries(self) -> list[dict[str, Any]]:
        """Returns all entries, oldest first; [] if lineage.json does not exist. A drafter that was tried again has
        several. Keys of an entry are "drafter" (folder), "parents" (drafters that it was trained from), "state",
        "weights" (hash), "when" (UTC) and further ones given to `add`, such as "reason". Raises ConfigError if the file
        is damaged."""
        if not self.path.exists():
            return []
        damage = (OSError, ValueError, KeyError, TypeError)
        with reraised(ConfigError, f"{self.path} is damaged", "mend it, or move it away", *damage):
            entries = json.loads(self.path.read_text(encoding="utf-8"))["drafters"]
            if not all(isinstance(entry, dict) for entry in entries):
                raise ValueError("an entry is no object")
            return entries

    def add(self, drafter: str, *, parents: Iterable[str], state: str, **figures: Any) -> None:
        """Add an entry for one drafter. `drafter`: its folder; `parents`: the drafters that it was trained from;
        `state`: such as "serving", "refused" or "rolled back". Further keyword arguments (`figures`), such as `reason`,
        become further JSON fields of the entry. Raises CacheError if lineage.json cannot be written, ConfigError if it
        is damaged."""
        self.add_all([{"drafter": drafter, "parents": list(parents), "state": state, **figures}])

    def add_all(self, drafters: Iterable[dict[str, Any]]) -> None:
        """Add entries for several drafters in one write. Each dict has the keys "drafter" (folder), "parents", "state"
        and further JSON fields, as described in `add`. Raises CacheError if lineage.json cannot be written, ConfigError
        if it is damaged."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        new = [{"weights": weights_hash(Path(drafter["drafter"])), "when": when, **drafter} for drafter in drafters]
        self._write([*self.entries(), *plain(new)])

    def mark(self, drafter: str, state: str, reason: str) -> None:
        """Set state and reason in the newest entry of this drafter; a drafter without an entry is ignored. Raises
        CacheError if lineage.json cannot be written, ConfigError if it is damaged."""
        entries = self.entries()
        for entry in reversed(entries):
            if entry.get("drafter") == drafter:
                entry |= {"state": state, "reason": reason}
                break
        self._write(entries)

    def is_known_bad(self, folder: Path) -> str | None:
        """Checks if the drafter in `folder` has already failed. If a drafter with the same weights was refused or
        rolled back, returns the recorded reason; else None. Raises ConfigError if lineage.json is damaged."""
        weights = weights_hash(folder)
        for entry in self.entries() if weights else ():
            if entry.get("state") in ("refused", "rolled back") and entry.get("weights") == weights:
                return str(entry.get("reason", entry["state"]))
        return None

    def _write(self, entries: list[dict[str, Any]]) -> None:
        write_whole(self.path, json.dumps({"drafters": entries}, indent=1) + "\n")


WEIGHTS = ("model.safetensors", "model-q8_0.safetensors")
"""File names of a drafter's weights, in order of preference."""


def weights_hash(folder: Path) -> str | None:
    """SHA-256 of the weights file in a drafter's folder; None without a weights file."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        return None
    with file.open("rb") as data:
        return "sha256:" + hashlib.file_digest(data, "sha256").hexdigest()


def window_hash(keys: Iterable[str]) -> str:
    """Returns the SHA-256 of a training window (the stored answers to train on). It is computed from the keys of the
    window's requests, whose order does not matter."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()

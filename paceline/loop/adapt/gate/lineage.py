"""lineage.json: every drafter that was trained or tried here, where it came from, and what the gate said of it.

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
    """The file, read anew at every call: people may edit it."""

    path: Path

    def entries(self) -> list[dict[str, Any]]:
        """Oldest first. Raises ConfigError when the file is damaged."""
        if not self.path.exists():
            return []
        with reraised(
            ConfigError, f"{self.path} is damaged", "mend it, or move it away", OSError, ValueError, KeyError, TypeError
        ):
            found = json.loads(self.path.read_text(encoding="utf-8"))["drafters"]
            if not all(isinstance(each, dict) for each in found):
                raise ValueError("an entry is no object")
            return found

    def add(self, drafter: str, *, parents: Iterable[str], state: str, **figures: Any) -> None:
        """One more drafter: "refused", "serving", "rolled back" ..."""
        self.add_all([{"drafter": drafter, "parents": list(parents), "state": state, **figures}])

    def add_all(self, drafters: Iterable[dict[str, Any]]) -> None:
        """Several drafters, all or none; each as `add` takes it. Raises CacheError when the disk refuses."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        new = [{"weights": weights_hash(Path(each["drafter"])), "when": when, **each} for each in drafters]
        self._write([*self.entries(), *plain(new)])

    def mark(self, drafter: str, state: str, reason: str) -> None:
        """What became of the newest entry of this name."""
        entries = self.entries()
        for entry in reversed(entries):
            if entry.get("drafter") == drafter:
                entry |= {"state": state, "reason": reason}
                break
        self._write(entries)

    def is_known_bad(self, folder: Path) -> str | None:
        """Why weights with these very bytes were turned away before."""
        mark = weights_hash(folder)
        bad = (
            each for each in self.entries() if each.get("state") in ("refused", "rolled back") and each.get("weights") == mark
        )
        return next((str(each.get("reason", each["state"])) for each in bad if mark), None)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        write_whole(self.path, json.dumps({"drafters": entries}, indent=1) + "\n")


WEIGHTS = ("model.safetensors", "model-q8_0.safetensors")
"""Files of a drafter's weights, the one that is read first."""


def weights_hash(folder: Path) -> str | None:
    """Of a drafter's weights; None where it has none."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        return None
    with file.open("rb") as data:
        return "sha256:" + hashlib.file_digest(data, "sha256").hexdigest()


def window_hash(keys: Iterable[str]) -> str:
    """Names a window of traces: the same requests, the same name."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()

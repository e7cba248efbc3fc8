"""A watcher beside a server that only looks like one, up to a canary on probation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from fake_servers import FakeServer
from played import NOW, PASSED, Played, events, traffic, watcher

from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.watch import Watcher


def begun(folder: Path, server: FakeServer, ticks: int, *ends: tuple[int, Any], **changes: Any) -> Watcher:
    """A training, its gate, and its swap with the fourth look; a reading of 500 rounds with each."""
    traffic(folder)

    def start(command: list[str], out: Path) -> Job:
        if "train" in command:
            shutil.copytree(weights, Path(command[command.index("--out") + 1]) / "drafter", dirs_exist_ok=True)
        return jobs(command, out)

    weights = folder / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"weights")
    jobs = Played(*(ends or ((0, ""), (0, PASSED))))
    one = watcher(folder, server, cast(Any, start), **changes)
    for minute in range(ticks):
        server.count(rounds=1000 + 500 * minute, accepted=1000 + 500 * minute, tokens=2000 + 1000 * minute)
        one.tick(NOW + 60 * minute)
    return one


def swapped(folder: Path, server: FakeServer, **changes: Any) -> Watcher:
    """On probation since NOW + 180, 2500 rounds counted."""
    one = begun(folder, server, 4, **changes)
    assert events(one) == ["training", "swapped"]
    return one


def why(one: Watcher) -> str:
    return str(one.log.lines()[-1]["why"])


def is_condemned(one: Watcher) -> bool:
    """Whether these weights would be turned away if they came again."""
    return one.lineage.is_known_bad(Path(one.lineage.entries()[-1]["drafter"])) is not None

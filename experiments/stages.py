"""Stages of studies that take hours: commands of paceline, each with a folder, which are not run again once they have
ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.runs.folder import write_whole

MARK, LINE = "seconds.json", "line.json"
"""Files of a stage that has ended: its seconds, and the JSON line of its command."""
QUICK = (
    *("--plan", "off", "--epochs", 1000, "--blocks-per-step", 96, "--anchors", 32, "--loss-vocab", 8192),
    *("--features", "cached", "--serve-share", 0),
)
"""Options of `paceline train` for a few minutes of steps on a workload, from a trained drafter."""


def paceline(*words: object) -> dict[str, Any]:
    """The JSON line of a command of paceline."""
    command = [sys.executable, "-m", "paceline", *map(str, words), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def stage(out: Path, name: str, *words: object) -> Path:
    """Run a command of paceline unless an earlier run ended it; its folder, where `seconds.json` is the mark. A stage
    that is resumed counts the seconds of all its runs."""
    folder = out / name
    mark, begun = folder / MARK, folder / "seconds-so-far.json"
    if mark.exists():
        return folder
    print(f"== {name}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    before = float(json.loads(begun.read_text())) if begun.exists() else 0.0
    began = time.monotonic()
    try:
        line = paceline(*words, "--out", folder)
    finally:
        spent = before + time.monotonic() - began
        write_whole(begun, json.dumps(spent))
    write_whole(folder / LINE, json.dumps(line))
    write_whole(mark, json.dumps(spent))
    return folder


def measured(out: Path, name: str, drafters: Mapping[str, object], *words: object) -> dict[str, dict[str, Any]]:
    """The results of `paceline bench decode` with these words, by the names of `drafters` (name -> drafter)."""
    listed = [str(drafter) for drafter in drafters.values()]
    folder = stage(out, name, "bench", "decode", *words, "--drafters", ",".join(listed))
    rows = {row["drafter"]: row for row in json.loads((folder / LINE).read_text())["results"]}
    if missing := [name for name, drafter in drafters.items() if str(drafter) not in rows]:
        sys.exit(f"{folder} has no figures of {', '.join(missing)}: delete it, and run this again")
    return {name: rows[drafter] for name, drafter in zip(drafters, listed, strict=True)}

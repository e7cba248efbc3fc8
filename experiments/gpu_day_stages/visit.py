"""The argument of every stage of experiments/gpu_day.py, and its one way to report: lines, each sent to the driver at
once.

A line is a dict: a measurement has `what`, a check `check` and `passed`, a goal `goal`, `value`, `wanted` and `met`. A
failed check fails the stage. A goal that is not met does not: it says how far the code is from what its design
promises.
Imports no PyTorch: the driver's tests run on scripted stages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

PREDICTED: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("predictions.json").read_text())
"""Estimates made before any GPU was used, by what is measured: ms of the code as it was, and of its floor."""
Choice = TypeVar("Choice")
Line = dict[str, Any]


def nvidia_smi(names: str) -> dict[str, str]:
    """The card's properties of these names, separated by commas, read without touching CUDA; {} without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    with contextlib.suppress(subprocess.SubprocessError):
        words = [program, f"--query-gpu={names}", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=5)
        return dict(zip(names.split(","), done.stdout.strip().split(", "), strict=False))
    return {"unknown": "nvidia-smi did not answer"}


class Skipped(Exception):
    """Raised by a stage that has nothing to work on; its text says why."""


@dataclass
class Visit:
    """One stage's view of the day."""

    device: str
    is_tiny: bool
    """Tiny shapes and few repetitions: the same code in seconds on a CPU, its figures mean nothing."""
    out: Path
    bring: Path | None = None
    """Folder of files that were brought (`pieces.py` prepares it)."""
    earlier: dict[str, list[Line]] = field(default_factory=dict)
    """Lines of the stages before this one, by their names."""
    send: Callable[[Line], object] = print
    ends_at: float = float("inf")
    """On `time.monotonic`: when the driver ends this stage."""

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def sized(self, real: Choice, tiny: Choice) -> Choice:
        return tiny if self.is_tiny else real

    def report(self, what: str, **figures: Any) -> None:
        """A measurement, with what was predicted for it."""
        predicted = {f"predicted_{name}": value for name, value in PREDICTED.get(what, {}).items()}
        self.send({"what": what, **figures, **predicted})

    def check(self, name: str, passed: bool, **figures: Any) -> None:
        self.send({"check": name, "passed": bool(passed), **figures})

    def goal(self, name: str, value: float, least: float) -> None:
        """Reports a figure that the design promises: at least `wanted`. Reported only; not judged on tiny shapes."""
        self.send({"goal": name, "value": value, "wanted": least, "met": None if self.is_tiny else value >= least})

    def need(self, seconds: float) -> None:
        """Raises Skipped if less time is left."""
        if self.left_s < seconds:
            raise Skipped("no time is left")

    def leave_out(self, name: str, why: str) -> None:
        self.send({"left_out": name, "why": why})

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a stage: what it raises becomes a failed check with its traceback, and the stage goes on."""
        try:
            yield
        except Skipped as error:
            self.leave_out(name, str(error))
        except Exception:  # whatever a kernel raises: the other parts of the visit are still run
            logging.exception("%s failed", name)
            self.send({"check": name, "passed": False, "traceback": traceback.format_exc()})

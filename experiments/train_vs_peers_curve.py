"""What the sides of `train_vs_peers.py` share: documents, and a drafter's weights as training time goes on.

Needs PyTorch and safetensors only: the peers' environments have no paceline. A curve is a folder:

    curve.jsonl             {"seconds": of training alone, "blocks": trained so far, "steps": ..., "weights": "000.safetensors"}
    000.safetensors ...     float32 or bfloat16, named as in a z-lab checkpoint
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

DRAFTER = ("fc.", "hidden_norm.", "norm.", "layers.")
"""Beginnings of the names of a drafter's own weights; embedding and head are the target's."""
OVERTIME = 1.1
"""A side whose steps became slower than they were when it was timed stops here, in shares of the time that it was given."""


class Text(NamedTuple):
    """One document: its tokens, and where the answer begins in them."""

    ids: list[int]
    start: int


class EnoughError(Exception):
    """Raised within a peer's trainer when its time is over."""


def read_texts(file: Path) -> list[Text]:
    return [Text(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def write_texts(file: Path, texts: Iterator[Text]) -> None:
    file.write_text("".join(json.dumps(text._asdict()) + "\n" for text in texts), encoding="utf-8")


class Curve:
    """Keeps weights every `every_s` seconds of training, the first ones before any step."""

    def __init__(self, folder: Path, every_s: float, weights: Callable[[], dict[str, Tensor]]) -> None:
        self._folder, self._every_s, self._weights = folder, every_s, weights
        self._number, self._next_s = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "curve.jsonl").write_text("")

    def note(self, seconds: float, blocks: int, steps: int, is_last: bool = False) -> None:
        """Keep the weights when it is time, or when they are the last; called after a step, the clock stopped."""
        if seconds < self._next_s and not is_last:
            return
        name = f"{self._number:03d}.safetensors"
        own = {name: tensor for name, tensor in self._weights().items() if name.startswith(DRAFTER)}
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()}, self._folder / name)
        line = {"seconds": round(seconds, 3), "blocks": blocks, "steps": steps, "weights": name}
        with (self._folder / "curve.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._number += 1
        while self._next_s <= seconds:
            self._next_s += self._every_s


class Stopwatch:
    """Seconds of training; stopped while weights are kept."""

    def __init__(self) -> None:
        self._sum, self._since = 0.0, time.perf_counter()

    def stop(self) -> float:
        """Seconds so far."""
        self._sum += time.perf_counter() - self._since
        return self._sum

    def go_on(self) -> None:
        self._since = time.perf_counter()

"""paceline's side of `train_vs_peers.py`: `paceline train` as it is, which also times its features and keeps weights.

    python experiments/train_vs_peers_ours.py FOLDER EVERY_S train --target ... --answers ...

FOLDER gets the curve and told.json. Training seconds are the trainer's own: its steps, without looks and checkpoints.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from train_vs_peers_curve import Curve

from paceline.cli import app
from paceline.train import sources
from paceline.train.loop import Trainer

Told = dict[str, float]


def timed(function: Callable[..., Any], told: Told) -> Callable[..., Any]:
    def call(*args: Any, **keys: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **keys)
        finally:
            told["features_s"] = told.get("features_s", 0.0) + time.perf_counter() - began

    return call


def watched(run: Callable[..., bool], folder: Path, every_s: float, told: Told, began: float) -> Callable[..., bool]:
    """`Trainer.run` with a curve."""

    def call(trainer: Trainer, on_step: Callable[[dict[str, Any]], None], *rest: Any) -> bool:
        told["start_s"] = time.perf_counter() - began - told.get("features_s", 0.0)
        curve = Curve(folder, every_s, lambda: trainer.parallel.weights(trainer.network))
        curve.note(0.0, 0, 0)

        def after(figures: dict[str, Any]) -> None:
            curve.note(trainer.state.seconds, trainer.state.num_blocks, trainer.state.step, trainer.share_done >= 1.0)
            on_step(figures)

        return run(trainer, after, *rest)

    return call


def main() -> None:
    began, told = time.perf_counter(), Told()
    folder, every_s, words = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    sys.argv = ["paceline", *words]
    with (
        patch.object(Trainer, "run", watched(Trainer.run, folder, every_s, told, began)),
        patch.object(sources, "cache_features", timed(sources.cache_features, told)),
        patch.object(sources, "stored_scale", timed(sources.stored_scale, told)),
    ):
        app(prog_name="paceline", standalone_mode=False)
    (folder / "told.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()

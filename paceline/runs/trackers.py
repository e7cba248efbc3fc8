"""Logs training curves to TensorBoard, Weights & Biases or MLflow (`train --log-to`); off by default.

Each tracker's package is imported on use and configured by its own environment variables (WANDB_PROJECT, WANDB_MODE,
MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, needing
from paceline.report.tables import ignore

AddScalars = Callable[[dict[str, float], int], Any]
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_tracker(name: str) -> None:
    """Raise ConfigError if the package of the experiment tracker `name` cannot be imported. Call this before
    training."""
    if name != "none":
        with needing(ConfigError, f"log_to {name} needs its package: pip install {name}, or leave it out"):
            importlib.import_module(PACKAGES[name])


@contextlib.contextmanager
def tracker(name: str, run: Path) -> Iterator[AddScalars]:
    """Context manager that yields a function (scalars, step), which logs one training step; NaN and infinite values are
    left out. `name`: "tensorboard", "wandb", "mlflow", or "none" for a function that does nothing. `run`: the run
    folder. Raises ConfigError if the tracker's package is missing."""
    if name == "none":
        yield ignore
        return
    check_tracker(name)
    module: Any = importlib.import_module(PACKAGES[name])
    backend = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[name]
    with backend(module, run) as add:
        yield lambda scalars, step: add({key: value for key, value in scalars.items() if math.isfinite(value)}, step)


@contextlib.contextmanager
def _tensorboard(module: Any, run: Path) -> Iterator[AddScalars]:
    with module.SummaryWriter(str(run / "tensorboard")) as board:

        def add(scalars: dict[str, float], step: int) -> None:
            for key, value in scalars.items():
                board.add_scalar(key, value, step)

        yield add


@contextlib.contextmanager
def _wandb(module: Any, run: Path) -> Iterator[AddScalars]:
    with module.init(project="paceline", name=run.name, dir=str(run), resume="allow") as session:
        yield lambda scalars, step: session.log(scalars, step=step)


@contextlib.contextmanager
def _mlflow(module: Any, run: Path) -> Iterator[AddScalars]:
    with module.start_run(run_name=run.name):
        yield lambda scalars, step: module.log_metrics(scalars, step=step)

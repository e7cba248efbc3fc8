"""What a training run leaves behind of its steps: metrics.jsonl, and TensorBoard's files where that is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paceline.progress import Progress
from paceline.runlog import RunFolder
from paceline.train.loop import Step, Trainer

SCALARS = ("loss", "objective", "eal", "accuracy", "lr", "grad_norm", "tokens_per_s", "blocks_per_s", "flops_share")
LINE_EVERY = 25
"""Steps between lines of news."""


@contextlib.contextmanager
def tracked(run: RunFolder, trainer: Trainer, progress: Progress) -> Iterator[Callable[[Step], None]]:
    """A function for `Trainer.run` that writes each step down and tells `progress`."""
    with progress.bar("training", trainer.total_steps - trainer.state.step) as advance, _tensorboard(run) as add_scalar:

        def on_step(step: Step) -> None:
            run.log(**step.figures)
            text = _line(step)
            advance(text)
            if step.number % LINE_EVERY == 0 or "heldout" in step.figures:
                progress.say(text)
            for name, value in _scalars(step.figures).items():
                add_scalar(name, value, step.number)

        yield on_step


def newest_rates(run: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """The newest eal and loss: on held-out documents where there are some, else on the documents of the last step."""
    name = "heldout" if "heldout" in trainer.heldout else None
    seen = [line.get("heldout") if name else line for line in run.metrics()]
    newest = next((figures for figures in reversed(seen) if figures), {})
    return {key: newest.get(key) for key in ("eal", "loss")}


def _scalars(figures: dict[str, Any]) -> dict[str, float]:
    found = {f"train/{name}": figures.get(name) for name in SCALARS}
    for name in ("heldout", "ood"):
        found |= {f"{name}/{key}": figures.get(name, {}).get(key) for key in ("loss", "eal", "accuracy")}
    return {name: value for name, value in found.items() if value is not None}


def _line(step: Step) -> str:
    figures = step.figures
    text = f"step {step.number} loss {figures['loss']:.2f} eal {figures['eal']:.2f} {figures['blocks_per_s']:.0f} blocks/s"
    looks = "".join(f" {name} {figures[name]['eal']:.2f}" for name in ("heldout", "ood") if name in figures)
    return f"{text}{looks} ({step.share_done:.0%})"


@contextlib.contextmanager
def _tensorboard(run: RunFolder) -> Iterator[Callable[[str, float, int], Any]]:
    """A function that adds a scalar; it does nothing where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda name, value, step: None
        return
    with SummaryWriter(str(run.path / "tensorboard")) as board:
        yield board.add_scalar

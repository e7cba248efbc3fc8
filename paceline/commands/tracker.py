"""Shows a training run as it goes: a bar on stderr, metrics.jsonl in the run folder, TensorBoard when it is installed."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.commands.terminal import say
from paceline.runlog import RunFolder
from paceline.train.loop import Step, Trainer
from paceline.train.ranks import Ranks

SCALARS = ("loss", "objective", "eal", "accuracy", "lr", "grad_norm", "tokens_per_s", "blocks_per_s", "flops_share")
PLAIN_EVERY = 25
"""Steps between lines where no terminal shows the bar."""


class Tracker:
    """Hears of every step; only the first process writes."""

    def __init__(self, run: RunFolder, trainer: Trainer, ranks: Ranks) -> None:
        self._run, self._trainer, self._is_first = run, trainer, ranks.is_first
        self._stack = contextlib.ExitStack()
        self._console = Console(stderr=True)
        self._board: Any = None
        self.last: dict[str, Any] = {}
        """Newest eal, on held-out documents where there are some."""

    def __enter__(self) -> Tracker:
        if self._is_first:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=self._console, transient=True))
            self._task = self._bar.add_task("training", total=1.0)
            self._board = _tensorboard(self._run)
            if self._trainer.state.step:
                say(f"going on after step {self._trainer.state.step}")
                for figures in self._run.metrics():
                    self._remember(figures)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        if self._board is not None:
            self._board.close()

    def on_step(self, step: Step) -> None:
        """Log one step."""
        if not self._is_first:
            return
        figures = step.figures
        self._run.log(**figures)
        self._remember(figures)
        text = f"step {step.number} loss {figures['loss']:.2f} eal {figures['eal']:.2f} {figures['blocks_per_s']:.0f} blocks/s"
        for name in ("heldout", "ood"):
            if name in figures:
                text += f" {name} {figures[name]['eal']:.2f}"
        self._bar.update(self._task, completed=min(1.0, self._trainer.progress), description=text)
        if not self._console.is_terminal and (step.number % PLAIN_EVERY == 0 or "heldout" in figures):
            say(f"{text} ({self._trainer.progress:.0%})")
        self._to_board(step)

    def _remember(self, figures: dict[str, Any]) -> None:
        seen = figures.get("heldout", None if "heldout" in self._trainer.heldout else figures)
        if seen:
            self.last = {"eal": seen["eal"], "loss": seen["loss"]}

    def _to_board(self, step: Step) -> None:
        if self._board is None:
            return
        figures = {f"train/{name}": step.figures.get(name) for name in SCALARS}
        for name in ("heldout", "ood"):
            figures |= {f"{name}/{key}": step.figures.get(name, {}).get(key) for key in ("loss", "eal", "accuracy")}
        for name, value in figures.items():
            if value is not None:
                self._board.add_scalar(name, value, step.number)


def _tensorboard(run: RunFolder) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run.path / "tensorboard"))

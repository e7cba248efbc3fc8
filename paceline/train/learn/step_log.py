"""Logs and reports the steps of a training run, and reads the log at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paceline.report.tables import Progress
from paceline.runs.folder import RunFolder
from paceline.runs.trackers import tracker
from paceline.train.learn.loop import Trainer
from paceline.train.learn.optimisers import WARM_UP_SHARE, learning_rate_share

SCALARS = ("loss", "objective", "eal", "accuracy", "lr", "grad_norm", "tokens_per_s", "blocks_per_s", "flops_share")
MUCH_HIGHER = 1.5
"""Smallest ratio of two learning rates that is worth a note."""
LINE_EVERY = 25
"""Steps between progress lines."""


@contextlib.contextmanager
def tracked(
    run: RunFolder, trainer: Trainer, progress: Progress, log_to: str = "none"
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context manager that yields a function for the argument `on_step` of `Trainer.run`. The function logs each step
    in the run folder, and reports it to `progress` and to the experiment tracker `log_to`, such as "wandb"."""
    number = trainer.total_steps - trainer.state.step
    with progress.bar("training", number) as advance, tracker(log_to, run.path) as add_scalars:

        def on_step(figures: dict[str, Any]) -> None:
            run.log(**figures)
            number = figures["step"]
            evaluations = {name: figures[name] for name in ("heldout", "ood") if name in figures}
            text = f"step {number} loss {figures['loss']:.2f} eal {figures['eal']:.2f} "
            text += f"{figures['blocks_per_s']:.0f} blocks/s"
            text += "".join(f" {name} {evaluation['eal']:.2f}" for name, evaluation in evaluations.items())
            if "served" in figures:
                text += f" served {figures['served']['tokens_per_round']:.2f}"
            advance(text, trainer.share_done)
            if number % LINE_EVERY == 0 or "heldout" in evaluations:
                progress.say(f"{text} ({trainer.share_done:.0%}{time_left(trainer)})")
            scalars = {f"train/{name}": figures.get(name) for name in SCALARS}
            for name, evaluation in evaluations.items():
                scalars |= {f"{name}/{key}": evaluation.get(key) for key in ("loss", "eal", "accuracy")}
            scalars["served/tokens_per_round"] = figures.get("served", {}).get("tokens_per_round")
            add_scalars({name: value for name, value in scalars.items() if value is not None}, number)

        yield on_step


def time_left(trainer: Trainer) -> str:
    """Returns the estimated time until the end of training as text, such as ", 12 min left". Returns an empty text
    before the first step and at the end."""
    done, seconds = trainer.share_done, trainer.state.elapsed_s
    return f", {seconds * (1.0 - done) / done / 60:.0f} min left" if 0 < done < 1 else ""


def newest_rates(run: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """Returns the latest {"eal": expected acceptance length, "loss": loss}, measured on held-out documents. In a run
    without held-out documents, they are measured on the blocks of the last training step. A value is None if it was not
    measured yet."""
    seen = [line.get("heldout") if "heldout" in trainer.heldout else line for line in run.metrics()]
    newest = next((figures for figures in reversed(seen) if figures), {})
    return {key: newest.get(key) for key in ("eal", "loss")}


def risen_rate(run: RunFolder, trainer: Trainer) -> str | None:
    """Returns a note for the user if the loss may rise at first: a run that is resumed for more steps than planned
    before begins with a much higher learning rate than at its last step. Returns None if the rate is not much
    higher."""
    last = next((line["lr"] for line in reversed(run.metrics()) if line.get("lr")), None)
    now = trainer.config.optim.lr * learning_rate_share(trainer.share_done)
    if last is None or trainer.share_done <= WARM_UP_SHARE or now < MUCH_HIGHER * last:
        return None
    return (
        f"note: the learning rate goes up from {last:.2g} to {now:.2g}: it follows the whole length of the run, which "
        "is longer now; the loss rises at first"
    )

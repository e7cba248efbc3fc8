"""The settings that a search tries: for each of them a few values around the planner's choice.

A trial is a dict: name of the setting -> value. Settings that are not in the space stay as planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.train.config import TrainConfig
from paceline.train.run_file import as_tree, leaves, value_of, with_value

if TYPE_CHECKING:
    from optuna.trial import Trial

CHOICES: dict[str, tuple[Any, ...]] = {
    "shape.kind": ("dflash", "dflash2"),
    "shape.start": ("random", "copied"),
    "shape.num_layers": (1, 2, 3, 4),
    "shape.block_size": (6, 8, 12, 16),
    "shape.num_taps": (3, 5, 7),
    "loop.loss.name": ("d-pace", "ce"),
    "loop.anchors": (24, 48, 96),
    "loop.blocks_per_step": (96, 192, 384),
}
"""Field of TrainConfig -> values that are tried; the planner's value is added if it is not among them."""
RATE, WIDEST_RATE = "loop.optim.lr", 4.0
"""The learning rate is tried from 1 / `WIDEST_RATE` to `WIDEST_RATE` times the planned one."""
SOURCES, ALL = "sources", "all"
"""The mixture of data: all sources of answers, or all but one."""


@dataclass(frozen=True, slots=True)
class Space:
    """Search space: the values that are tried for each training setting."""

    base: TrainConfig
    """The planner's choice: the settings that `paceline train` plans."""
    choices: dict[str, list[Any]]
    """Name of a setting -> values to try. The learning rate is not listed: any value from a quarter to four times the
    planned one may be tried."""
    planned: dict[str, Any]
    """The planner's choice in the form of a trial's settings: name -> value, learning rate included."""

    @classmethod
    def around(cls, base: TrainConfig, num_target_layers: int) -> Space:
        """Returns the search space around `base`, the training that the planner of `paceline train` chose. If
        `base.answers` has several folders of training data, a trial may leave one of them out. `num_target_layers`:
        number of the target's layers; a drafter reads the hidden states of at most this many of them."""
        choices: dict[str, list[Any]] = {}
        planned = {name: value_of(base, name) for name in CHOICES}
        planned["shape.num_taps"] = planned["shape.num_taps"] or min(5, num_target_layers)
        for name, values in CHOICES.items():
            known = [value for value in values if name != "shape.num_taps" or value <= num_target_layers]
            choices[name] = known if planned[name] in known else [planned[name], *known]
        if len(base.answers) > 1:
            choices[SOURCES] = [ALL, *(f"without {folder.name}" for folder in base.answers)]
            planned[SOURCES] = ALL
        return cls(base, choices, planned | {RATE: base.loop.optim.lr})

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Returns the settings that Optuna chooses for a trial, as name -> value. A resumed trial gets the same
        settings again."""
        rate = self.planned[RATE]
        settings = {name: trial.suggest_categorical(name, values) for name, values in self.choices.items()}
        return settings | {RATE: trial.suggest_float(RATE, rate / WIDEST_RATE, rate * WIDEST_RATE, log=True)}

    def config(self, settings: dict[str, Any], out: Path, minutes: float) -> TrainConfig:
        """Returns the training configuration of a trial: the planner's choice, changed by `settings`. `out`: folder of
        the training. `minutes`: limit of the training time, including that of earlier calls with the same `out`. Raises
        ConfigError for settings that contradict each other."""
        config = self.base
        for name, value in settings.items():
            if name != SOURCES:
                config = with_value(config, name, value)
        left_out = str(settings.get(SOURCES, ALL)).removeprefix("without ")
        answers = tuple(folder for folder in config.answers if folder.name != left_out)
        for name, value in {"out": out, "answers": answers, "loop.max_minutes": minutes}.items():
            config = with_value(config, name, value)
        return with_value(config, "given", tuple(leaves(as_tree(config))))

    def differences(self, settings: dict[str, Any]) -> str:
        """Describes how a trial's settings differ from the planner's choice, such as "num_layers 2, lr 0.0011"."""
        differ = [(name, value) for name, value in settings.items() if not _is_same(value, self.planned[name])]
        texts = [f"{name.rpartition('.')[2]} {value:.2g}" if name == RATE else
                 f"{name.removeprefix('loop.').removeprefix('shape.').removesuffix('.name')} {value}"
                 for name, value in differ]  # fmt: skip
        return ", ".join(texts) or "the planner's choice"


def _is_same(value: Any, other: Any) -> bool:
    return math.isclose(value, other) if isinstance(value, float) else value == other

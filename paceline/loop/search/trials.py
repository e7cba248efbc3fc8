"""The trials of a search, which Optuna chooses and stops, and stores in `trials.log` after every measurement.

A trial learns until its first rung and is measured there. Only one in `reduction` of the trials measured at a rung goes
on to the next, with that many times the training (asynchronous successive halving, arXiv 1810.05934). The planner's
choice is the first trial and is never stopped.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DrafterMismatchError, TrainingError, UnsupportedModelError, needing
from paceline.loop.search.config import SearchConfig
from paceline.loop.search.rating import Rated
from paceline.loop.search.space import Space
from paceline.runs.folder import RunFolder

with needing(ConfigError, "a search needs Optuna: pip install 'paceline[search]'"):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, Trial, TrialState

UNUSABLE = (ConfigError, UnsupportedModelError, TrainingError, DrafterMismatchError)
"""Errors of one trial's settings, not of the search."""
LOG = "trials.log"


@dataclass(frozen=True, slots=True)
class Measured:
    """State of a trial (one training with certain settings) after its latest measurement."""

    number: int
    """0 is the planner's choice."""
    settings: str
    """Its differences from the planner's choice."""
    state: str
    """"complete", "pruned" (stopped early, as slower than the others), "running" (interrupted; resumed with the
    search), or "fail"."""
    speedups: tuple[float, ...]
    """Speed-up over plain decoding at each measurement so far, in order."""
    reason: str = ""
    """Error of a failed trial."""


class Trials:
    """Runs the trials of a search, and stores them in the search's folder. A trial trains one drafter with certain
    settings and measures it at several times during the training.

    `train` and `rate` are functions that the caller passes to the constructor. `train(number, config)` trains the
    drafter of trial `number` for the total minutes that the TrainConfig `config` sets, resuming an earlier training; it
    returns the drafter's folder. `rate(number, folder)` measures the drafter in this folder and returns a `Rated`,
    whose `ratio` is its speed-up over plain decoding.
    """

    def __init__(
        self, config: SearchConfig, space: Space, run: RunFolder, train: Callable[[int, Any], Path],
        rate: Callable[[int, Path], Rated],
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config, self.space, self.run, self._train, self._rate = config, space, run, train, rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = JournalStorage(JournalFileBackend(str(run.path / LOG)))
        is_new = not storage.get_all_studies()
        self._study = optuna.create_study(
            storage=storage, study_name="search", load_if_exists=True, direction="maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=config.reduction),
        )  # fmt: skip
        if is_new:
            self._study.enqueue_trial(space.planned)

    @property
    def minutes(self) -> float:
        """Minutes that the search has spent, including the time before a resume."""
        return sum(line["minutes"] for line in self.run.metrics() if "minutes" in line)

    @property
    def reserve(self) -> float:
        """Minutes that must be left of the search's time to start a new trial. They cover a full training, its
        measurements, and the final comparison, which is counted as two measurements."""
        times = (line["measuring_minutes"] for line in self.run.metrics() if "measuring_minutes" in line)
        rungs = self.config.rung_minutes
        return rungs[-1] + (len(rungs) + 2) * max(times, default=0.0)

    def run_next(self) -> Measured:
        """Runs one trial until it is complete or stopped early, and returns its state. This is a new trial or, in a
        resumed search, the one that was interrupted. A trial whose settings cause an error counts as failed. Only in
        trial 0, the planner's choice, is the error raised."""
        begun = [each for each in self._study.trials if each.state is TrialState.RUNNING]
        # A sampler for each trial, so that a resumed search draws the same as one that was never killed.
        seed = self.config.seed + len(self._study.trials)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
        trial = Trial(self._study, begun[0]._trial_id) if begun else self._study.ask()
        settings = self.space.suggest(trial)
        try:
            self._finish(trial, settings, set(begun[0].intermediate_values) if begun else set())
        except UNUSABLE as error:
            if trial.number == 0:
                raise
            trial.set_user_attr("reason", str(error))
            self._study.tell(trial, state=TrialState.FAIL)
        return self.measured()[trial.number]

    def _finish(self, trial: Trial, settings: dict[str, Any], reported: set[int]) -> None:
        """Trains and measures a trial rung by rung. `reported`: Optuna's steps of rungs that a killed search has
        measured."""
        minutes = self.config.rung_minutes
        for rung, until in enumerate(minutes):
            step = self.config.reduction**rung  # Optuna counts training in such steps
            if step not in reported:
                began = time.monotonic()
                drafter = self._train(trial.number, self.space.config(settings, self.folder(trial.number), until))
                trained = time.monotonic()
                rated = self._rate(trial.number, drafter)
                trial.report(rated.ratio, step)
                minutes_of = {"minutes": (time.monotonic() - began) / 60}
                minutes_of["measuring_minutes"] = (time.monotonic() - trained) / 60
                self.run.log(trial=trial.number, rung=rung, steps_minutes=until, **rated._asdict(), **minutes_of)
            is_slow = rung < len(minutes) - 1 and trial.should_prune()  # the planner's choice counts among others too
            if trial.number and is_slow:
                self._study.tell(trial, state=TrialState.PRUNED)
                shutil.rmtree(self.folder(trial.number))
                return
        frozen = self._study.trials[trial.number]
        self._study.tell(trial, frozen.intermediate_values[max(frozen.intermediate_values)])

    def folder(self, number: int) -> Path:
        """Returns the run folder of a trial's training."""
        return self.run.path / "trials" / f"{number:03d}"

    def settings(self, number: int) -> dict[str, Any]:
        """Returns the training settings of a trial, by name."""
        return self._study.trials[number].params

    def measured(self) -> list[Measured]:
        """Returns the state of every trial, ordered by number."""
        return [self._measured(trial) for trial in self._study.trials if trial.params]

    def _measured(self, trial: FrozenTrial) -> Measured:
        settings, values = self.space.differences(trial.params), trial.intermediate_values
        speedups = tuple(values[step] for step in sorted(values))
        reason = str(trial.user_attrs.get("reason", ""))
        return Measured(trial.number, settings, trial.state.name.lower(), speedups, reason)


def winner_of(trials: list[Measured]) -> Measured | None:
    """Returns the complete trial with the highest speed-up at its last measurement. Trial 0, the planner's choice, does
    not take part; None if no other trial is complete."""
    complete = [trial for trial in trials if trial.number and trial.state == "complete"]
    return max(complete, key=lambda trial: trial.speedups[-1], default=None)

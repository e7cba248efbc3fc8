"""Runs the eval suites of an iteration (turn) of the flywheel on models, for its gates and its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.loop.evals.compare import Comparison, compare
from paceline.loop.evals.run import EvalSettings, evaluate
from paceline.loop.evals.scores import Scores, read_scores
from paceline.loop.evals.suite import read_suite
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.state import NO_DRAFTER
from paceline.report.tables import Progress

OWN, FIRST = "suite", "first-suite"
"""Names of the suites of an iteration (turn): its own, and the first one's without the cases found in training data."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs the eval suites of one iteration (turn) of the flywheel on models, and compares their scores."""

    config: FlywheelConfig
    folder: Path
    """Folder of the iteration (turn)."""
    max_tokens: int
    """Longest answer in tokens, unless flywheel.yaml sets sampling.max_tokens."""
    progress: Progress
    suites: dict[str, Path] = field(default_factory=dict)
    """Name of an eval suite -> its file. "suite" is that of this iteration, "first-suite" that of the first one."""

    def scores(self, what: str, model: str, drafter: str = NO_DRAFTER, suite: str = OWN) -> Scores:
        """Runs an eval suite on a model, with or without a drafter; returns the scores. The run folder is evals/<what>.

        `what`: name of the run. `suite`: name of the suite, a key of `suites`. Raises PromptError or ConfigError for an
        unusable suite or setting, JudgeError, DownloadError or SandboxError if the judge or the sandbox fails, and
        ModelNotFoundError, ModelFileError or UnsupportedModelError if the model cannot be loaded.
        """
        engine = replace(self.config.engine, model=model, drafter=drafter)
        sampling = self.config.sampling
        if not self.config.is_given("sampling.max_tokens"):
            sampling = replace(sampling, max_tokens=self.max_tokens)
        config = EvalSettings(judge=self.config.judge, sampling=sampling, name=what, check_drafter=False)
        out = self.folder / "evals" / what
        return evaluate(self.suites[suite], engine, config, out=out, progress=self.progress).scores

    def compared(self, what: str, scores: Scores, base: str) -> Comparison:
        """Compares the scores of a model with those of an earlier run, and prints the difference. `what`: name of the
        model that has `scores`. `base`: name of the earlier run, whose run folder is evals/<base>."""
        comparison = compare(read_scores(self.folder / "evals" / base), scores)
        same = f"{comparison.same_text} of {comparison.cases} answers the same"
        self.progress.say(f"{what} compared with {base}: {comparison}, {same}")
        return comparison

    def compared_with_first(
        self, what: str, model: str, own: Scores, first_run: Path
    ) -> tuple[Scores, Comparison] | None:
        """Compares a model with the model that the flywheel started with, on the eval suite of the first iteration
        (turn).

        Returns (scores of the model on this suite, comparison). Returns None if `suites` does not contain this suite.
        `what`: name of the model in run folders. `own`: the model's scores on the current iteration's suite, reused if
        both suites have the same cases. `first_run`: run folder with the scores of the first model.
        """
        if FIRST not in self.suites:
            return None
        suite, scores = read_suite(self.suites[FIRST]), own
        if suite.digest != own.digest:
            scores = self.scores(f"{what}-on-first", model, suite=FIRST)
        ids, before = {case.id for case in suite}, read_scores(first_run)
        common = tuple(case for case in before.cases if case.id in ids)
        return scores, compare(replace(before, cases=common, digest=scores.digest), scores)

    def figures(self, scores: Scores) -> dict[str, Any]:
        """Returns the values that the ledger records of these scores, by name, such as "score" and "tokens_per_s".
        "price_per_1000", the cost of 1,000 answers, is None if no price is set."""
        line, price = scores.as_line(), self.config.price_per_core_hour
        core_s = line["core_s_per_1000"]
        names = ("score", "interval", "cases", "p50_s", "tokens_per_s", "core_s_per_1000", "lossless")
        cost = None if price is None or core_s is None else core_s / 3600 * price
        return {**{name: line[name] for name in names}, "price_per_1000": cost}


def lost(comparison: Comparison, most: float) -> str | None:
    """Checks that a student's score did not fall by more than `most`. Returns None if this is certain: the 95% interval
    of the change begins at -`most` or above. Otherwise returns the reason to refuse the student."""
    loss = comparison.loss_above(most)
    return f"evals: {loss}" if loss else None


def slower(alone: Scores, drafted: Scores, comparison: Comparison, least: float, is_greedy: bool) -> str | None:
    """Returns the reason not to serve a drafter, or None. A drafter is refused for two reasons: it changed an answer
    although sampling is greedy, or tokens/s with it are less than `least` times those without it.

    `alone`, `drafted`: the model's scores without and with the drafter. `comparison`: comparison of these two scores.
    """
    if is_greedy and comparison.same_text < comparison.cases:
        return f"{comparison.cases - comparison.same_text} of {comparison.cases} answers differ from those without it"
    before, after = (scores.num_tokens / scores.wall_s if scores.wall_s else 0.0 for scores in (alone, drafted))
    if after < least * before:
        return f"{after:.1f} tokens/s with it, {before:.1f} without, {least:g} times as many are needed"
    return None

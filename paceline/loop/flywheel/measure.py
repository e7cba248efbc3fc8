"""Runs the eval suites of an iteration (turn) of the flywheel on models, for its gates (limits of score and speed) and
its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.loop.evals.compare import Comparison, compare
from paceline.loop.evals.run import Asked, evaluate
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

    def scores(self, what: str, model: str, drafter: str = NO_DRAFTER, suite: str = OWN) -> Scores:
        """Runs an eval suite on a model, with or without a drafter; writes the run folder evals/<what> of this
        iteration (turn). `what`: name of the measured model. `suite`: key of `suites`: "suite" for this iteration's
        suite, "first-suite" for the first iteration's.

        Raises ConfigError, PromptError, JudgeError or SandboxError if the suite cannot be run, and ModelNotFoundError,
        ModelFileError or UnsupportedModelError if the model cannot be loaded.
        """
        engine = replace(self.config.engine, model=model, drafter=drafter)
        sampling = self.config.sampling
        if not self.config.is_given("sampling.max_tokens"):
            sampling = replace(sampling, max_tokens=self.max_tokens)
        config = Asked(judge=self.config.judge, sampling=sampling, name=what, check_drafter=False)
        out = self.folder / "evals" / what
        return evaluate(self.suites[suite], engine, config, out=out, progress=self.progress).scores

    def compared(self, what: str, scores: Scores, base: str) -> Comparison:
        """Compares `scores` with those of an earlier eval of this iteration (turn), and prints the difference. `what`:
        name of the model that has `scores`. `base`: name of the earlier run folder in evals/."""
        comparison = compare(read_scores(self.folder / "evals" / base), scores)
        same = f"{comparison.same_text} of {comparison.cases} answers the same"
        self.progress.say(f"{what} compared with {base}: {comparison}, {same}")
        return comparison

    def compared_with_first(
        self, what: str, model: str, own: Scores, first_run: Path
    ) -> tuple[Scores, Comparison] | None:
        """Scores a model on the suite of the first iteration (turn), and compares it with the model that the flywheel
        started with. Returns (scores, comparison). Returns None in the first iteration, and if all cases of the suite
        occur in training data.

        `what`: name of the scored model in run folders. `own`: its scores on this iteration's suite, reused if this
        suite equals the first one. `first_run`: run folder with the scores of the model that the flywheel started with.
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
        """Returns the part of these scores that the ledger records, as a dict with the keys "score", "interval",
        "cases", "p50_s", "tokens_per_s", "core_s_per_1000", "lossless" and "price_per_1000". The last one is the cost
        of 1,000 answers, None if no price is set."""
        line, price = scores.as_line(), self.config.price_per_core_hour
        core_s = line["core_s_per_1000"]
        names = ("score", "interval", "cases", "p50_s", "tokens_per_s", "core_s_per_1000", "lossless")
        cost = None if price is None or core_s is None else core_s / 3600 * price
        return {**{name: line[name] for name in names}, "price_per_1000": cost}


def lost(comparison: Comparison, most: float) -> str | None:
    """Returns a reason to refuse a student if a loss of more than `most` cannot be ruled out, that is, if the 95%
    interval of the change of its mean score (0 to 1) begins below -`most`; else None."""
    loss = comparison.loss_above(most)
    return f"evals: {loss}" if loss else None


def slower(alone: Scores, drafted: Scores, comparison: Comparison, least: float, is_greedy: bool) -> str | None:
    """Returns a reason not to serve a drafter, or None. There are two reasons: an answer changed although sampling is
    greedy (`is_greedy`), or tokens/s with the drafter are less than `least` times those without it.

    `alone`, `drafted`: scores of the model without and with the drafter. `comparison`: comparison of the two.
    """
    if is_greedy and comparison.same_text < comparison.cases:
        return f"{comparison.cases - comparison.same_text} of {comparison.cases} answers differ from those without it"
    before, after = (scores.num_tokens / scores.wall_s if scores.wall_s else 0.0 for scores in (alone, drafted))
    if after < least * before:
        return f"{after:.1f} tokens/s with it, {before:.1f} without, {least:g} times as many are needed"
    return None

"""A model asked a turn's suites: what the gates judge by, and a line of the ledger."""

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
"""Names of the suites of a turn: its own, and what is left of the first turn's."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Asks models in one turn."""

    config: FlywheelConfig
    folder: Path
    """The turn's."""
    max_tokens: int
    """Longest answer, where the file says nothing."""
    progress: Progress
    suites: dict[str, Path] = field(default_factory=dict)

    def ask(self, what: str, model: str, drafter: str, beside: str | None = None) -> tuple[Scores, Comparison | None]:
        """Scores on the turn's own suite, kept in evals/<what>; and the difference to the run `beside`. Raises what
        `paceline.loop.evals.run.evaluate` does."""
        scores = self._evaluate(what, self.suites[OWN], model, drafter)
        if beside is None:
            return scores, None
        found = compare(read_scores(self.folder / "evals" / beside), scores)  # a turn's gates are its own, not those of evals
        low, high = found.interval
        same = f"{found.same_text} of {found.cases} answers the same"
        self.progress.say(f"{what} beside {beside}: {found.difference:+.3f} [{low:+.3f}, {high:+.3f}], {same}")
        return scores, found

    def ask_first(self, what: str, model: str, own: Scores, first_run: Path) -> tuple[Scores, Comparison] | None:
        """The same on what is left of the first turn's suite, beside the first model's scores there. None where nothing is.
        `own`: the model's scores on the turn's own suite, which may be that very suite."""
        if FIRST not in self.suites:
            return None
        suite, scores = read_suite(self.suites[FIRST]), own
        if suite.digest != own.digest:
            scores = self._evaluate(f"{what}-on-first", self.suites[FIRST], model, NO_DRAFTER)
        asked, before = {case.id for case in suite}, read_scores(first_run)
        left = tuple(case for case in before.cases if case.id in asked)
        return scores, compare(replace(before, cases=left, digest=scores.digest), scores)

    def _evaluate(self, what: str, suite: Path, model: str, drafter: str) -> Scores:
        engine = replace(self.config.engine, model=model, drafter=drafter)
        sampling = self.config.sampling
        if not self.config.is_given("sampling.max_tokens"):
            sampling = replace(sampling, max_tokens=self.max_tokens)
        asked = Asked(judge=self.config.judge, sampling=sampling, name=what, check_drafter=False)
        return evaluate(suite, engine, asked, out=self.folder / "evals" / what, progress=self.progress).scores

    def figures(self, scores: Scores) -> dict[str, Any]:
        """Of the ledger: evals with interval, and what answers cost."""
        told, price = scores.as_line(), self.config.price_per_core_hour
        core_s = told["core_s_per_1000"]
        kept = ("score", "interval", "cases", "p50_s", "tokens_per_s", "core_s_per_1000", "lossless")
        cost = None if price is None or core_s is None else core_s / 3600 * price
        return {**{name: told[name] for name in kept}, "price_per_1000": cost}


def lost(found: Comparison, most: float) -> str | None:
    """Why a student that scores so beside another model is refused: a loss above `most` is not ruled out. None where it is."""
    low, high = found.interval
    if low >= -most:
        return None
    told = f"{found.difference:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"evals: a loss of more than {most:g} beside {found.before} is not ruled out: {told}"


def slower(alone: Scores, drafted: Scores, found: Comparison | None, least: float, is_greedy: bool) -> str | None:
    """Why a drafter is not served: it changed an answer, or brought no speed. None where it did neither."""
    if is_greedy and found is not None and found.same_text < found.cases:
        return f"{found.cases - found.same_text} of {found.cases} answers differ from those without it"
    rates = [scores.num_tokens / scores.wall_s if scores.wall_s else 0.0 for scores in (alone, drafted)]
    if rates[1] < least * rates[0]:
        return f"{rates[1]:.1f} tokens/s with it, {rates[0]:.1f} without, {least:g} times as many are needed"
    return None

"""The prediction: speed-up by draft length, the best length, tokens per second, where a round's time goes.

speedup(g) = N(g) * round(0) / round(g), where round(g) = target pass of g + 1 positions + drafting of g + host; speedup(0) = 1.
With no host time this is N(g) / [T(B, g+1, S) / T(B, 1, S) + D(g)].
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.simulate.acceptance import Acceptance, shifted, tokens_per_round
from paceline.simulate.costs import StepCosts

DELTAS = (-0.1, -0.05, -0.01, 0.01, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences on a machine, and how far drafts may go. Raises ConfigError on impossible values."""

    batch: int = 1
    """Sequences that decode together."""
    context: int = 4096
    """Tokens in the cache of each."""
    max_draft: int = 16
    """Longest draft considered."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"--batch must be at least 1 sequence, not {self.batch}")
        if self.context < 1:
            raise ConfigError(f"--context must be at least 1 token, not {self.context}")
        if not 0 <= self.max_draft <= 1024:
            raise ConfigError(f"--max-draft must be between 0 and 1024 drafts, not {self.max_draft}")


@dataclass(frozen=True, slots=True)
class Change:
    """The best speed-up with another acceptance."""

    points: float
    """Added to every chance; 0.01 is one point."""
    best_draft_length: int
    speedup: float
    gain: float
    """Speed-up over the one predicted now, as a share of it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speed-ups of one load by draft length, and figures at the best length."""

    batch: int
    best_draft_length: int
    speedup: float
    curve: list[tuple[int, float]]
    """(drafts, speed-up), from 0 drafts on."""
    tokens_per_round: float
    """At the best length, the bonus token included."""
    tokens_per_s: float | None
    """All sequences together, at the best length; None where times have no unit."""
    plain_tokens_per_s: float | None
    round_s: float
    plain_round_s: float
    time_split: dict[str, float]
    """Shares of a round at the best length, by part: they add up to 1."""
    sensitivity: list[Change]


def speedup(costs: StepCosts, acceptance: Acceptance, load: Load, num_drafted: int) -> float:
    """Tokens per second over plain decoding's."""
    if num_drafted == 0:
        return 1.0
    plain_s, round_s = (costs.round_s(load.batch, length, load.context) for length in (0, num_drafted))
    return tokens_per_round(acceptance, num_drafted) * plain_s / round_s


def curve(costs: StepCosts, acceptance: Acceptance, load: Load) -> list[tuple[int, float]]:
    return [(length, speedup(costs, acceptance, load, length)) for length in range(load.max_draft + 1)]


def best(points: list[tuple[int, float]]) -> tuple[int, float]:
    """The shortest draft of the highest speed-up."""
    return max(points, key=lambda point: (point[1], -point[0]))


def time_split(costs: StepCosts, load: Load, num_drafted: int) -> dict[str, float]:
    """Shares of a round by part: the target's, drafter, host."""
    seconds = {**costs.split(load.batch, num_drafted + 1, load.context)}
    seconds |= {"drafter": costs.draft_s(load.batch, num_drafted, load.context), "host": costs.host_s}
    whole = sum(seconds.values())
    return {part: spent / whole for part, spent in seconds.items()}


def sensitivity(costs: StepCosts, acceptance: Acceptance, load: Load, now: float) -> list[Change]:
    """Speed-up and best length when every chance is a little lower or higher."""
    changes = []
    for points in DELTAS:
        length, found = best(curve(costs, shifted(acceptance, points), load))
        changes.append(Change(points, length, found, found / now - 1.0))
    return changes


def predict(costs: StepCosts, acceptance: Acceptance, load: Load, has_unit: bool = True) -> Prediction:
    """Everything about one load. `has_unit`: whether costs are seconds; the toy model's are not."""
    points = curve(costs, acceptance, load)
    length, highest = best(points)
    gained = tokens_per_round(acceptance, length)
    plain_s, round_s = (costs.round_s(load.batch, drafts, load.context) for drafts in (0, length))
    return Prediction(
        batch=load.batch,
        best_draft_length=length,
        speedup=highest,
        curve=points,
        tokens_per_round=gained,
        tokens_per_s=load.batch * gained / round_s if has_unit else None,
        plain_tokens_per_s=load.batch / plain_s if has_unit else None,
        round_s=round_s,
        plain_round_s=plain_s,
        time_split=time_split(costs, load, length),
        sensitivity=sensitivity(costs, acceptance, load, highest),
    )

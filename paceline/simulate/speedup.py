"""The prediction: speed-up by draft length, the best length, tokens per second, where a round's time goes.

speedup(g) = N(g) * round(0) / round(g), where round(g) = target pass of g + 1 positions + drafting of g + host; speedup(0) = 1.
With no host time this is N(g) / [T(B, g+1, S) / T(B, 1, S) + D(g)].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, refuse
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
        refuse(
            ConfigError,
            (self.batch < 1, f"--batch must be at least 1 sequence, not {self.batch}"),
            (self.context < 1, f"--context must be at least 1 token, not {self.context}"),
            (not 0 <= self.max_draft <= 1024, f"--max-draft must be between 0 and 1024 drafts, not {self.max_draft}"),
        )


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


def curve(round_s: Sequence[float], acceptance: Acceptance) -> list[tuple[int, float]]:
    """(drafts, tokens per second over plain decoding's), from 0 drafts on; `round_s[g]`: seconds of a round with g drafts."""
    return [(length, tokens_per_round(acceptance, length) * round_s[0] / spent) for length, spent in enumerate(round_s)]


def best(points: list[tuple[int, float]]) -> tuple[int, float]:
    """The shortest draft of the highest speed-up."""
    return max(points, key=lambda point: (point[1], -point[0]))


def predict(costs: StepCosts, acceptance: Acceptance, load: Load, has_unit: bool = True) -> Prediction:
    """Everything about one load. `has_unit`: whether costs are seconds; the toy model's are not."""
    round_s = [costs.round_s(load.batch, length, load.context) for length in range(load.max_draft + 1)]
    points = curve(round_s, acceptance)
    length, highest = best(points)
    changes = []
    for delta in DELTAS:
        other, reached = best(curve(round_s, shifted(acceptance, delta)))
        changes.append(Change(delta, other, reached, reached / highest - 1.0))
    gained = tokens_per_round(acceptance, length)
    spent = costs.split(load.batch, length + 1, load.context)
    spent |= {"drafter": costs.draft_s(load.batch, length, load.context), "host": costs.host_s}
    whole_s = sum(spent.values())
    return Prediction(
        batch=load.batch,
        best_draft_length=length,
        speedup=highest,
        curve=points,
        tokens_per_round=gained,
        tokens_per_s=load.batch * gained / round_s[length] if has_unit else None,
        plain_tokens_per_s=load.batch / round_s[0] if has_unit else None,
        round_s=round_s[length],
        plain_round_s=round_s[0],
        time_split={part: seconds / whole_s for part, seconds in spent.items()},
        sensitivity=changes,
    )

"""Seconds of the parts of a round, from four sources: a toy, a roofline, a measured table, or a calibrated roofline.

A round of B sequences that draft g tokens each takes `verify_s(B, g + 1, S) + draft_s(B, g, S) + host_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.simulate.drafter_cost import DrafterCost, FractionDrafter
from paceline.simulate.measured import StepTable
from paceline.simulate.roofline import Deployment, pass_seconds
from paceline.simulate.shapes import ModelShape

NO_COST = FractionDrafter(0.0)


class StepCosts:
    """Seconds of a round's parts. A source of costs gives `split`, and `draft_s` and `host_s` unless they are 0."""

    __slots__ = ()

    @property
    def host_s(self) -> float:
        """Seconds of a round outside target and drafter."""
        return 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        """Seconds of one target pass by part: `positions` of each sequence, `context` tokens in the cache of each."""
        raise NotImplementedError

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        """Seconds of one target pass."""
        return sum(self.split(batch, positions, context).values())

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Seconds of drafting so many tokens for each sequence."""
        return 0.0

    def round_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Seconds of a round in which every sequence drafts `num_drafted` tokens."""
        return self.verify_s(batch, num_drafted + 1, context) + self.draft_s(batch, num_drafted, context) + self.host_s

    def prefill_s(self, tokens: int, context: int) -> float:
        """Seconds of a chunk of one prompt, `context` tokens being in the cache after it."""
        return self.verify_s(1, tokens, context)


class ToyCosts(StepCosts):
    """Drafting and verifying cost nothing: the speed-up is the number of tokens per round."""

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": 1.0}


@dataclass(frozen=True, slots=True)
class RooflineCosts(StepCosts):
    """`roofline.pass_seconds` of a target, and a drafter beside it."""

    shape: ModelShape
    deployment: Deployment
    drafter: DrafterCost
    host_s: float = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return self.drafter.draft_s(num_drafted, batch, self.verify_s(batch, 1, context))

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return pass_seconds(self.shape, self.deployment, batch, positions, context)


@dataclass(frozen=True, slots=True)
class MeasuredCosts(StepCosts):
    """A table of step times, whatever the context; `drafter` is for tables without draft times."""

    table: StepTable
    drafter: DrafterCost = NO_COST

    @property
    def host_s(self) -> float:
        return self.table.host_s

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return self.table.verify.seconds(batch, positions)

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.table.draft is None:
            return self.drafter.draft_s(num_drafted, batch, self.verify_s(batch, 1, context))
        return self.table.draft.seconds(batch, num_drafted) if num_drafted else 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": self.verify_s(batch, positions, context)}

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.table.prefill.seconds(1, tokens)

"""Where step times come from: nowhere (toy), a roofline, a measured table, or a calibrated roofline. One face for all.

A round of B sequences that draft g tokens each takes `verify_s(B, g + 1, S) + draft_s(B, g, S) + host_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.simulate.drafter_cost import DrafterCost, FractionDrafter
from paceline.simulate.measured import StepTable
from paceline.simulate.roofline import Deployment, pass_seconds
from paceline.simulate.shapes import ModelShape


class StepCosts(Protocol):
    """Seconds of everything a round does."""

    @property
    def host_s(self) -> float:
        """Of a round, outside target and drafter."""
        ...

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        """One target pass over `positions` of each sequence, `context` tokens in the cache of each."""
        ...

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Drafting that many tokens for each sequence."""
        ...

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        """`verify_s` by part."""
        ...


@dataclass(frozen=True, slots=True)
class ToyCosts:
    """Drafting and verifying are free: the speed-up is the number of tokens per round."""

    host_s: float = 0.0

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return 1.0

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": 1.0}


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """`roofline.pass_seconds` of a target, and a drafter beside it."""

    shape: ModelShape
    deployment: Deployment
    drafter: DrafterCost
    host_s: float = 0.0

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return sum(self.split(batch, positions, context).values())

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return draft_seconds(self.drafter, batch, num_drafted, self.verify_s(batch, 1, context))

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return pass_seconds(self.shape, self.deployment, batch, positions, context)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """A table of step times; its drafter where it was measured, else a share of a target pass. The context is the table's."""

    table: StepTable
    drafter: DrafterCost = field(default_factory=lambda: FractionDrafter(0.0))

    @property
    def host_s(self) -> float:
        return self.table.host_s

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return self.table.verify.seconds(batch, positions)

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.table.draft is None:
            return draft_seconds(self.drafter, batch, num_drafted, self.verify_s(batch, 1, context))
        return self.table.draft.seconds(batch, num_drafted) if num_drafted else 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": self.verify_s(batch, positions, context)}


def draft_seconds(drafter: DrafterCost, batch: float, num_drafted: int, plain_s: float) -> float:
    """`plain_s`: a target pass of one position for each sequence."""
    if isinstance(drafter, FractionDrafter):
        return drafter.draft_s(num_drafted, plain_s)
    return drafter.draft_s(num_drafted, batch)

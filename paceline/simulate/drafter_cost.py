"""Seconds of drafting: a share of a plain target pass, or from the drafter's own size.

Autoregressive drafters (MTP, EAGLE, a small model) run once for each draft, block drafters (DFlash) once for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.simulate.roofline import distinct_experts


@dataclass(frozen=True, slots=True)
class FractionDrafter:
    """A drafter pass takes `fraction` of a plain target pass at the same batch."""

    fraction: float
    block: int | None = None
    """Drafts of one drafter pass; None drafts one token a pass."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fraction) and self.fraction >= 0):
            raise ConfigError(f"--drafter-cost must be 0 or more of a target pass, such as 0.1, not {self.fraction:g}")
        _check_block(self.block)

    def draft_s(self, num_drafted: int, batch: float, plain_s: float) -> float:
        """Seconds of drafting for `batch` sequences; `plain_s`: a target pass of one position for each of them."""
        return self.fraction * plain_s * passes(num_drafted, self.block)


@dataclass(frozen=True, slots=True)
class ShapeDrafter:
    """A drafter's own roofline: each of its passes takes the larger of its arithmetic and its reading.

    t_mtp(g, B) = g * max(2*active*B/R, b*resident(B)/BW);   t_dflash(B) = max(2*P*B*D/R, b*P/BW) with D positions a block.
    """

    dense: float
    """Parameters that every pass reads, the head included."""
    flops_per_s: float
    bytes_per_s: float
    num_bytes: float = 2.0
    """Of one parameter."""
    block: int | None = None
    """Drafts of one drafter pass; None drafts one token a pass."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert: float = 0.0
    """Parameters of one expert."""

    def __post_init__(self) -> None:
        if not self.dense > 0:
            raise ConfigError("--drafter-params must be above 0, such as 0.98e9")
        _check_block(self.block)

    def resident(self, tokens: float) -> float:
        """Parameters that a pass over this many tokens reads."""
        if not self.num_experts:
            return self.dense
        return self.dense + distinct_experts(self.num_experts, self.experts_per_token, tokens, 1.0) * self.expert

    def draft_s(self, num_drafted: int, batch: float, plain_s: float = 0.0) -> float:
        """Seconds of drafting for `batch` sequences; the target's `plain_s` does not matter."""
        tokens = batch * (self.block or 1)
        computing = 2.0 * (self.dense + self.experts_per_token * self.expert) * tokens / self.flops_per_s
        reading = self.num_bytes * self.resident(tokens) / self.bytes_per_s
        return passes(num_drafted, self.block) * max(computing, reading)


DrafterCost = FractionDrafter | ShapeDrafter


def passes(num_drafted: int, block: int | None) -> int:
    """Drafter passes of a round."""
    return num_drafted if block is None else math.ceil(num_drafted / block)


def _check_block(block: int | None) -> None:
    if block is not None and block < 1:
        raise ConfigError(f"--block must be at least 1 draft for each drafter pass, not {block}")

"""A drafter that has learned word frequencies and no more: seen, said, and acted upon.

Whoever reads no context can still guess the most frequent tokens; the least cross entropy that gives is the entropy of the
answers' unigrams. Training passes through there on its way, and may stay: then the drafter drafts "the" and ",", and a round
brings little more than one token. So the mean loss of the latest steps is compared with that entropy every so many steps.

What `act` does: first the learning rate begins again from a tenth of twice its height; where that did not help, from a tenth
of half of it. Then it only says so. Both are the same after a resumption, and on every number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.train.config import LoopConfig

MARGIN = 0.2
"""Nats below the entropy of unigrams from which on a loss shows that the context is read."""
FALLING = 0.1
"""Nats in half the steps between two looks: a loss that falls so fast is on its way."""
MEMORY = 0.96
"""Of the running mean of losses: some 25 steps."""
BOOSTS = (2.0, 0.5)
"""Of the learning rate, one after the other."""
RAMP_SHARE = 0.25
"""Of the steps between two checks: how long the rate takes to come back."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """What is known at a step; goes into checkpoints."""

    recent: float | None = None
    """Running mean of the training loss."""
    halfway: float | None = None
    """The same, in the middle between two looks."""
    acted: int = 0
    """How often the rate was changed."""
    acted_at: int = 0
    """The step of that."""
    is_left: bool = False
    """The loss has once been clearly below: never asked again."""

    def rate_share(self, step: int, plateau_steps: int) -> float:
        """Factor of the learning rate at a step."""
        if not self.acted:
            return 1.0
        along = (step - self.acted_at) / max(1.0, RAMP_SHARE * plateau_steps)
        return BOOSTS[self.acted - 1] * min(1.0, 0.1 + 0.9 * along)


def unigram_entropy(counts_V: NDArray[np.int64], kept: NDArray[np.int64] | None = None) -> float:
    """Nats per token of texts with these token counts; with a draft vocabulary `kept`, of its tokens among all positions, as
    the loss counts them: a token that cannot be drafted adds nothing to it."""
    total = counts_V.sum()
    counts = (counts_V if kept is None else counts_V[kept]).astype(np.float64)
    counts = counts[counts > 0]
    return float(-(counts / total * np.log(counts / counts.sum())).sum()) if len(counts) else 0.0


def watched(state: Plateau, config: LoopConfig, entropy: float, step: int, loss: float) -> tuple[Plateau, str | None]:
    """The state after a step with this loss, and what there is to say about it."""
    recent = loss if state.recent is None else MEMORY * state.recent + (1.0 - MEMORY) * loss
    since = (step - state.acted_at) % config.plateau_steps
    halfway = recent if since == config.plateau_steps // 2 else state.halfway
    after = replace(state, recent=recent, halfway=halfway, is_left=state.is_left or recent < entropy - MARGIN)
    is_falling = halfway is not None and halfway - recent > FALLING
    is_due = step > state.acted_at and since == 0
    if config.plateau == "off" or config.loss.needs_target_probs or not is_due:
        return after, None
    if after.is_left:
        is_news = state.acted and step == state.acted_at + config.plateau_steps
        return after, f"step {step}: loss {recent:.2f}: the drafter reads its context now" if is_news else None
    if is_falling:
        return after, None
    seen = (
        f"step {step}: the loss is {recent:.2f}, and guessing by word frequency alone gives {entropy:.2f}: the drafter does "
        "not read its context yet"
    )
    if config.plateau == "act" and state.acted < len(BOOSTS):
        height = "twice" if BOOSTS[state.acted] > 1 else "half"
        acted = replace(after, acted=state.acted + 1, acted_at=step)
        return acted, f"{seen}; the learning rate begins again, {height} as high as --lr"
    tried = "neither a higher nor a lower learning rate helped; " if state.acted else ""
    advice = "--first-layers copied, another --lr, fewer --blocks-per-step, or more minutes may help"
    return after, f"{seen}; {tried}{advice}"

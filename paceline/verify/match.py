"""Sample and match: draw the target's own token at each position; a draft stands while it is that token.

The tokens are those plain decoding draws with the same seed, whatever the drafter, so the rule is exact for any drafter. A
draft x stands with probability target_probs(x): for certain (one-hot) drafts as often as rejection sampling accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.model.logits import sample
from paceline.verify.rule import RowVerdict, Uniforms

if TYPE_CHECKING:
    from torch import Tensor


def verify(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms) -> RowVerdict:
    """`target_probs_JV` [J, V]; `draft_probs_KV` plays no part. Draws no further than the first mismatch."""
    return verify_draws(draft_tokens, lambda slot: sample(target_probs_JV[slot], uniforms.sample(slot)))


def verify_draws(draft_tokens: list[int], draw: Callable[[int], int]) -> RowVerdict:
    """`draw(slot)` is the target's own token at a slot; asked in order, and no further than the first mismatch."""
    for slot, drafted in enumerate(draft_tokens):
        token = draw(slot)
        if token != drafted:
            return RowVerdict(slot, token)
    return RowVerdict(len(draft_tokens), draw(len(draft_tokens)))

"""Token-wise rejection sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2).

Draft x stands with probability min(1, target(x) / draft(x)); the first that falls is replaced by a token drawn from the
residual max(target - draft, 0). Exact for any drafter whose probabilities are those it sampled from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.model.logits import sample
from paceline.verify.rule import RowVerdict, Uniforms

if TYPE_CHECKING:
    from torch import Tensor


def drafted_probs(draft_tokens: list[int], probs_KV: Tensor | None) -> list[float]:
    """Probability of each drafted token under its row: K numbers, without touching the rest of the rows; None is one-hot."""
    if probs_KV is None:
        return [1.0] * len(draft_tokens)
    ids_K1 = torch.tensor(draft_tokens, dtype=torch.int64, device=probs_KV.device).unsqueeze(-1)
    return probs_KV[: len(draft_tokens)].gather(-1, ids_K1).flatten().tolist()


def accept_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """Probability with which each draft stands, given that those before it do: min(1, target / draft), K numbers."""
    pairs = zip(drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV), strict=True)
    # A draft of probability 0 cannot have been drawn; whatever the rule says of it is exact, dividing by it is not.
    return [1.0 if target >= draft > 0 else target / draft if draft > 0 else 0.0 for target, draft in pairs]


def residual(target_V: Tensor, draft_V: Tensor | None, draft_token: int, scale: float = 1.0) -> Tensor:
    """Unnormalised max(scale * target - draft, 0), [V]; `draft_V` None is one-hot at `draft_token`."""
    if draft_V is not None:
        return (target_V * scale).sub_(draft_V).clamp_(min=0.0)
    weights_V = target_V * scale
    weights_V[draft_token] = 0.0  # scale * target is never above 1
    return weights_V


def verify(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms) -> RowVerdict:
    """`draft_probs_KV` [K, V] or None, `target_probs_JV` [J, V]; reads whole rows only where the next token is drawn."""
    for slot, chance in enumerate(accept_probs(draft_tokens, draft_probs_KV, target_probs_JV)):
        if uniforms.accept(slot) >= chance:
            draft_V = None if draft_probs_KV is None else draft_probs_KV[slot]
            weights_V = residual(target_probs_JV[slot], draft_V, draft_tokens[slot])
            return RowVerdict(slot, sample_residual(weights_V, target_probs_JV[slot], uniforms.residual(slot)))
    num_drafted = len(draft_tokens)
    return RowVerdict(num_drafted, sample(target_probs_JV[num_drafted], uniforms.sample(num_drafted)))


def sample_residual(weights_V: Tensor, target_V: Tensor, draw: float) -> int:
    """A token of the residual; of the target where rounding left nothing of it (both distributions are then the same)."""
    return sample(weights_V if float(weights_V.sum()) > 0 else target_V, draw)

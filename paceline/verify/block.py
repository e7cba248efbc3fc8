"""Block verification (Sun et al. 2403.10444, algorithm 2): decide on the drafts together, never worse than one by one.

With x_1 .. x_K drafted, pi_0 = 1 and pi_i = min(pi_{i-1} * target(x_i) / draft(x_i), 1), all conditioned on x_1 .. x_{i-1}:
the prefix of length i stands with probability pi_i. Reached through independent draws eta_i and
    h_i = R_i / (R_i + 1 - pi_i),  R_i = sum over x of max(pi_i * target(x) - draft(x), 0) after x_1 .. x_i,  h_K = pi_K:
num_accepted is the largest i with eta_i < h_i (0 if none), and the next token comes from max(pi_i * target - draft, 0) after
x_1 .. x_i, or from the target when all K stand. Row i of our tensors is the distribution after x_1 .. x_i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.model.logits import sample
from paceline.verify.rejection import drafted_probs, residual, sample_residual
from paceline.verify.rule import RowVerdict, Uniforms

if TYPE_CHECKING:
    from torch import Tensor


def prefix_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """pi_0 .. pi_K: the probability that at least i drafts stand, given the drafts; J numbers."""
    probs_J = [1.0]
    targets, drafts = drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV)
    for target, draft in zip(targets, drafts, strict=True):
        scaled = probs_J[-1] * target
        probs_J.append(1.0 if scaled >= draft > 0 else scaled / draft if draft > 0 else 0.0)
    return probs_J


def stop_prob(prefix_prob: float, residual_mass: float) -> float:
    """h_i, the probability that i drafts stand given that no longer prefix does, for i < K; `residual_mass` is R_i."""
    if prefix_prob == 1.0:
        return 1.0  # also where R_i is 0: then every longer prefix stands as surely and h_i is never asked for
    return residual_mass / (residual_mass + 1.0 - prefix_prob)


def verify(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms) -> RowVerdict:
    """`draft_probs_KV` [K, V] or None (one-hot), `target_probs_JV` [J, V].

    Looks for the largest standing prefix from the end, so that whole rows are read only down to it.
    """
    probs_J = prefix_probs(draft_tokens, draft_probs_KV, target_probs_JV)
    num_drafted = len(draft_tokens)
    if num_drafted == 0 or uniforms.accept(num_drafted - 1) < probs_J[num_drafted]:
        return RowVerdict(num_drafted, sample(target_probs_JV[num_drafted], uniforms.sample(num_drafted)))
    for num_accepted in range(num_drafted - 1, 0, -1):
        prefix_prob = probs_J[num_accepted]
        if prefix_prob == 0.0:
            continue
        weights_V = _residual_after(num_accepted, prefix_prob, draft_tokens, draft_probs_KV, target_probs_JV)
        if uniforms.accept(num_accepted - 1) < stop_prob(prefix_prob, float(weights_V.sum())):
            draw = uniforms.residual(num_accepted)
            return RowVerdict(num_accepted, sample_residual(weights_V, target_probs_JV[num_accepted], draw))
    weights_V = _residual_after(0, 1.0, draft_tokens, draft_probs_KV, target_probs_JV)
    return RowVerdict(0, sample_residual(weights_V, target_probs_JV[0], uniforms.residual(0)))


def _residual_after(
    num_accepted: int, prefix_prob: float, draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor
) -> Tensor:
    draft_V = None if draft_probs_KV is None else draft_probs_KV[num_accepted]
    return residual(target_probs_JV[num_accepted], draft_V, draft_tokens[num_accepted], prefix_prob)

"""Samples tokens on the device, as `race.py` does on the host, in tensor operations of fixed shape for CUDA graphs.

The noise is that of `rng.py`: hashes by 64-bit integers with wrap-around. Exponentials and sums of probabilities may
differ from Python's in their last bits (2.2e-16 relative); a token may then differ if two candidates are that close.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.sampling.logits import top_of
from paceline.model.sampling.race import FIELD, FILTERED
from paceline.rng import OTHERS, RACE

FAILED, WHOLE = -1, -2
"""Returned instead of a token. FAILED: the logits are invalid. WHOLE: the caller must call `race.race`."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Draws(NamedTuple):
    """Sampling parameters of the B rows of a batch, one tensor [B] for each parameter."""

    seed_B: Tensor
    top_k_B: Tensor
    """Number of most probable tokens to keep; 0 is off."""
    inverse_temperature_B: Tensor
    """1 / temperature, float64; 0 for greedy rows."""
    min_p_B: Tensor
    top_p_B: Tensor

    @property
    def is_greedy_B(self) -> Tensor:
        return self.inverse_temperature_B == 0


def signed(number: int) -> int:
    """Convert an unsigned 64-bit integer to the signed one with the same bits, as PyTorch has only signed ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(state: Tensor, count: int) -> Tensor:
    """Logical right shift of 64-bit integers."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def mixed(state: Tensor) -> Tensor:
    """Hash 64-bit integers by splitmix64, element by element, as `rng.py` does: int64 tensor -> int64 tensor."""
    state = state + signed(_GOLDEN)
    state = (state ^ _shifted(state, 30)) * signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * signed(_SECOND)
    return state ^ _shifted(state, 31)


def exponentials(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Return an exponentially distributed number (mean 1, float64) for each combination of seed, position and token id,
    equal to that of `rng.Noise.exponentials`. The arguments, int64, are broadcast to the shape of the result."""
    state = mixed(mixed(seed ^ (RACE << 56)) ^ position)
    return -torch.log1p(-(_shifted(mixed(state ^ (tokens << 32)), 11).double() + 0.5) * 2.0**-53)


def top_logprobs(logits_BJV: Tensor, inverse_temperature_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [B, J, count] of the most probable tokens at each position, best first.

    Log-probabilities are those of softmax(logits * inverse temperature); greedy rows, whose inverse temperature is 0,
    use softmax(logits). They are NaN where the largest logit is not finite.
    """
    scale_B = inverse_temperature_B.masked_fill(inverse_temperature_B == 0, 1.0).float()
    return top_of(logits_BJV.float() * scale_B[:, None, None], min(count, logits_BJV.shape[-1]))


def race(logits_BJV: Tensor, draws: Draws, position_BJ: Tensor) -> Tensor:
    """Sample a token at each of J positions of B rows by an exponential race, as `race.race` does on the host; returns
    token ids [B, J]. position_BJ: index in its text of each token to sample, which selects its random numbers.

    Three kinds of entries are not sampled tokens:
    - FAILED (-1): the logits are invalid.
    - WHOLE (-2): the most probable tokens, which are all that this function reads, do not decide the result. The caller
      must sample with `race.race`.
    - Entries of greedy requests are meaningless.
    """
    num_vocab = logits_BJV.shape[-1]
    _, top_k_B, _, min_p_B, top_p_B = draws
    ids_BJM, logprobs_BJM = top_logprobs(logits_BJV, draws.inverse_temperature_B, FILTERED)
    weights_BJM = logprobs_BJM.double().exp()
    place_M = torch.arange(ids_BJM.shape[-1], device=ids_BJM.device)
    is_filtered_B = (min_p_B > 0) | (top_k_B > 0) | (top_p_B < 1)
    most_B = torch.full_like(top_k_B, min(FIELD, num_vocab)).masked_fill(is_filtered_B, min(FILTERED, num_vocab))
    kept_BJ, is_whole_BJ, is_unknown_BJ = _kept(weights_BJM, draws, most_B, num_vocab)
    # Unless the kept tokens are the whole support, at most FIELD of them race individually, against all others as one.
    kept_BJ = torch.where(is_whole_BJ, kept_BJ, kept_BJ.clamp(max=FIELD))
    is_racing_BJM = (place_M < kept_BJ[..., None]) & (weights_BJM > 0)
    names_BJN = torch.cat([ids_BJM, torch.full_like(ids_BJM[..., :1], OTHERS)], -1)
    numbers_BJN = exponentials(draws.seed_B[:, None, None], position_BJ[..., None], names_BJN)
    times_BJM = (numbers_BJN[..., :-1] / weights_BJM).masked_fill(~is_racing_BJM, math.inf)
    time_BJ, winner_BJ = times_BJM.min(-1)
    tokens_BJ = ids_BJM.gather(-1, winner_BJ[..., None])[..., 0]
    rest_BJ = 1.0 - weights_BJM.masked_fill(place_M >= kept_BJ[..., None], 0.0).sum(-1)
    is_others_BJ = ~is_whole_BJ & (rest_BJ > 0) & (numbers_BJN[..., -1] / rest_BJ < time_BJ)
    tokens_BJ = tokens_BJ.masked_fill(is_unknown_BJ | is_others_BJ, WHOLE)
    return tokens_BJ.masked_fill(~logprobs_BJM[..., 0].isfinite(), FAILED)


def _kept(weights_BJM: Tensor, draws: Draws, most_B: Tensor, num_vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `race._kept`: (number of top tokens that race, whether no other token can win, whether only the whole
    distribution can decide)."""
    _, top_k_B, _, min_p_B, top_p_B = draws
    size = weights_BJM.shape[-1]
    place_M = torch.arange(size, device=weights_BJM.device)
    own_BJM = (place_M < most_B[:, None, None]) & torch.ones_like(weights_BJM, dtype=torch.bool)
    count_BJ, is_whole_BJ = own_BJM.sum(-1), (most_B == num_vocab)[:, None].expand(weights_BJM.shape[:2])
    is_unknown_BJ = torch.zeros_like(is_whole_BJ)
    # min-p
    has_BJ = (min_p_B > 0)[:, None].expand_as(is_whole_BJ)
    above_BJ = (own_BJM & (weights_BJM >= min_p_B[:, None, None] * weights_BJM[..., :1])).sum(-1)
    is_unknown_BJ = is_unknown_BJ | (has_BJ & (above_BJ == count_BJ) & ~is_whole_BJ)
    count_BJ, is_whole_BJ = torch.where(has_BJ, above_BJ, count_BJ), is_whole_BJ | has_BJ
    # top-k
    has_BJ = ((top_k_B > 0) & (top_k_B < num_vocab))[:, None].expand_as(is_whole_BJ)
    is_unknown_BJ = is_unknown_BJ | (has_BJ & (top_k_B[:, None] >= count_BJ) & ~is_whole_BJ)
    count_BJ = torch.where(has_BJ, torch.minimum(count_BJ, top_k_B[:, None]), count_BJ)
    is_whole_BJ = is_whole_BJ | has_BJ
    # top-p
    has_BJ = (top_p_B < 1)[:, None].expand_as(is_whole_BJ)
    mass_BJM = weights_BJM.masked_fill(place_M >= count_BJ[..., None], 0.0).cumsum(-1)
    wanted_BJ = top_p_B[:, None] * mass_BJM[..., -1].masked_fill(~is_whole_BJ, 1.0)
    reached_BJ = (mass_BJM < wanted_BJ[..., None]).sum(-1) + 1
    is_beyond_BJ = reached_BJ > count_BJ
    is_unknown_BJ = is_unknown_BJ | (has_BJ & is_beyond_BJ & ~is_whole_BJ)
    count_BJ = torch.where(has_BJ, torch.minimum(reached_BJ, count_BJ), count_BJ)
    is_whole_BJ = is_whole_BJ | has_BJ
    last_BJ1 = (count_BJ - 1).clamp(min=0)[..., None]
    after_BJ1 = count_BJ.clamp(max=size - 1)[..., None]
    is_cut_BJ = count_BJ < most_B[:, None]
    is_tied_BJ = is_cut_BJ & (weights_BJM.gather(-1, last_BJ1) == weights_BJM.gather(-1, after_BJ1))[..., 0]
    return count_BJ, is_whole_BJ, is_unknown_BJ | is_tied_BJ


def foreseen(logprobs: Tensor, times: Tensor, scale: float, spread: float) -> tuple[Tensor, Tensor]:
    """Predict which of M candidate tokens the target will sample, from a drafter's log-probabilities and the target's
    sampling noise (`draft/foresight.py`). The candidates are in the last dimension of the arguments.

    Returns two tensors without that dimension: the predicted candidate's index, and the log of the estimated
    probability that the target samples it; NaN where a log-probability is NaN.

    - times: the noise of each candidate, from `exponentials`.
    - scale: factor on the drafter's log-probabilities; below 1 if the drafter is more confident than the target.
    - spread: assumed size of the drafter's error in log-probabilities. A larger one lowers the returned probabilities;
      the predicted tokens do not depend on it.
    """
    scores = (scale * logprobs.double() - times.log()) / spread
    best, place = scores.max(-1)
    return place, best - scores.logsumexp(-1)


def foreseen_tokens(
    logits_BKV: Tensor, draws: Draws, position_BK: Tensor, scale: float, spread: float, draft_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Predict the tokens that the target will sample, from a drafter's logits: `foreseen` of the most probable tokens.

    Returns two tensors [B, K]: the predicted token ids, -1 (FAILED) where logits are not finite, and the log of the
    estimated probability that the target samples this token. `position_BK`: each token's index in its text.
    `draft_ids`: token id of each logits column; None: column i is token i.
    """
    ids_BKM, logprobs_BKM = top_logprobs(logits_BKV, draws.inverse_temperature_B, FIELD)
    tokens_BKM = ids_BKM if draft_ids is None else draft_ids[ids_BKM]
    times_BKM = exponentials(draws.seed_B[:, None, None], position_BK[..., None], tokens_BKM)
    place_BK, confidence_BK = foreseen(logprobs_BKM, times_BKM, scale, spread)
    tokens_BK = tokens_BKM.gather(-1, place_BK[..., None])[..., 0]
    return tokens_BK.masked_fill(~logprobs_BKM[..., 0].isfinite(), FAILED), confidence_BK

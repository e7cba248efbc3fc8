"""Samples the target's token at a position such that a drafter that knows the seed can predict it well.

Every token has its own exponential noise with mean 1 at every position (`rng.Noise`). The token with the smallest noise
/ probability wins, so that each token wins with its probability. This exponential race is equivalent to the Gumbel-max
trick (Maddison et al., 1411.0030, section 2). A slightly different distribution mostly has the same winner, so a
drafter's own race often predicts the target's token (`draft/foresight.py`).

Only the FIELD most probable tokens have noise of their own. All others share one entry in the race; if it wins, one
uniform number selects one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.sampling.logits import MIN_TEMPERATURE, sample, target_probs, top_logprobs
from paceline.rng import Noise
from paceline.types import SamplingParams

FIELD = 32
"""Number of most probable tokens with noise of their own; FILTERED if the request uses min-p, top-k or top-p."""
FILTERED = 128


def race(logits_V: Tensor, params: SamplingParams, noise: Noise) -> int:
    """Sample a token from logits [V] by an exponential race: each token's exponential random number is divided by the
    token's probability, and the smallest quotient wins. The probabilities are those of `target_probs`, except for
    rounding.

    `noise`: random numbers for this position of this text. The result depends only on logits, parameters and `noise`.
    Raises NumericsError if the largest logit is not finite or any is NaN.
    """
    is_filtered = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    inverse_temperature = 1.0 / max(params.temperature, MIN_TEMPERATURE)
    (ids_M,), (logprobs_M,) = top_logprobs(logits_V[None], FILTERED if is_filtered else FIELD, inverse_temperature)
    if not math.isfinite(logprobs_M[0]):
        raise NumericsError("this is no distribution: its largest logit is not a finite number, or one is NaN")
    weights_M = [math.exp(logprob) for logprob in logprobs_M]
    field = _kept(weights_M, params, len(logits_V))
    if field is None:
        return _of_all(target_probs(logits_V.unsqueeze(0), params)[0], noise)
    count, is_whole = field
    if is_whole:
        return _winner(ids_M[:count], weights_M[:count], noise)[1]
    return _with_rest(
        lambda: torch.softmax(logits_V.float() * inverse_temperature, dim=-1), ids_M[:FIELD], weights_M[:FIELD], noise
    )


def _kept(weights_M: list[float], params: SamplingParams, num_vocab: int) -> tuple[int, bool] | None:
    """(number of top tokens left by min-p, top-k and top-p, whether no other token is left). None if only the whole
    distribution can decide, as for a tie at the cut."""
    count, is_whole = len(weights_M), len(weights_M) == num_vocab
    if params.min_p > 0:
        above = sum(weight >= params.min_p * weights_M[0] for weight in weights_M)
        if above == count and not is_whole:
            return None
        count, is_whole = above, True
    if 0 < params.top_k < num_vocab:
        if params.top_k >= count and not is_whole:
            return None
        count, is_whole = min(count, params.top_k), True
    if params.top_p < 1:
        threshold = params.top_p * (math.fsum(weights_M[:count]) if is_whole else 1.0)
        masses = enumerate(accumulate(weights_M[:count]), 1)
        reached = next((place for place, mass in masses if mass >= threshold), None)
        if reached is None and not is_whole:
            return None
        count, is_whole = reached or count, True
    is_tied = count < len(weights_M) and weights_M[count - 1] == weights_M[count]
    return None if is_tied else (count, is_whole)


def _winner(ids_M: list[int], weights_M: list[float], noise: Noise) -> tuple[float, int]:
    """(smallest noise divided by weight, its token)."""
    times = noise.exponentials(ids_M)
    return min(
        (time / weight, token) for time, weight, token in zip(times, weights_M, ids_M, strict=True) if weight > 0
    )


def _with_rest(probs_of: Callable[[], Tensor], ids_M: list[int], weights_M: list[float], noise: Noise) -> int:
    """The winner among these tokens and all others as one; `probs_of` is called if one of the others wins."""
    time, token = _winner(ids_M, weights_M, noise)
    rest = 1.0 - math.fsum(weights_M)
    if rest <= 0 or noise.of_others / rest >= time:
        return token
    others_V = probs_of().clone()
    others_V[torch.tensor(ids_M, device=others_V.device)] = 0.0
    is_rounding_error = not float(others_V.sum()) > 0
    return token if is_rounding_error else sample(others_V, noise.uniform)


def _of_all(probs_V: Tensor, noise: Noise) -> int:
    """See `race`; for a filtered distribution that sums to 1."""
    values_M, ids_M = probs_V.topk(min(FIELD, len(probs_V)))
    return _with_rest(lambda: probs_V, ids_M.tolist(), values_M.tolist(), noise)

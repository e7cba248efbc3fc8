"""The target's own token at a position, drawn so that a drafter which knows the seed can guess it well.

Every token has a number of its own at every position, exponential with mean 1 (`rng.Noise`). The token whose number divided by
its probability is the least wins: the first of independent Poisson processes, so that each wins with its probability (the
Gumbel-max trick, Maddison et al., 1411.0030, section 2, says the same of log-probabilities). A slightly other distribution
mostly has the same winner, which inverting a distribution function with one number has not: there a change of any token shifts
all behind it. `draft/foresight.py` guesses with it.

Only the FIELD likeliest tokens have numbers of their own; all others race as one, and if they win, one number draws among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.sampling.logits import MIN_TEMPERATURE, likeliest, sample, target_probs
from paceline.rng import Noise
from paceline.types import SamplingParams

FIELD = 32
"""Tokens that race for themselves where filters do not leave fewer than FILTERED."""
FILTERED = 128


def race(logits_V: Tensor, params: SamplingParams, noise: Noise) -> int:
    """A token of `logits.target_probs`, by the numbers of its position; float logits [V].

    The distribution is exact but for rounding, and what wins is a function of logits, parameters and `noise` alone. Raises
    NumericsError when the largest logit is not a finite number, or one is NaN.
    """
    is_filtered = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    inverse_temperature = 1.0 / max(params.temperature, MIN_TEMPERATURE)
    (ids_M,), (logprobs_M,) = likeliest(logits_V[None], FILTERED if is_filtered else FIELD, inverse_temperature)
    if not math.isfinite(logprobs_M[0]):
        raise NumericsError("this is no distribution: its largest logit is not a finite number, or one is NaN")
    weights_M = [math.exp(logprob) for logprob in logprobs_M]
    kept = _kept(weights_M, params, len(logits_V))
    if kept is None:
        return _of_all(target_probs(logits_V.unsqueeze(0), params)[0], noise)
    count, is_whole = kept
    if is_whole:
        return _winner(ids_M[:count], weights_M[:count], noise)[1]
    return _with_rest(
        lambda: torch.softmax(logits_V.float() * inverse_temperature, dim=-1), ids_M[:FIELD], weights_M[:FIELD], noise
    )


def _kept(weights_M: list[float], params: SamplingParams, num_vocab: int) -> tuple[int, bool] | None:
    """How many of the likeliest tokens, best first, the request's filters leave (in their order: min-p, top-k, top-p), and
    whether these are all. None: only the whole distribution tells, as where two at the cut are equally likely."""
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
        wanted = params.top_p * (math.fsum(weights_M[:count]) if is_whole else 1.0)
        reached = next((place for place, mass in enumerate(accumulate(weights_M[:count]), 1) if mass >= wanted), None)
        if reached is None and not is_whole:
            return None
        count, is_whole = reached or count, True
    is_tied = count < len(weights_M) and weights_M[count - 1] == weights_M[count]
    return None if is_tied else (count, is_whole)


def _winner(ids_M: list[int], weights_M: list[float], noise: Noise) -> tuple[float, int]:
    """The least number over weight, and its token."""
    times = noise.exponentials(ids_M)
    return min((time / weight, token) for time, weight, token in zip(times, weights_M, ids_M, strict=True) if weight > 0)


def _with_rest(probs_of: Callable[[], Tensor], ids_M: list[int], weights_M: list[float], noise: Noise) -> int:
    """The winner among these tokens and all others together; `probs_of` is asked where one of the others wins."""
    time, token = _winner(ids_M, weights_M, noise)
    rest = 1.0 - math.fsum(weights_M)
    if rest <= 0 or noise.of_others / rest >= time:
        return token
    others_V = probs_of().clone()
    others_V[torch.tensor(ids_M, device=others_V.device)] = 0.0
    return sample(others_V, noise.uniform) if float(others_V.sum()) > 0 else token  # else the rest is a rounding


def _of_all(probs_V: Tensor, noise: Noise) -> int:
    """As `race`, of a filtered distribution that sums to 1."""
    values_M, ids_M = probs_V.topk(min(FIELD, len(probs_V)))
    return _with_rest(lambda: probs_V, ids_M.tolist(), values_M.tolist(), noise)

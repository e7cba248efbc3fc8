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

import torch
from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.logits import MIN_TEMPERATURE, likeliest, sample, target_probs
from paceline.rng import Noise
from paceline.types import SamplingParams

FIELD = 64
"""Tokens that race for themselves."""


def race(logits_V: Tensor, params: SamplingParams, noise: Noise) -> int:
    """A token of `logits.target_probs`, by the numbers of its position; float logits [V].

    The distribution is exact but for rounding, and what wins is a function of logits, parameters and `noise` alone. Raises
    NumericsError when the largest logit is not a finite number, or one is NaN.
    """
    ids, logs = likeliest(logits_V.unsqueeze(0), FIELD, 1.0 / max(params.temperature, MIN_TEMPERATURE))
    ids_M, weights_M = ids[0], [math.exp(each) for each in logs[0]]
    if not math.isfinite(weights_M[0]):
        raise NumericsError("this is no distribution: its largest logit is not a finite number")
    num_kept = _kept(weights_M, params, len(logits_V))
    if num_kept is None:
        return _of_all(target_probs(logits_V.unsqueeze(0), params)[0], noise)
    is_cut = num_kept < len(weights_M) or len(weights_M) == len(logits_V) or _has_filters(params)
    rest = 0.0 if is_cut else max(0.0, 1.0 - math.fsum(weights_M))
    winner = _winner(ids_M[:num_kept], weights_M[:num_kept], rest, noise)
    if winner is not None:
        return winner
    return _of_rest(target_probs(logits_V.unsqueeze(0), params)[0], ids_M, noise)


def _has_filters(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _kept(weights_M: list[float], params: SamplingParams, num_vocab: int) -> int | None:
    """How many of the likeliest tokens, best first, the request's filters leave, in their order: min-p, top-k, top-p. None:
    more than these, which only the whole distribution tells."""
    count, is_whole = len(weights_M), len(weights_M) == num_vocab
    if params.min_p > 0:
        kept = sum(weight >= params.min_p * weights_M[0] for weight in weights_M)
        if kept == count and not is_whole:
            return None
        count, is_whole = kept, True
    if 0 < params.top_k < num_vocab:
        if params.top_k > count and not is_whole:
            return None
        count, is_whole = min(count, params.top_k), True
    if params.top_p < 1:
        whole, mass = math.fsum(weights_M[:count]) if is_whole else 1.0, 0.0
        for place in range(count):
            mass += weights_M[place]
            if mass >= params.top_p * whole:
                return place + 1
        return count if is_whole else None
    return count


def _winner(ids_M: list[int], weights_M: list[float], rest: float, noise: Noise) -> int | None:
    """The token with the least number over weight; None when all the others together, of weight `rest`, have one below it."""
    times = noise.exponentials(ids_M)
    best = min((time / weight, token) for time, weight, token in zip(times, weights_M, ids_M, strict=True) if weight > 0)
    return None if rest > 0 and noise.of_others / rest < best[0] else best[1]


def _of_all(probs_V: Tensor, noise: Noise) -> int:
    """As `race`, of a filtered distribution of more than FIELD tokens."""
    values_M, ids_M = probs_V.topk(min(FIELD, len(probs_V)))
    rest = max(0.0, float(probs_V.sum(dtype=torch.float64) - values_M.sum(dtype=torch.float64)))
    winner = _winner(ids_M.tolist(), values_M.tolist(), rest, noise)
    return _of_rest(probs_V, ids_M.tolist(), noise) if winner is None else winner


def _of_rest(probs_V: Tensor, ids_M: list[int], noise: Noise) -> int:
    """One of the tokens that do not race for themselves."""
    others_V = probs_V.clone()
    others_V[torch.tensor(ids_M, device=probs_V.device)] = 0.0
    return sample(others_V, noise.uniform)

"""Converts a model's logits to the distribution that a request specifies; shared by drafters and the engine.

The order is vLLM's: logit bias, penalties (`penalise`), then temperature, min-p, top-k, top-p (`target_probs`). Each
filter uses the result of the previous one. (Hugging Face applies top-k and top-p before min-p.)

Penalties depend on the preceding tokens, so row j of the J = K+1 checked positions assumes that draft[:j] is already in
the answer: speculation stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import NumericsError
from paceline.model.native import library as native_lib
from paceline.types import SamplingParams, TokenLogprob

_TOP_P_SIZES = (64, 1024, 8192)
"""Numbers of most probable tokens that are tried for top-p before the whole vocabulary is sorted."""
MIN_TEMPERATURE = 1e-10
"""Lower temperatures are raised to this one, as they would overflow float32."""


def penalise(
    logits_JV: Tensor,
    params: SamplingParams,
    context: Iterable[int],
    counts: Mapping[int, int],
    draft_tokens: list[int],
) -> Tensor:
    """Apply a request's logit bias and penalties to logits [J, V] of J = len(draft_tokens) + 1 positions; returns [J,
    V]. Position j assumes that draft_tokens[:j] were accepted.

    `context`: tokens of prompt and answer; `counts`: how often each token occurs in the answer. The steps, in order:
    1. The logit bias is added.
    2. For each token in `context` or draft_tokens[:j], a positive logit is divided by the repetition penalty, and any
       other logit is multiplied by it (CTRL, 1909.05858, section 4.1, with the sign rule of Transformers and vLLM).
    3. For each token that occurs n > 0 times in the answer and draft_tokens[:j], n times the frequency penalty and once
       the presence penalty are subtracted (OpenAI).

    Returns a float32 copy, or `logits_JV` itself if the request has no bias and no penalty.
    """
    if not params.logit_bias and not params.has_penalties:
        return logits_JV
    logits_JV = logits_JV.to(torch.float32, copy=True)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_JV.device)
        logits_JV[:, ids] += torch.tensor(list(params.logit_bias.values()), device=logits_JV.device)
    if params.has_penalties:
        _subtract_penalties(logits_JV, params, context, counts, draft_tokens)
    return logits_JV


def _subtract_penalties(
    logits_JV: Tensor,
    params: SamplingParams,
    context: Iterable[int],
    counts: Mapping[int, int],
    draft_tokens: list[int],
) -> None:
    # Only the N affected columns, each by one formula: rows of the checked block have the same bits as in plain
    # decoding.
    num_rows, device = len(draft_tokens) + 1, logits_JV.device
    seen = set(context) if params.repetition_penalty != 1.0 else set[int]()
    ids = [*seen, *(set(draft_tokens).union(counts) - seen)]
    if not ids:
        return
    column = {token: index for index, token in enumerate(ids)}
    seen_JN = (torch.arange(len(ids)) < len(seen)).repeat(num_rows, 1)
    count_JN = torch.zeros(num_rows, len(ids))
    count_JN[:, [column[token] for token in counts]] = torch.tensor(list(counts.values()), dtype=torch.float32)
    for j, token in enumerate(draft_tokens, start=1):
        seen_JN[j:, column[token]] = True
        count_JN[j:, column[token]] += 1
    ids_N = torch.tensor(ids, device=device)
    part_JN = logits_JV.index_select(-1, ids_N)
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        part_JN = torch.where(seen_JN.to(device), torch.where(part_JN > 0, part_JN / factor, part_JN * factor), part_JN)
    penalty_JN = params.frequency_penalty * count_JN + params.presence_penalty * (count_JN > 0)
    logits_JV.index_copy_(-1, ids_N, part_JN.sub_(penalty_JN.to(device)))


def target_probs(logits_JV: Tensor, params: SamplingParams) -> Tensor:
    """Compute the probabilities from which a request samples, after temperature, min-p, top-k and top-p: logits [J, V]
    -> float32 [J, V].

    Temperature must be above 0. top_p keeps the fewest most probable tokens that have at least this total probability
    (Holtzman et al. 1904.09751, section 3.1). Of equally probable tokens, those with the lowest ids are kept.
    """
    assert params.temperature > 0, "greedy requests take the argmax of their logits"
    if params.temperature != 1.0:
        logits_JV = logits_JV.to(torch.float32, copy=True).div_(max(params.temperature, MIN_TEMPERATURE))
    probs_JV = torch.softmax(logits_JV, dim=-1, dtype=torch.float32)
    num_vocab = probs_JV.shape[-1]
    if params.min_p > 0:
        probs_JV.masked_fill_(probs_JV < params.min_p * probs_JV.amax(-1, keepdim=True), 0.0)
        probs_JV.div_(probs_JV.sum(-1, keepdim=True, dtype=torch.float64))
    if 0 < params.top_k < num_vocab:
        _keep_top(probs_JV, params.top_k, params.top_p, (params.top_k + 1,))  # one more, to detect a tie
    elif params.top_p < 1:
        sizes = [size for size in _TOP_P_SIZES if size < num_vocab]
        _keep_top(probs_JV, 0, params.top_p, (*sizes, num_vocab))
    return probs_JV


def _keep_top(probs_JV: Tensor, top_k: int, top_p: float, sizes: tuple[int, ...]) -> None:
    """Keep the top_k (0: all), then the fewest of these that reach top_p; modifies `probs_JV`, whose rows must sum to
    1. Rows for which sizes[i] is too small try the next size.

    The kept tokens are a prefix of the row in descending order, summed in float64 from left to right, so that the size
    does not affect the bits.
    """
    num_vocab = probs_JV.shape[-1]
    rows_R = torch.arange(len(probs_JV), device=probs_JV.device)
    for size in sizes:
        probs_RV = probs_JV if len(rows_R) == len(probs_JV) else probs_JV[rows_R]
        values_RM, ids_RM = probs_RV.topk(size) if size < num_vocab else probs_RV.sort(dim=-1, descending=True)
        mass_RM = values_RM.cumsum(-1, dtype=torch.float64)
        num_kept_R = _num_kept(mass_RM, top_k, top_p)
        _keep_lowest_of_ties(probs_RV, values_RM, ids_RM, num_kept_R)
        last_R1 = (num_kept_R.clamp(max=size) - 1).unsqueeze(-1)
        values_RM = (values_RM / mass_RM.gather(-1, last_R1)).float()
        values_RM.masked_fill_(torch.arange(size, device=probs_JV.device) > last_R1, 0.0)
        is_final_R = (num_kept_R < size) | (size == num_vocab)
        done_S = rows_R[is_final_R]
        probs_JV[done_S] = 0.0
        # Added, not set: an id may occur again after the cut, with weight 0.
        probs_JV.index_put_((done_S.unsqueeze(-1), ids_RM[is_final_R]), values_RM[is_final_R], accumulate=True)
        rows_R = rows_R[~is_final_R]
        if not len(rows_R):
            return


def _num_kept(mass_RM: Tensor, top_k: int, top_p: float) -> Tensor:
    """Length of the kept prefix of each sorted row; the size M or more if the row needs a larger size."""
    if not top_k:
        return (mass_RM < top_p).sum(-1) + 1
    mass_RK = mass_RM[:, :top_k]
    if top_p == 1:
        return torch.full((len(mass_RK),), top_k, device=mass_RM.device)
    return (mass_RK < top_p * mass_RK[:, -1:]).sum(-1) + 1


def _keep_lowest_of_ties(probs_RV: Tensor, values_RM: Tensor, ids_RM: Tensor, num_kept_R: Tensor) -> None:
    """If equally probable tokens are on both sides of the cut, move the lowest ids before it; modifies `ids_RM`."""
    size = values_RM.shape[-1]
    after_R1 = num_kept_R.clamp(max=size - 1).unsqueeze(-1)
    last_R1 = (after_R1 - 1).clamp_(min=0)
    tied_R = (values_RM.gather(-1, last_R1) == values_RM.gather(-1, after_R1)).squeeze(-1) & (num_kept_R < size)
    for row in tied_R.nonzero().flatten().tolist():
        num_kept = int(num_kept_R[row])
        cut = values_RM[row, num_kept - 1]
        num_above = int((values_RM[row] > cut).sum())
        ids_RM[row, num_above:num_kept] = (probs_RV[row] == cut).nonzero().flatten()[: num_kept - num_above]


def top_logprobs(
    logits_KV: Tensor, count: int, inverse_temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """Return ids and log-probabilities of the `count` most probable tokens of each row, in softmax(logits *
    inverse_temperature), best first. The order of equally probable tokens is undefined; the native library, which
    computes float32 logits on CPU, puts the lowest ids first. Log-probabilities are NaN for a row that contains NaN or
    whose largest logit is not finite."""
    count = min(count, logits_KV.shape[-1])
    if logits_KV.device.type == "cpu" and logits_KV.dtype == torch.float32 and native_lib.load() is not None:
        return native_lib.top_logprobs(logits_KV.contiguous(), count, inverse_temperature)
    ids_KM, logprobs_KM = top_of(logits_KV.float() * inverse_temperature, count)
    return ids_KM.tolist(), logprobs_KM.tolist()


def top_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [..., count] of the most probable tokens in softmax(logits), best first.
    Log-probabilities are NaN where the largest logit is not finite."""
    values, ids = logits.topk(count, dim=-1)
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    return ids, logprobs.masked_fill(~values[..., :1].isfinite(), math.nan)


def sample(weights_V: Tensor, draw: float) -> int:
    """Sample by inverse transform: return the first token at which the running sum of `weights_V` exceeds `draw` times
    the sum of all weights. `draw`: a uniform random number in [0, 1).

    Weights are non-negative; tokens of weight 0 are never returned, despite rounding. Raises NumericsError if their sum
    is not positive and finite.
    """
    num_blocks = -(-len(weights_V) // _BLOCK)
    padded_NB = F.pad(weights_V, (0, num_blocks * _BLOCK - len(weights_V))).view(num_blocks, _BLOCK)
    mass_N = padded_NB.sum(1, dtype=torch.float64).cumsum(0)  # a running sum over all elements takes fifty times longer
    whole = float(mass_N[-1])
    if not 0 < whole < math.inf:
        raise NumericsError(_NOT_FINITE)
    block = _passes(mass_N, draw * whole)
    before = float(mass_N[block - 1]) if block else 0.0
    return block * _BLOCK + _passes(padded_NB[block].cumsum(0, dtype=torch.float64), draw * whole - before)


_BLOCK = 256
_NOT_FINITE = "this is no distribution: its numbers are not finite, or all of them are zero"


def _passes(mass_N: Tensor, threshold: float) -> int:
    """Index where a running sum first exceeds `threshold`, or first reaches its maximum if rounding prevents that."""
    index = int(torch.searchsorted(mass_N, threshold, right=True))
    return index if index < len(mass_N) else int(torch.searchsorted(mass_N, mass_N[-1]))


def logprobs_of(logits_V: Tensor, token: int, num_top: int, temperature: float = 1.0) -> TokenLogprob:
    """Return the log-probabilities of `token` and of the `num_top` most probable tokens, best first, in softmax(logits
    [V] / `temperature`)."""
    return logprobs_of_rows(logits_V[None], [token], num_top, temperature)[0]


def logprobs_of_rows(
    logits_TV: Tensor, tokens: list[int], num_top: int, temperature: float = 1.0
) -> list[TokenLogprob]:
    """Return `logprobs_of` for each row of logits [T, V] and its token in `tokens`."""
    logits_TV = logits_TV.float()
    if temperature != 1.0:
        logits_TV = logits_TV / max(temperature, MIN_TEMPERATURE)
    log_sums = torch.logsumexp(logits_TV, -1).tolist()
    tokens_T = torch.tensor(tokens, dtype=torch.long, device=logits_TV.device)
    own = logits_TV.gather(-1, tokens_T[:, None])[:, 0].tolist()
    values_TN, ids_TN = (each.tolist() for each in logits_TV.topk(min(num_top, logits_TV.shape[-1]), -1))
    return [
        TokenLogprob(
            token, value - log_sum, tuple((other, score - log_sum) for other, score in zip(ids, scores, strict=True))
        )
        for token, value, log_sum, scores, ids in zip(tokens, own, log_sums, values_TN, ids_TN, strict=True)
    ]

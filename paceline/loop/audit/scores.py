"""Computes the probability of each token of a server's answers: the local model reads them (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.loop.audit.evidence import RARE, SLOPES, Scores
from paceline.model.sampling.logits import target_probs
from paceline.model.teacher_forcing import ForcedReader
from paceline.types import SamplingParams

ARRAYS = tuple(field.name for field in fields(Scores) if field.name != "binary")
LOGITS = 2**19
"""Maximum number of logits scored at a time: whole answers would take hundreds of megabytes with a large vocabulary."""
LAST_PART = 0.7
"""Share of top-p at which the last part of the nucleus ("cut") begins. The nucleus: the most probable tokens with total
probability top-p."""


def logits_of(reader: ForcedReader, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Returns the logits [T, V] that predict the T tokens of an answer to a prompt."""
    chunks = reader.logits([*prompt_ids, *tokens], len(prompt_ids))
    return torch.cat([logits_TV.float().clone() for _, logits_TV in chunks])


@torch.inference_mode()
def scores_of(
    logits_TV: Tensor, tokens: Sequence[int], temperature: float, top_p: float = 1.0, tie: float = 0.0
) -> Scores:
    """Computes the `Scores` of one answer of T tokens. `logits_TV`: the local model's logits that predict these tokens.
    `temperature`, `top_p`: the answer's sampling settings.

    `tie`: another token counts as more probable than the answer's only if its logit is larger by more than this. At
    temperature 0 only `gap_T` and `logprob_T` are meaningful."""
    rows = max(1, LOGITS // logits_TV.shape[1])
    parts = [
        _scores_of(logits_TV[start : start + rows], tokens[start : start + rows], temperature, top_p, tie)
        for start in range(0, max(1, len(tokens)), rows)
    ]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    binary: dict[str, Any] = {
        name: tuple(np.concatenate([part.binary[name][side] for part in parts]) for side in (0, 1))
        for name in parts[0].binary
    }
    return Scores(**arrays, binary=binary)


def _scores_of(logits_TV: Tensor, tokens: Sequence[int], temperature: float, top_p: float, tie: float) -> Scores:
    ids_T1 = torch.tensor(list(tokens), device=logits_TV.device).unsqueeze(-1)
    logits_TV = logits_TV.float()
    own_T1 = logits_TV.gather(-1, ids_T1)
    gap_T = (logits_TV.amax(-1, keepdim=True) - own_T1).squeeze(-1)
    logprob_T = (own_T1 - logits_TV.logsumexp(-1, keepdim=True)).squeeze(-1)
    heat = temperature or 1.0
    logp_TV = torch.log_softmax(logits_TV / heat, -1)
    probs_TV = logp_TV.exp()
    is_before_TV = logits_TV > own_T1 + tie
    before_T = (probs_TV * is_before_TV).sum(-1)
    binary: dict[str, Tensor] = {}
    if top_p < 1:
        kept_TV = target_probs(logits_TV, SamplingParams(temperature=heat, top_p=top_p))
        binary["cut"] = (kept_TV > 0) & (_mass_before(probs_TV) >= LAST_PART * top_p)
        probs_TV, logp_TV = kept_TV, kept_TV.log()
    binary["likeliest"] = torch.zeros_like(is_before_TV).scatter_(-1, logits_TV.argmax(-1, keepdim=True), True)
    binary["rare"] = (probs_TV < RARE) & (probs_TV > 0)
    safe_TV = logp_TV.masked_fill(probs_TV <= 0, 0.0)
    entropy_T1 = -(probs_TV * safe_TV).sum(-1, keepdim=True)
    variance_T = (probs_TV * (safe_TV + entropy_T1).square()).sum(-1)
    cgf_TL = torch.stack(
        [((1 - slope) * safe_TV).masked_fill_(probs_TV <= 0, -torch.inf).logsumexp(-1) for slope in SLOPES], -1
    )
    return Scores(
        nll_T=_numpy(-logp_TV.gather(-1, ids_T1).squeeze(-1)),
        entropy_T=_numpy(entropy_T1.squeeze(-1)),
        variance_T=_numpy(variance_T),
        cgf_TL=_numpy(cgf_TL),
        binary={
            name: (_numpy(is_so_TV.gather(-1, ids_T1).squeeze(-1)), _numpy((probs_TV * is_so_TV).sum(-1)))
            for name, is_so_TV in binary.items()
        },
        before_T=_numpy(before_T),
        gap_T=_numpy(gap_T),
        logprob_T=_numpy(logprob_T),
    )


def _mass_before(probs_TV: Tensor) -> Tensor:
    """Returns, for each token, the total probability of the tokens before it in descending order. Shape [T, V]."""
    values_TV, order_TV = probs_TV.sort(dim=-1, descending=True)
    return torch.zeros_like(probs_TV).scatter_(-1, order_TV, values_TV.cumsum(-1) - values_TV)


def _numpy(values: Tensor) -> np.ndarray:
    return values.to("cpu", torch.float64).numpy()

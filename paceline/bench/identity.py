"""Are two answers the same tokens, and if not, how close was the call: the gap between the logits where they part.

In float32 greedy answers must agree. In bfloat16 a pass over more tokens multiplies matrices of another shape and rounds
differently, so near-ties may flip: each one is reported with its gap, computed by one more pass over the common prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.bench.passes import Pass, Request
from paceline.figures import first_difference
from paceline.model.target import ForwardBatch, Target


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the baseline's, and how nearly the target was undecided there."""

    request: str
    index: int
    """Tokens of the answer that are still the same."""
    top2_gap: float
    """Best logit minus second-best after the common prefix; 0 is a tie."""
    chosen_gap: float | None
    """Logit of the baseline's token minus that of the other; None when one answer simply ended."""


def share_identical(ours: Pass, baseline: Pass) -> float:
    """Share of answers whose tokens equal the baseline's."""
    pairs = list(zip(ours.answers, baseline.answers, strict=True))
    return sum(one.token_ids == other.token_ids for one, other in pairs) / len(pairs)


def differences(target: Target, requests: list[Request], ours: Pass, baseline: Pass) -> list[Difference]:
    """Every answer that differs from the baseline's; the engine must be idle, for a cache row is borrowed."""
    found = []
    for request, one, other in zip(requests, ours.answers, baseline.answers, strict=True):
        index = first_difference(one.token_ids, other.token_ids)
        if index is None:
            continue
        logits_V = logits_after(target, request.token_ids + other.token_ids[:index])
        top = logits_V.topk(2).values.tolist()
        gap = None
        if index < min(len(one.token_ids), len(other.token_ids)):
            gap = float(logits_V[other.token_ids[index]] - logits_V[one.token_ids[index]])
        found.append(Difference(request.name, index, top[0] - top[1], gap))
    return found


@torch.inference_mode()
def logits_after(target: Target, token_ids: list[int], chunk: int = 256) -> torch.Tensor:
    """The target's logits [V] in float32 after `token_ids`, on a row taken and given back."""
    row = target.cache.allocate()
    assert row is not None, "the engine still holds every row"
    try:
        out = None
        for begin in range(0, len(token_ids), chunk):
            part = token_ids[begin : begin + chunk]
            is_last = begin + chunk >= len(token_ids)
            out = target.forward(ForwardBatch([row], [begin], [len(part)], part, "last" if is_last else "none"))
        assert out is not None and out.logits_TV is not None
        return out.logits_TV[-1].float().clone()
    finally:
        target.cache.free(row)

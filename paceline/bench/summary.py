"""From the passes of one setting to its figures: rates, ratios, stages, and whether answers are the same tokens.

In float32 greedy answers must agree. In bfloat16 a pass over more tokens multiplies matrices of another shape and rounds
differently, so near-ties may flip: each one is reported with its gap, computed by one more pass over the common prefix.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from paceline.bench.passes import Pass, Request
from paceline.figures import Interval, bootstrap, first_difference
from paceline.model.target import ForwardBatch, Target


def speedup_over(ours: list[Pass], theirs: list[Pass]) -> tuple[float, Interval]:
    """Ratio of tokens per second: the median over repetitions that ran side by side, with a bootstrap interval over prompts.

    With more than one request in flight an answer's time passes while others run. All slots but the last few are full all the
    time, so tokens over the sum of those times is throughput divided by the batch size, which cancels out of the ratio. What
    the last slots waste is in the value only: the interval is scaled to stand around it.
    """
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(ours, theirs, strict=True) if other.tokens_per_s]
    value = statistics.median(ratios) if ratios else 0.0
    items = _tokens_and_seconds(ours, theirs)
    (low, high), over_answers = bootstrap(items, _rate_ratio), _rate_ratio(items)
    if low is None or high is None or not over_answers:
        return value, (None, None)
    scale = value / over_answers
    return value, (low * scale, high * scale)


def _tokens_and_seconds(ours: list[Pass], theirs: list[Pass]) -> list[tuple[float, ...]]:
    """For each request: tokens and seconds of ours, then of theirs."""
    return [
        (float(len(one.token_ids)), one_s, float(len(other.token_ids)), other_s)
        for one, one_s, other, other_s in zip(ours[0].answers, _seconds(ours), theirs[0].answers, _seconds(theirs), strict=True)
    ]


def _rate_ratio(items: list[tuple[float, ...]]) -> float:
    tokens, seconds, other_tokens, other_seconds = (sum(column) for column in zip(*items, strict=True))
    return (tokens / seconds) / (other_tokens / other_seconds) if seconds and other_seconds and other_tokens else 0.0


def _seconds(passes: list[Pass]) -> list[float]:
    """Each answer's median time over the repetitions."""
    return [statistics.median(times) for times in zip(*([a.seconds for a in each.answers] for each in passes), strict=True)]


def stages(passes: list[Pass]) -> dict[str, float | None]:
    """Median seconds of each stage."""
    return {name: median_of([each.seconds[name] for each in passes]) for name in passes[0].seconds}


def median_of(values: list[float | None]) -> float | None:
    """The median of the values that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def bytes_per_s(passes: list[Pass], weight_bytes: int) -> float | None:
    """Weights read per second of verifying, over all repetitions."""
    verify_s = sum(each.verify_s for each in passes)
    return weight_bytes * sum(each.num_passes for each in passes) / verify_s if verify_s else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the baseline's, and how nearly the target was undecided there."""

    request: str
    index: int
    """Tokens of the answer that are still the same."""
    top2_gap: float
    """Best logit minus second-best after the common prefix; 0 is a tie."""


def differences(target: Target, requests: list[Request], ours: Pass, baseline: Pass) -> list[Difference]:
    """Every answer that differs from the baseline's; the engine must be idle, for a cache row is borrowed."""
    found = []
    for request, one, other in zip(requests, ours.answers, baseline.answers, strict=True):
        index = first_difference(one.token_ids, other.token_ids)
        if index is None:
            continue
        logits_V = logits_after(target, request.token_ids + other.token_ids[:index])
        best, second = logits_V.topk(2).values.tolist()
        found.append(Difference(request.name, index, best - second))
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

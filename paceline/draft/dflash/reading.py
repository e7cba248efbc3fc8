"""What one pass of a DFlash drafter says: from the head's logits to certain drafts, drawn ones, and candidates for trees."""

from __future__ import annotations

import math
from itertools import takewhile

import torch
from torch import Tensor

from paceline import rng
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.foresight import Foresight, ranked
from paceline.model.sampling.logits import MIN_TEMPERATURE, likeliest, sample, target_probs
from paceline.model.sampling.race import FIELD
from paceline.plan.trees import Candidates
from paceline.types import Sequence


def scale_logits(logits: Tensor, config: DFlashConfig) -> Tensor:
    """The target head's output with the drafter's own multiplier and soft cap."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.final_logit_softcapping:
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


class Reading:
    """Drafts of some rows, each slot by itself. A slot whose logits are not finite numbers ends its row's drafts."""

    def __init__(
        self,
        best_BK: list[list[int]],
        logits_BKV: Tensor | None,
        config: DFlashConfig,
        draft_ids: Tensor | None,
        vocab_size: int,
        sure_BK: list[list[float]] | None = None,
    ) -> None:
        """best_BK: the most likely of each slot, -1 where logits are not finite. logits_BKV: the head's output, over
        the draft vocabulary if there is one; None when only certain drafts are read, and not how sure they are.
        sure_BK: the most likely token's log-probability, where the pass has computed it."""
        self._best_BK = best_BK
        self._logits_BKV = None if logits_BKV is None else scale_logits(logits_BKV, config)
        self._draft_ids, self._ids = draft_ids, None if draft_ids is None else draft_ids.tolist()
        self._vocab_size = vocab_size
        self._sure_BK = sure_BK

    def certain(self, slot: int, limit: int, says_sure: bool) -> tuple[list[int], list[float] | None]:
        """The most likely token of each of a row's first `limit` slots, and their log-probabilities."""
        best_K = list(takewhile(lambda token: token >= 0, self._best_BK[slot][:limit]))
        if says_sure and self._sure_BK is None and self._logits_BKV is not None:
            self._sure_BK = sureness(self._logits_BKV).tolist()
        sure = self._sure_BK[slot][: len(best_K)] if says_sure and self._sure_BK else None
        return best_K if self._ids is None else [self._ids[best] for best in best_K], sure

    def drawn(self, slot: int, limit: int, seq: Sequence) -> tuple[list[int], Tensor | None, list[float]]:
        """Drafts drawn from the request's own distribution, that distribution [K, V], and how sure each slot is beforehand."""
        assert self._logits_BKV is not None
        probs_KV = target_probs(self._over_all_tokens(self._logits_BKV[slot, :limit]), seq.params)
        sure = probs_KV.amax(-1).log_().tolist()
        probs_KV = probs_KV[: num_finite(sure)]
        draws = [rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place) for place in range(len(probs_KV))]
        tokens = [sample(probs_V, draw) for probs_V, draw in zip(probs_KV, draws, strict=True)]
        return tokens, probs_KV if tokens else None, sure

    def candidates(
        self, slot: int, limit: int, seq: Sequence, count: int, most: int, foresight: Foresight | None = None
    ) -> Candidates:
        """The `count` likeliest tokens of each slot at the request's temperature, for a tree of at most `most` nodes; with
        `foresight` those that the target will most likely draw."""
        assert self._logits_BKV is not None
        looked_at = max(count, FIELD) if foresight else count
        ids_KM, logprobs_KM = likeliest(self._logits_BKV[slot, :limit], looked_at, inverse_temperature(seq))
        num = min(num_finite([logprobs[0] for logprobs in logprobs_KM]), len(ids_KM))
        tokens_KM = ids_KM if self._ids is None else [[self._ids[each] for each in ids] for ids in ids_KM]
        if foresight:
            told = list[tuple[list[int], list[float]]]()
            for place, (tokens, logprobs) in enumerate(zip(tokens_KM[:num], logprobs_KM[:num], strict=True)):
                times = rng.Noise(seq.seed, len(seq.tokens) + place).exponentials(tokens)
                told.append(ranked(tokens, foresight.chances(logprobs, times), count))
            return Candidates([tokens for tokens, _ in told], [logprobs for _, logprobs in told], most)
        return Candidates(tokens_KM[:num], logprobs_KM[:num], most)

    def _over_all_tokens(self, logits_KV: Tensor) -> Tensor:
        if self._draft_ids is None:
            return logits_KV
        every_KV = logits_KV.new_full((len(logits_KV), self._vocab_size), float("-inf"))
        return every_KV.index_copy_(1, self._draft_ids.to(logits_KV.device), logits_KV)


def inverse_temperature(seq: Sequence) -> float:
    """What a request's logits are multiplied by; 1 of a greedy one."""
    return 1.0 if seq.params.is_greedy else 1.0 / max(seq.params.temperature, MIN_TEMPERATURE)


def sureness(logits_BKV: Tensor) -> Tensor:
    """Log-probability [B, K] of each slot's most likely token; NaN or infinite where the logits are."""
    logits_BKV = logits_BKV.float()
    return logits_BKV.amax(-1) - logits_BKV.logsumexp(-1)


def num_finite(values: list[float]) -> int:
    """How many come before the first that is no finite number."""
    return next((count for count, value in enumerate(values) if not math.isfinite(value)), len(values))

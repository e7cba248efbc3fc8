"""Turns the logits of one DFlash pass into greedy drafts, sampled drafts or candidates for trees."""

from __future__ import annotations

import math
from itertools import takewhile

from torch import Tensor

from paceline import rng
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.foresight import Foresight, ranked
from paceline.model.sampling.logits import MIN_TEMPERATURE, sample, target_probs, top_logprobs
from paceline.model.sampling.race import FIELD
from paceline.model.target import EndScales
from paceline.plan.trees import Candidates
from paceline.types import Sequence


def scale_logits(logits: Tensor, config: DFlashConfig) -> Tensor:
    """Returns the LM head's logits multiplied by the config's output multiplier, then limited by its soft cap."""
    return EndScales(logits=config.output_multiplier, cap=config.final_logit_softcapping).of_logits(logits)


class Reading:
    """The logits of one drafting pass, from which the drafts of its rows are chosen: greedy ones, sampled ones, or
    candidates for a draft tree. Each block position is drafted independently of the others. A row's drafts end before
    the first position with non-finite logits."""

    def __init__(
        self,
        best_BK: list[list[int]],
        logits_BKV: Tensor | None,
        config: DFlashConfig,
        draft_ids: Tensor | None,
        vocab_size: int,
        sure_BK: list[list[float]] | None = None,
    ) -> None:
        """`best_BK`: most probable row of the LM head at each position, -1 for non-finite logits. `logits_BKV`: the
        head's logits; None if only greedy drafts without confidence are needed. `sure_BK`: log-probability of the most
        probable token, if the pass computed it."""
        self._best_BK = best_BK
        self._logits_BKV = None if logits_BKV is None else scale_logits(logits_BKV, config)
        self._draft_ids, self._ids = draft_ids, None if draft_ids is None else draft_ids.tolist()
        self._vocab_size = vocab_size
        self._sure_BK = sure_BK

    def certain(self, row: int, limit: int, with_confidence: bool) -> tuple[list[int], list[float] | None]:
        """Returns (greedy drafts at a row's first `limit` positions, their log-probabilities). Without
        `with_confidence` the second is None."""
        best_K = list(takewhile(lambda token: token >= 0, self._best_BK[row][:limit]))
        if with_confidence and self._sure_BK is None and self._logits_BKV is not None:
            self._sure_BK = top_logprob(self._logits_BKV).tolist()
        sure = self._sure_BK[row][: len(best_K)] if with_confidence and self._sure_BK else None
        return best_K if self._ids is None else [self._ids[best] for best in best_K], sure

    def drawn(self, row: int, limit: int, seq: Sequence) -> tuple[list[int], Tensor | None, list[float]]:
        """Samples drafts at a row's first `limit` positions, with the request's sampling parameters.

        Returns (K drafts, the distributions [K, V] that they were sampled from, confidences). Without drafts the second
        is None. A confidence is the log-probability of a position's most probable token, which need not be the draft.
        """
        assert self._logits_BKV is not None
        logits_KV = self._logits_BKV[row, :limit]
        if self._draft_ids is not None:
            logits_KV = over_vocabulary(logits_KV, self._draft_ids, self._vocab_size)
        probs_KV = target_probs(logits_KV, seq.params)
        sure = probs_KV.amax(-1).log_().tolist()
        probs_KV = probs_KV[: num_finite(sure)]
        draws = [rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place) for place in range(len(probs_KV))]
        tokens = [sample(probs_V, draw) for probs_V, draw in zip(probs_KV, draws, strict=True)]
        return tokens, probs_KV if tokens else None, sure

    def candidates(
        self, row: int, limit: int, seq: Sequence, count: int, most: int, foresight: Foresight | None = None
    ) -> Candidates:
        """Returns the tokens from which a draft tree is built: the `count` most probable ones at each of the row's
        first `limit` positions, with their log-probabilities at the temperature of the request `seq`. `most`: maximum
        nodes of that tree; it is only stored in the result.

        `foresight`: if given, tokens are chosen and ranked by the probability that the target will sample them,
        estimated from the random numbers that the target will use. The log-probabilities in the result are then those
        of this estimate.
        """
        assert self._logits_BKV is not None
        num_candidates = max(count, FIELD) if foresight else count
        ids_KM, logprobs_KM = top_logprobs(self._logits_BKV[row, :limit], num_candidates, inverse_temperature(seq))
        num = min(num_finite([logprobs[0] for logprobs in logprobs_KM]), len(ids_KM))
        tokens_KM = ids_KM if self._ids is None else [[self._ids[each] for each in ids] for ids in ids_KM]
        if foresight:
            ranks = list[tuple[list[int], list[float]]]()
            for place, (tokens, logprobs) in enumerate(zip(tokens_KM[:num], logprobs_KM[:num], strict=True)):
                noise = rng.Noise(seq.seed, len(seq.tokens) + place)  # that of the target: `Uniforms.noise`
                ranks.append(ranked(tokens, foresight.chances(logprobs, noise.exponentials(tokens)), count))
            return Candidates([tokens for tokens, _ in ranks], [logprobs for _, logprobs in ranks], most)
        return Candidates(tokens_KM[:num], logprobs_KM[:num], most)


def over_vocabulary(logits_KV: Tensor, draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Expands logits over a draft vocabulary to the target's whole vocabulary: [K, V] with -inf for all other
    tokens."""
    full_KV = logits_KV.new_full((len(logits_KV), vocab_size), float("-inf"))
    return full_KV.index_copy_(1, draft_ids.to(logits_KV.device), logits_KV)


def inverse_temperature(seq: Sequence) -> float:
    """Returns 1 / temperature of a request; 1 for a greedy request."""
    return 1.0 if seq.params.is_greedy else 1.0 / max(seq.params.temperature, MIN_TEMPERATURE)


def top_logprob(logits_BKV: Tensor) -> Tensor:
    """Returns the log-probability [B, K] of the most probable token; NaN or infinite for non-finite logits."""
    logits_BKV = logits_BKV.float()
    return logits_BKV.amax(-1) - logits_BKV.logsumexp(-1)


def num_finite(values: list[float]) -> int:
    """Returns the number of values before the first one that is not finite."""
    return next((count for count, value in enumerate(values) if not math.isfinite(value)), len(values))

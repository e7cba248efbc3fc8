"""DFlash 2's candidate selector: which of a slot's likeliest tokens is drafted, behind the token drafted before it.

Candidates b of a slot are scored behind a token a, S(a, b) = logit(b) + <A[a] * W h, B[b]>, with h the slot's final normed
hidden state. `drafter.py` says where it stands in the network.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import rng
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.reading import Reading, inverse_temperature
from paceline.draft.foresight import Foresight, ranked
from paceline.model.native import library as native_lib
from paceline.model.sampling.logits import sample
from paceline.plan.trees import Candidates
from paceline.types import Sequence

BOOKS = ("predecessor_codebook", "successor_codebook")


class Selector(nn.Module):
    """Codebooks A and B [V, rank] of tokens that come before and after each other, and W [rank, D].

    While it learns, codebooks may be factored: A = E P, with E the target's embedding, frozen, and P [rank, D] learned in place
    of V * rank numbers (`factored`); `materialised` makes a checkpoint's codebooks of them.
    """

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__()
        assert config.second is not None and config.vocab_size is not None
        rank, hidden_size = config.second.selector_rank, config.shape.hidden_size
        self.top_k, self.is_factored = config.second.selector_top_k, factored
        rows = (rank, hidden_size) if factored else (config.vocab_size, rank)
        for name in BOOKS:
            self.register_parameter(name.replace("codebook", "factor") if factored else name, nn.Parameter(torch.empty(rows)))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def rows(self, book: str, tokens: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Rows of a codebook, [*tokens.shape, rank]; of factored ones with the target's embedding."""
        if not self.is_factored:
            return F.embedding(tokens, self.get_parameter(book))
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        factor = self.get_parameter(book.replace("codebook", "factor"))
        return F.linear(F.embedding(tokens, embedding_VD).to(factor.dtype), factor)

    def linked(self, before_BKPR: Tensor, tokens_BKM: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Products [B, K, P, M] of gated predecessors with the successor codebook's rows. Of factored ones in another order,
        (before P) E^T: the few predecessors become as wide as the embedding, and no row of a codebook is made."""
        if not self.is_factored:
            return before_BKPR @ self.rows(BOOKS[1], tokens_BKM).float().transpose(-1, -2)
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        wide_BKPD = before_BKPR @ self.get_parameter(BOOKS[1].replace("codebook", "factor")).float()
        return wide_BKPD @ F.embedding(tokens_BKM, embedding_VD).float().transpose(-1, -2)


class Picks(NamedTuple):
    """Candidates of slots and their scores."""

    chosen_BKM: Tensor
    """Columns of the head, the most likely first."""
    tokens_BKM: Tensor
    """Those of the columns."""
    scores_BKPM: Tensor
    """Of each behind the P tokens that could stand before it, float32."""


def score(
    selector: Selector,
    hidden_BKD: Tensor,
    logits_BKV: Tensor,
    anchors_B: Tensor,
    ids: Tensor | None = None,
    before_BK: Tensor | None = None,
    embedding_VD: Tensor | None = None,
) -> Picks:
    """Scores S of the `top_k` most likely tokens of each slot, behind each candidate of the slot before, or behind `before_BK`
    alone (P = 1). The first slot follows the anchor, whatever P is.

    hidden_BKD: final normed. logits_BKV: scaled and capped. ids [V]: tokens of the head's rows; None: all of the vocabulary.
    """
    unary_BKM, chosen_BKM = logits_BKV.float().topk(min(selector.top_k, logits_BKV.shape[-1]), dim=-1)
    tokens_BKM = chosen_BKM if ids is None else ids[chosen_BKM]
    if before_BK is None:
        first_BP = anchors_B[:, None, None].expand(-1, 1, tokens_BKM.shape[-1])
        before_BKP = torch.cat([first_BP, tokens_BKM[:, :-1]], dim=1)
    else:
        before_BKP = before_BK[:, :, None]
    projection = selector.hidden_projection.weight
    gate_BKR = F.linear(hidden_BKD.to(projection.dtype), projection).float()
    predecessors = selector.rows(BOOKS[0], before_BKP, embedding_VD).float() * gate_BKR[:, :, None]
    return Picks(chosen_BKM, tokens_BKM, unary_BKM[:, :, None] + selector.linked(predecessors, tokens_BKM, embedding_VD))


class WalkedReading(Reading):
    """What the selector makes of a pass: every slot's drafts depend on those before them.

    A row's scores are a few hundred numbers, which plain Python walks through faster than PyTorch's operations begin, and the
    native library faster yet.
    """

    def __init__(self, picks: Picks, vocab_size: int) -> None:
        self._scores_BKPM, self._vocab_size = picks.scores_BKPM, vocab_size
        self._tokens_BKM: list[list[list[int]]] = picks.tokens_BKM.tolist()
        self._host_BKPM = picks.scores_BKPM.cpu()  # one read for all rows
        self._scores: dict[int, list[list[list[float]]]] = {}

    def certain(self, slot: int, limit: int, says_sure: bool) -> tuple[list[int], list[float] | None]:
        places, sure = self._walk(slot, limit, 1.0)
        tokens = [candidates[place] for candidates, place in zip(self._tokens_BKM[slot], places, strict=False)]
        return tokens, sure if says_sure else None

    def drawn(self, slot: int, limit: int, seq: Sequence) -> tuple[list[int], Tensor | None, list[float]]:
        """As Reading.drawn, from softmax(S / T) over the candidates behind what was drawn before. How sure the slots are is
        told along the walk of the largest scores: it may not depend on what is drawn."""
        inverse, scores_KPM = inverse_temperature(seq), self._scores_of(slot)
        probs_KPM = torch.softmax(self._scores_BKPM[slot, :limit] * inverse, dim=-1)
        tokens, rows, before = list[int](), list[Tensor](), 0
        for place, candidates in enumerate(self._tokens_BKM[slot][:limit]):
            if best_of(scores_KPM[place][before]) < 0:
                break
            rows.append(probs_KPM[place, before])
            before = sample(rows[-1], rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place))
            tokens.append(candidates[before])
        sure = self._walk(slot, limit, inverse)[1]
        if not tokens:
            return tokens, None, sure
        probs_KV = rows[0].new_zeros(len(tokens), self._vocab_size)
        ids_KM = torch.tensor(self._tokens_BKM[slot][: len(tokens)], device=probs_KV.device)
        return tokens, probs_KV.scatter_(1, ids_KM, torch.stack(rows)), sure

    def along(self, slot: int, tokens: list[int], seq: Sequence) -> list[float]:
        """Probability that `drawn` draws each of these tokens behind those before it; 0 of one that is no candidate, and of
        all behind it."""
        inverse, chances, before = inverse_temperature(seq), [0.0] * len(tokens), 0
        for place, token in enumerate(tokens):
            candidates = self._tokens_BKM[slot][place]
            scores_M = self._scores_of(slot)[place][before]
            if token not in candidates or best_of(scores_M) < 0:
                break
            before = candidates.index(token)
            chances[place] = math.exp(log_softmax(scores_M, inverse)[before])
        return chances

    def candidates(
        self, slot: int, limit: int, seq: Sequence, count: int, most: int, foresight: Foresight | None = None
    ) -> Candidates:
        """As Reading.candidates, along the walk of the likeliest; `behind` says them behind any other candidate."""
        inverse, scores_KPM, tokens_KM = inverse_temperature(seq), self._scores_of(slot), self._tokens_BKM[slot]
        first, known = len(seq.tokens), dict[int, list[float]]()

        def at(place: int, before: int) -> tuple[list[int], list[float]]:
            logprobs, tokens = log_softmax(scores_KPM[place][before], inverse), tokens_KM[place]
            if foresight:
                if place not in known:
                    known[place] = rng.Noise(seq.seed, first + place).exponentials(tokens)
                logprobs = foresight.chances(logprobs, known[place])
            return ranked(tokens, logprobs, count)

        def behind(place: int, token: int) -> tuple[list[int], list[float]]:
            return at(place, tokens_KM[place - 1].index(token))

        told, before = list[tuple[list[int], list[float]]](), 0
        for place, scores_PM in enumerate(scores_KPM[:limit]):
            if best_of(scores_PM[before]) < 0:
                break
            told.append(at(place, before))
            before = tokens_KM[place].index(told[-1][0][0])
        return Candidates([tokens for tokens, _ in told], [logprobs for _, logprobs in told], most, behind)

    def _scores_of(self, slot: int) -> list[list[list[float]]]:
        """Of one row, [K, P, M]."""
        if slot not in self._scores:
            self._scores[slot] = self._host_BKPM[slot].tolist()
        return self._scores[slot]

    def _walk(self, slot: int, limit: int, inverse: float) -> tuple[list[int], list[float]]:
        """Places of the drafts with the largest scores among the candidates, and their log-probabilities; a score that is not
        finite ends them."""
        scores_KPM = self._host_BKPM[slot, :limit]
        if scores_KPM.is_contiguous() and native_lib.load() is not None:
            return native_lib.walk(scores_KPM, inverse)
        return walk(self._scores_of(slot)[:limit], inverse)


def walk(scores_KPM: list[list[list[float]]], inverse: float) -> tuple[list[int], list[float]]:
    """As native_lib.walk."""
    places, logprobs, before = list[int](), list[float](), 0
    for scores_PM in scores_KPM:
        scores_M = scores_PM[before]
        if (before := best_of(scores_M)) < 0:
            break
        places.append(before)
        logprobs.append(log_softmax(scores_M, inverse)[before])
    return places, logprobs


def best_of(scores_M: list[float]) -> int:
    """Place of the largest, the first of equals; -1 where it is not finite or one of them is not a number."""
    best = max(scores_M)
    return scores_M.index(best) if math.isfinite(best) and not any(map(math.isnan, scores_M)) else -1


def log_softmax(scores_M: list[float], inverse: float) -> list[float]:
    """Log-probabilities in softmax(scores * inverse); the largest score is finite."""
    most = max(scores_M)
    shifted = [(each - most) * inverse for each in scores_M]
    total = math.log(sum(map(math.exp, shifted)))
    return [each - total for each in shifted]

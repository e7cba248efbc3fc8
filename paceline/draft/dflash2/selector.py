"""DFlash 2's candidate selector: picks one of a position's most probable tokens, given the token drafted before it.

Candidate b after token a has the score S(a, b) = logit(b) + <A[a] * W h, B[b]>. h is the final normed hidden state of
the position, A and B are codebooks with a row per token, and W is a projection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import rng
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.reading import Reading, inverse_temperature, num_finite
from paceline.draft.dflash2.codebooks import BOOKS, Codebooks
from paceline.draft.foresight import Foresight, ranked
from paceline.model.native import library as native_lib
from paceline.model.sampling.device_race import FAILED, Draws, exponentials, foreseen
from paceline.model.sampling.logits import sample
from paceline.plan.trees import Candidates
from paceline.types import Sequence


class Selector(Codebooks):
    """Candidate selector: scores the most probable tokens of a draft position, given the token drafted before it. The
    previous token's row of codebook A is multiplied, element by element, by a projection W [rank, D] of the position's
    hidden state."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        assert config.second is not None and config.vocab_size is not None
        rank, hidden_size = config.second.selector_rank, config.shape.hidden_size
        super().__init__(config.vocab_size, hidden_size, rank, factored)
        self.top_k = config.second.selector_top_k
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)


class Picks(NamedTuple):
    """The M most probable tokens at each of K draft positions of B rows (candidates), with the selector's scores."""

    chosen_BKM: Tensor
    """Indices of the candidates in the LM head, most probable first."""
    tokens_BKM: Tensor
    """Token ids of the candidates."""
    scores_BKPM: Tensor
    """Score of each of M candidates after each of P possible previous tokens, float32."""
    sure_BK: Tensor | None = None
    """Log-probability that the greedy drafts are accepted, if the drafter predicts it."""


def score(
    selector: Selector,
    hidden_BKD: Tensor,
    logits_BKV: Tensor,
    anchors_B: Tensor,
    ids: Tensor | None = None,
    before_BK: Tensor | None = None,
    embedding_VD: Tensor | None = None,
) -> Picks:
    """Returns the M = `selector.top_k` most probable tokens (candidates) at each position, with the selector's scores.
    A score is for a candidate after one previous token.

    - By default the previous token is unknown: each candidate has M scores, one for each candidate of the previous
      position. The first position follows the last verified token (`anchors_B`), so its M scores are equal.
    - `before_BK`: the previous token of each position, if known. Each candidate then has one score.

    `hidden_BKD`: final normed hidden states. `logits_BKV`: logits after scaling and soft cap. `ids` [V]: token ids of
    the head's rows; None: all tokens. `embedding_VD`: the target's embedding, only for factored codebooks (see
    `Codebooks`).
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
    return Picks(
        chosen_BKM, tokens_BKM, unary_BKM[:, :, None] + selector.linked(predecessors, tokens_BKM, embedding_VD)
    )


class WalkedReading(Reading):
    """Drafts made from one drafting pass's scored candidates. They are chosen position by position, because each score
    depends on the draft before it; this is called a walk."""

    def __init__(self, picks: Picks, vocab_size: int) -> None:
        self._scores_BKPM, self._vocab_size = picks.scores_BKPM, vocab_size
        self._sure_BK: list[list[float]] | None = None if picks.sure_BK is None else picks.sure_BK.tolist()
        self._tokens_BKM: list[list[list[int]]] = picks.tokens_BKM.tolist()
        self._host_BKPM = picks.scores_BKPM.cpu()  # one copy for all rows
        self._scores: dict[int, list[list[list[float]]]] = {}

    def certain(self, row: int, limit: int, with_confidence: bool) -> tuple[list[int], list[float] | None]:
        places, logprobs = self._walk(row, limit, 1.0)
        tokens = [candidates[place] for candidates, place in zip(self._tokens_BKM[row], places, strict=False)]
        return tokens, self._confidence(row, logprobs) if with_confidence else None

    def drawn(self, row: int, limit: int, seq: Sequence) -> tuple[list[int], Tensor | None, list[float]]:
        """Samples drafts at a row's first `limit` positions, one after another, each from softmax(score / temperature)
        over its position's candidates. Returns (K drafts, their distributions [K, V], confidences). Without drafts the
        second is None.

        Confidences do not depend on the sampled tokens. They are the predictions of the drafter's confidence head, or
        without one the log-probabilities of greedy drafts.
        """
        inverse, scores_KPM = inverse_temperature(seq), self._scores_of(row)
        probs_KPM = torch.softmax(self._scores_BKPM[row, :limit] * inverse, dim=-1)
        tokens, rows, before = list[int](), list[Tensor](), 0
        for place, candidates in enumerate(self._tokens_BKM[row][:limit]):
            if best_of(scores_KPM[place][before]) < 0:
                break
            rows.append(probs_KPM[place, before])
            before = sample(rows[-1], rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place))
            tokens.append(candidates[before])
        logprobs = self._confidence(row, self._walk(row, limit, inverse)[1])
        if not tokens:
            return tokens, None, logprobs
        probs_KV = rows[0].new_zeros(len(tokens), self._vocab_size)
        ids_KM = torch.tensor(self._tokens_BKM[row][: len(tokens)], device=probs_KV.device)
        return tokens, probs_KV.scatter_(1, ids_KM, torch.stack(rows)), logprobs

    def along(self, row: int, tokens: list[int], seq: Sequence) -> list[float]:
        """Returns how likely `drawn` would sample the given `tokens` as drafts: for each token the probability after
        the tokens before it. 0 for the first token that is not a candidate, and for all after it. `row`: the sequence's
        row in this reading."""
        inverse, chances, before = inverse_temperature(seq), [0.0] * len(tokens), 0
        for place, token in enumerate(tokens):
            candidates = self._tokens_BKM[row][place]
            scores_M = self._scores_of(row)[place][before]
            if token not in candidates or best_of(scores_M) < 0:
                break
            before = candidates.index(token)
            chances[place] = math.exp(log_softmax(scores_M, inverse)[before])
        return chances

    def candidates(
        self, row: int, limit: int, seq: Sequence, count: int, most: int, foresight: Foresight | None = None
    ) -> Candidates:
        """Returns candidates for a draft tree as `Reading.candidates` does. Here a candidate's log-probability depends
        on the token drafted before it. The result contains those after the most probable previous token; its function
        `behind` returns those after any other candidate."""
        inverse, scores_KPM, tokens_KM = inverse_temperature(seq), self._scores_of(row), self._tokens_BKM[row]
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

        ranks, before = list[tuple[list[int], list[float]]](), 0
        for place, scores_PM in enumerate(scores_KPM[:limit]):
            if best_of(scores_PM[before]) < 0:
                break
            ranks.append(at(place, before))
            before = tokens_KM[place].index(ranks[-1][0][0])
        return Candidates([tokens for tokens, _ in ranks], [logprobs for _, logprobs in ranks], most, behind)

    def _confidence(self, row: int, logprobs: list[float]) -> list[float]:
        """Log-probabilities that the row's greedy drafts are accepted: predicted ones, or `logprobs`, their own."""
        return logprobs if self._sure_BK is None else self._sure_BK[row][: len(logprobs)]

    def _scores_of(self, row: int) -> list[list[list[float]]]:
        """Scores [K, P, M] of one row."""
        if row not in self._scores:
            self._scores[row] = self._host_BKPM[row].tolist()
        return self._scores[row]

    def _walk(self, row: int, limit: int, inverse: float) -> tuple[list[int], list[float]]:
        """Candidate indices of the greedy drafts, and their log-probabilities; a non-finite score ends the walk."""
        scores_KPM = self._host_BKPM[row, :limit]
        if scores_KPM.is_contiguous() and native_lib.load() is not None:
            return native_lib.walk(scores_KPM, inverse)
        (places,), (logprobs,) = (each.tolist() for each in walk(*best_after(scores_KPM[None], inverse)[:2]))
        count = num_finite(logprobs)
        return places[:count], logprobs[:count]


def best_after(scores_BKPM: Tensor, inverse: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the best candidate after each possible previous candidate. Returns three tensors:

    - its index [B, K, P]; of equal scores the first is the best
    - its log-probability [B, K, P], float64; NaN if its score is not finite or any score is NaN
    - log-probabilities of all candidates, up to a constant per previous candidate [B, K, P, M], float64

    Log-probabilities are those of softmax(scores * `inverse`), where `inverse` is 1 / temperature.
    """
    scores_BKPM = scores_BKPM.double()
    most_BKP, place_BKP = scores_BKPM.max(-1)
    shifted_BKPM = (scores_BKPM - most_BKP[..., None]) * inverse
    return place_BKP, -shifted_BKPM.logsumexp(-1), shifted_BKPM


def walk(place_BKP: Tensor, logprob_BKP: Tensor) -> tuple[Tensor, Tensor]:
    """Chooses a candidate at each of K positions in turn, given the one chosen before it. Returns (their indices
    [B, K], their log-probabilities [B, K]). Tensor operations of fixed shape, for CUDA graphs.

    `place_BKP`: index of the candidate to choose after each of P previous ones; at the first position all are equal.
    `logprob_BKP`: its log-probability.
    """
    path = [place_BKP.new_zeros(len(place_BKP), 1)]
    for place_BP in place_BKP.unbind(1):
        path.append(place_BP.gather(1, path[-1]))
    path_BJ = torch.cat(path, 1)
    return path_BJ[:, 1:], logprob_BKP.gather(-1, path_BJ[:, :-1, None])[..., 0]


def choose(picks: Picks, drawn: tuple[Draws, Tensor] | None, foresight: Foresight) -> tuple[Tensor, Tensor]:
    """Chooses the drafts of B blocks from scored candidates, one position after another. Greedy rows get the best
    candidate after the draft before it; sampled rows get predictions of the tokens that the target will sample, made
    from its random numbers with the parameters `foresight`. Only tensor operations of fixed shape, for CUDA graphs.
    `drawn`, result: as in `TorchPath.choose`."""
    sure_BK = None if picks.sure_BK is None else picks.sure_BK.double()
    if drawn is None:
        place_BK, logprob_BK = walk(*best_after(picks.scores_BKPM, 1.0)[:2])
        confidence_BK = logprob_BK if sure_BK is None else sure_BK
    else:
        draws, position_BK = drawn
        is_greedy_B11 = draws.is_greedy_B[:, None, None]
        inverse_B11 = draws.inverse_temperature_B[:, None, None].masked_fill(is_greedy_B11, 1.0)
        place_BKP, logprob_BKP, shifted_BKPM = best_after(picks.scores_BKPM, inverse_B11[..., None])
        times_BKM = exponentials(draws.seed_B[:, None, None], position_BK[..., None], picks.tokens_BKM)
        own_BKP, chance_BKP = foreseen(shifted_BKPM, times_BKM[:, :, None], foresight.scale, foresight.spread)
        place_BKP = torch.where(is_greedy_B11, place_BKP, own_BKP)
        place_BK, logprob_BK = walk(place_BKP, torch.where(is_greedy_B11, logprob_BKP, chance_BKP))
        confidence_BK = logprob_BK if sure_BK is None else torch.where(is_greedy_B11[..., 0], sure_BK, logprob_BK)
    drafts_BK = picks.tokens_BKM.gather(-1, place_BK[..., None])[..., 0]
    return drafts_BK.masked_fill(logprob_BK.isnan(), FAILED), confidence_BK


def best_of(scores_M: list[float]) -> int:
    """Returns the index of the first largest score; -1 if it is not finite or any score is NaN."""
    best = max(scores_M)
    return scores_M.index(best) if math.isfinite(best) and not any(map(math.isnan, scores_M)) else -1


def log_softmax(scores_M: list[float], inverse: float) -> list[float]:
    """Returns log(softmax(scores * inverse)). The largest score must be finite."""
    most = max(scores_M)
    shifted = [(each - most) * inverse for each in scores_M]
    total = math.log(sum(map(math.exp, shifted)))
    return [each - total for each in shifted]

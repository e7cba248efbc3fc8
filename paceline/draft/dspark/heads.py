"""DSpark's two heads. The Markov head corrects a draft position's logits for the draft before it; the confidence head
predicts whether the draft is accepted.

    logits of position k += W2 W1[a]             a: the token drafted at position k - 1, or the last committed one
    confidence of position k = <w, [h, W1[a]]> + c        h: the position's final normed hidden state

The sigmoid of the confidence is the chance that the target accepts the draft if it accepted those before it.
Formulas and names are those of PyPI's `speculators` 0.9.0 (Apache 2.0), after DSpark (arXiv 2607.05147);
`tests/draft/test_dspark.py` compares with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash2.codebooks import BOOKS, Codebooks
from paceline.draft.dflash2.selector import Picks

MARKOV, CONFIDENCE = "markov_head.", "confidence_head."
TOP_K = 16
"""Candidates at a draft position, for trees and for sampled drafts."""


class MarkovHead(Codebooks):
    """Corrects a position's logits for the token before it. The correction after token a is the product W2 W1[a], one
    number per token of the vocabulary. W1 is the parameter `predecessor_codebook`, W2 is `successor_codebook`."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        assert config.markov is not None and config.vocab_size is not None
        super().__init__(config.vocab_size, config.shape.hidden_size, config.markov.rank, factored)

    def added(self, before: Tensor, ids: Tensor | None = None, embedding_VD: Tensor | None = None) -> Tensor:
        """Returns the correction [*before.shape, V] of the logits after each token of `before`. `ids` [V]: token ids of
        the logits' columns; None: all tokens. `embedding_VD`: the target's embedding, for factored codebooks."""
        rows = self.rows(BOOKS[0], before, embedding_VD)
        if not self.is_factored:
            return F.linear(rows, self.columns(ids))
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        wide = rows @ self.get_parameter(BOOKS[1].replace("codebook", "factor"))
        return F.linear(wide.to(embedding_VD.dtype), embedding_VD if ids is None else embedding_VD[ids])

    def columns(self, ids: Tensor | None) -> Tensor:
        """Returns the rows of `successor_codebook` for the tokens of the logits' columns, [V, rank]. `ids`: these
        tokens; None: all tokens."""
        book_VR = self.get_parameter(BOOKS[1])
        return book_VR if ids is None else book_VR[ids]


class ConfidenceHead(nn.Module):
    """Predicts, as a logit, whether a draft is accepted, from its position's hidden state and the token before it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        assert config.markov is not None
        self.sees_token = config.markov.confidence_sees_token
        self.proj = nn.Linear(config.shape.hidden_size + self.sees_token * config.markov.rank, 1)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns one logit per draft, [...]; its sigmoid is the chance that the draft is accepted if all drafts before
        it are. `hidden` [..., D]: hidden states of the drafts' positions. `rows` [..., rank]: codebook rows of the
        tokens before the drafts, from the Markov head's `predecessor_codebook`."""
        features = torch.cat([hidden, rows.to(hidden)], dim=-1) if self.sees_token else hidden
        return self.proj(features.to(self.proj.weight.dtype))[..., 0]


def pick(
    markov: MarkovHead,
    confidence: ConfidenceHead | None,
    hidden_BKD: Tensor,
    logits_BKV: Tensor,
    anchors_B: Tensor,
    ids: Tensor | None = None,
    columns_VR: Tensor | None = None,
) -> Picks:
    """Drafts K positions of B blocks greedily, one after another. Returns M candidates at each position: the most
    probable tokens after the greedy draft of the previous position, most probable first, with scores:

    - A candidate has one score for each candidate of the previous position: its logit after that token.
    - At the first position, all scores of a candidate are equal: its logit after the last committed token
      (`anchors_B`).

    `sure_BK` in the result is predicted by `confidence`; it is None without such a head.

    `hidden_BKD`: final normed hidden states. `logits_BKV`: logits after scaling and soft cap. `ids` [V]: token ids of
    the logits' columns; None: all tokens. `columns_VR`: result of `markov.columns(ids)`, to save time; None: computed
    here.
    """
    num, before_B = min(TOP_K, logits_BKV.shape[-1]), anchors_B
    columns_VR = markov.columns(ids) if columns_VR is None else columns_VR
    chosen, tokens, before = list[Tensor](), list[Tensor](), list[Tensor]()
    for logits_BV in logits_BKV.unbind(1):
        before.append(before_B)
        rows_BR = markov.rows(BOOKS[0], before_B)
        best_BM = (logits_BV.float() + F.linear(rows_BR, columns_VR).float()).topk(num, dim=-1).indices
        # In the order of the scores, which are products in float32.
        added_BM = (columns_VR[best_BM].float() @ rows_BR.float()[..., None])[..., 0]
        sums_BM = logits_BV.gather(-1, best_BM).float() + added_BM
        chosen.append(best_BM.gather(-1, sums_BM.argsort(dim=-1, descending=True, stable=True)))
        tokens.append(chosen[-1] if ids is None else ids[chosen[-1]])
        before_B = tokens[-1][:, 0]
    chosen_BKM, tokens_BKM, before_BK = torch.stack(chosen, 1), torch.stack(tokens, 1), torch.stack(before, 1)
    unary_BKM = logits_BKV.gather(-1, chosen_BKM).float()
    before_BKP = torch.cat([anchors_B[:, None, None].expand(-1, 1, num), tokens_BKM[:, :-1]], dim=1)
    rows_BKPR = markov.rows(BOOKS[0], before_BKP).float()
    sure_BK = None
    if confidence is not None:
        sure_BK = F.logsigmoid(confidence(hidden_BKD, markov.rows(BOOKS[0], before_BK)).float())
    return Picks(chosen_BKM, tokens_BKM, unary_BKM[:, :, None] + markov.linked(rows_BKPR, tokens_BKM), sure_BK)

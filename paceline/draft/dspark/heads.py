"""DSpark's two heads: the Markov head adds to a draft position's logits what the token drafted before it says, and the
confidence head predicts whether the draft will be accepted.

    logits of position k += W2 W1[a]             a: the token drafted at position k - 1, or the last committed one
    confidence of position k = <w, [h, W1[a]]> + c        h: the position's final normed hidden state

The confidence is a logit: its sigmoid is the chance that the target accepts the draft if it accepted those before it.
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
    """Codebooks W1 (previous token, `predecessor_codebook`) and W2 (next token, `successor_codebook`)."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        assert config.markov is not None and config.vocab_size is not None
        super().__init__(config.vocab_size, config.shape.hidden_size, config.markov.rank, factored)

    def added(self, before: Tensor, ids: Tensor | None = None, embedding_VD: Tensor | None = None) -> Tensor:
        """Returns what is added to the logits [*before.shape, V] after the tokens `before`. `ids` [V]: token ids of the
        logits' columns; None: all tokens. `embedding_VD`: the target's embedding, needed by factored codebooks only."""
        rows = self.rows(BOOKS[0], before, embedding_VD)
        if not self.is_factored:
            book_VR = self.get_parameter(BOOKS[1])
            return F.linear(rows, book_VR if ids is None else book_VR[ids])
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        wide = rows @ self.get_parameter(BOOKS[1].replace("codebook", "factor"))
        return F.linear(wide, (embedding_VD if ids is None else embedding_VD[ids]).to(wide.dtype))


class ConfidenceHead(nn.Module):
    """Predicts whether a draft is accepted, from its position's hidden state and the token before it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        assert config.markov is not None
        self.sees_token = config.markov.confidence_sees_token
        self.proj = nn.Linear(config.shape.hidden_size + self.sees_token * config.markov.rank, 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Returns logits of the chance of acceptance, shaped as `hidden` [..., D] without its last dimension. `before`
        [..., rank]: rows of codebook W1 for the tokens before."""
        return self.proj(torch.cat([hidden, before.to(hidden)], dim=-1) if self.sees_token else hidden)[..., 0]


def pick(
    markov: MarkovHead,
    confidence: ConfidenceHead | None,
    hidden_BKD: Tensor,
    logits_BKV: Tensor,
    anchors_B: Tensor,
    ids: Tensor | None = None,
) -> Picks:
    """Walks through the K draft positions of B blocks, each of whose greedy draft changes the logits of the next
    position. Returns the most probable tokens of each position after the greedy draft before it, most probable first,
    with their scores (logits) after each candidate of the position before; at the first position only after the last
    committed token (`anchors_B`).

    `hidden_BKD`: final normed hidden states. `logits_BKV`: scaled and capped. `ids` [V]: token ids of the logits'
    columns; None: all tokens.
    """
    num, before_B = min(TOP_K, logits_BKV.shape[-1]), anchors_B
    chosen, tokens, before = list[Tensor](), list[Tensor](), list[Tensor]()
    for logits_BV in logits_BKV.unbind(1):
        before.append(before_B)
        chosen.append((logits_BV.float() + markov.added(before_B, ids).float()).topk(num, dim=-1).indices)
        tokens.append(chosen[-1] if ids is None else ids[chosen[-1]])
        before_B = tokens[-1][:, 0]
    chosen_BKM, tokens_BKM, before_BK = torch.stack(chosen, 1), torch.stack(tokens, 1), torch.stack(before, 1)
    unary_BKM = logits_BKV.float().gather(-1, chosen_BKM)
    before_BKP = torch.cat([anchors_B[:, None, None].expand(-1, 1, num), tokens_BKM[:, :-1]], dim=1)
    rows_BKPR = markov.rows(BOOKS[0], before_BKP).float()
    sure_BK = None
    if confidence is not None:
        sure_BK = F.logsigmoid(confidence(hidden_BKD, markov.rows(BOOKS[0], before_BK)).float())
    return Picks(chosen_BKM, tokens_BKM, unary_BKM[:, :, None] + markov.linked(rows_BKPR, tokens_BKM), sure_BK)

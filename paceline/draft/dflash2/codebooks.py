"""Two codebooks, tables with one row of numbers per token, which score pairs of tokens: token b after token a by the
dot product of a's row in the first one and b's row in the second.

DFlash 2's candidate selector (`draft/dflash2/selector.py`) and DSpark's Markov head (`draft/dspark/heads.py`) use them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, empty, nn
from torch.nn import functional as F

BOOKS = ("predecessor_codebook", "successor_codebook")


class Codebooks(nn.Module):
    """Codebooks A (previous token) and B (next token), both [V, rank].

    In training, they may be factored: A = E F^T with the target's frozen embedding E and a trained factor F [rank, D],
    which has fewer parameters; `materialised` computes a checkpoint's codebooks from them.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, factored: bool = False) -> None:
        super().__init__()
        self.is_factored = factored
        rows = (rank, hidden_size) if factored else (vocab_size, rank)
        for name in BOOKS:
            self.register_parameter(name.replace("codebook", "factor") if factored else name, nn.Parameter(empty(rows)))

    def rows(self, book: str, tokens: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Returns a codebook's rows for these tokens, [*tokens.shape, rank]. `book`: "predecessor_codebook" or
        "successor_codebook". `embedding_VD`: the target's embedding, needed by factored codebooks only."""
        if not self.is_factored:
            return F.embedding(tokens, self.get_parameter(book))
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        factor = self.get_parameter(book.replace("codebook", "factor"))
        return F.linear(F.embedding(tokens, embedding_VD).to(factor.dtype), factor)

    def linked(self, before_BKPR: Tensor, tokens_BKM: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Returns the dot products [B, K, P, M] of one vector for each of P previous tokens (`before_BKPR`, float32,
        made of rows of codebook A) and one for each of M candidates (`tokens_BKM`: its row of codebook B).
        `embedding_VD`: the target's embedding, from which a factored codebook B is computed."""
        if not self.is_factored:
            return before_BKPR @ self.rows(BOOKS[1], tokens_BKM).float().transpose(-1, -2)
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        wide_BKPD = before_BKPR @ self.get_parameter(BOOKS[1].replace("codebook", "factor")).float()
        return wide_BKPD @ F.embedding(tokens_BKM, embedding_VD).float().transpose(-1, -2)


def materialised(tensors: Mapping[str, Tensor], embedding_VD: Tensor) -> dict[str, Tensor]:
    """Returns a network's tensors as a checkpoint stores them: each factor [rank, D] becomes
    a codebook [V, rank], the product of the target's embedding [V, D] and the transposed factor."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_factor"):
            converted[name.replace("_factor", "_codebook")] = embedding_VD.to(tensor.device, tensor.dtype) @ tensor.T
        else:
            converted[name] = tensor
    return converted

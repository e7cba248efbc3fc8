"""Two codebooks that score pairs of tokens, for DFlash 2's candidate selector and DSpark's Markov head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, empty, nn
from torch.nn import functional as F

BOOKS = ("predecessor_codebook", "successor_codebook")


class Codebooks(nn.Module):
    """Two tables that score pairs of tokens, codebook A (previous token) and codebook B (next token), both [V, rank].
    The score of a pair is the dot product of the two tokens' rows.

    In training, a codebook may be factored as E F^T: E is the target's embedding, F [rank, D] a trained factor with
    fewer parameters than the codebook. `materialised` computes codebooks from factors.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, factored: bool = False) -> None:
        super().__init__()
        self.is_factored = factored
        rows = (rank, hidden_size) if factored else (vocab_size, rank)
        for name in BOOKS:
            self.register_parameter(name.replace("codebook", "factor") if factored else name, nn.Parameter(empty(rows)))

    def rows(self, book: str, tokens: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Returns a codebook's rows for these tokens, [*tokens.shape, rank]. `book`: "predecessor_codebook" (A) or
        "successor_codebook" (B). `embedding_VD`: the target's embedding, for factored codebooks."""
        if not self.is_factored:
            return F.embedding(tokens, self.get_parameter(book))
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        factor = self.get_parameter(book.replace("codebook", "factor"))
        return F.linear(F.embedding(tokens, embedding_VD).to(factor.dtype), factor)

    def linked(self, before_BKPR: Tensor, tokens_BKM: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Scores M candidate tokens at each of K draft positions, after each of P possible previous tokens. Returns [B,
        K, P, M]: the dot product of the previous token's vector and the candidate's row in codebook B.

        `before_BKPR`: vectors of the previous tokens, float32; the caller computes them from rows of codebook A.
        `tokens_BKM`: the candidates. `embedding_VD`: the target's embedding, only for factored codebooks.
        """
        if not self.is_factored:
            return before_BKPR @ self.rows(BOOKS[1], tokens_BKM).float().transpose(-1, -2)
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        wide_BKPD = before_BKPR @ self.get_parameter(BOOKS[1].replace("codebook", "factor")).float()
        return wide_BKPD @ F.embedding(tokens_BKM, embedding_VD).float().transpose(-1, -2)


def materialised(tensors: Mapping[str, Tensor], embedding_VD: Tensor) -> dict[str, Tensor]:
    """Returns a network's tensors as a checkpoint stores them: each factor [rank, D] becomes a codebook [V, rank], the
    product of the target's embedding [V, D] and the transposed factor."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_factor"):
            converted[name.replace("_factor", "_codebook")] = embedding_VD.to(tensor.device, tensor.dtype) @ tensor.T
        else:
            converted[name] = tensor
    return converted

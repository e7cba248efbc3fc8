"""The target contract: the one call every engine round makes, whoever computes it.

`forward(ForwardBatch) -> ForwardOutput` is the seam: the PyTorch decoder, Transformers models and the native pass all stand
behind it. The cache grows by the tokens given; taking some back is `cache.rollback`, an explicit call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.errors import ContextLengthError, UnsupportedModelError
from paceline.model.kv_cache import KVCache
from paceline.model.torch.recorded import Recorder

DEFAULT_MAX_LEN = 2048
"""Tokens of context a cache row holds when nobody says otherwise."""


class Sizes(Protocol):
    """What a drafter must agree with: of a target that is loaded, or of a config alone."""

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(slots=True)
class ForwardBatch:
    """Tokens of several rows, packed one row after another: T = sum(counts)."""

    rows: list[int]
    starts: list[int]
    """Position of each row's first token; equals the row's cached length."""
    counts: list[int]
    tokens: list[int]
    logits: Literal["all", "last", "none"] = "all"
    """Logits of every token, only of each row's last one, or of none (a prefill chunk that is not the last)."""
    only_argmax: bool = False
    """Only where each row of logits is largest will be read: an implementation may leave the logits themselves out."""
    parents: list[int] | None = None
    """A tree of tokens: for each the place of its parent among its row's tokens of this pass, -1 for one that follows the
    cache; parents come first. None: every token follows the one before it."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> list[int]:
        """Where each token stands in its text: one behind its parent. (Its slot in the cache is start + place in its row.)"""
        positions: list[int] = []
        for start, count in zip(self.starts, self.counts, strict=True):
            first = len(positions)
            for place in range(count):
                parent = place - 1 if self.parents is None else self.parents[first + place]
                positions.append(start if parent < 0 else positions[first + parent] + 1)
        return positions

    @property
    def logit_rows(self) -> list[int]:
        if self.logits == "last":
            return [end - 1 for end in accumulate(self.counts)]
        return list(range(self.num_tokens)) if self.logits == "all" else []

    def require_chains(self) -> None:
        """Raises UnsupportedModelError for a tree: for implementations that compute chains only."""
        if self.parents is not None:
            raise UnsupportedModelError("this target cannot check trees of drafts: use a plan that drafts chains")


@dataclass(slots=True)
class ForwardOutput:
    """Tensors are views of buffers that the next forward may overwrite."""

    logits_TV: Tensor | None
    """[T, V] for "all", [B, V] for "last"; float32 or the model's dtype. None for "none", and where `only_argmax` was used."""
    taps_TF: Tensor | None
    """[T, len(tap_layers) * hidden_size], outputs of the tapped layers side by side; None when nothing is tapped."""
    argmax_T: list[int] | None = None
    """As `best_T`, where the pass has found it on its way."""

    def best_T(self) -> list[int]:
        """Of each row of logits the first token with the largest; -1 where that is not finite, or one of them is NaN."""
        if self.argmax_T is not None:
            return self.argmax_T
        assert self.logits_TV is not None
        # float32 first: PyTorch's argmax over bfloat16 is five times as slow on CPU, and widening changes no comparison
        logits_TV = self.logits_TV.float()
        best_T1 = logits_TV.argmax(-1, keepdim=True)  # PyTorch takes NaN for the largest
        return best_T1.masked_fill(~logits_TV.gather(-1, best_T1).isfinite(), -1).flatten().tolist()


@dataclass(frozen=True, slots=True)
class EndScales:
    """What a model does at its two ends besides its two matrices."""

    embedding: float = 1.0
    """Rows of the embedding are multiplied by it."""
    logits: float = 1.0
    """What the head's matrix gives is multiplied by it,"""
    cap: float = 0.0
    """and then kept within it, by tanh; 0 is off."""

    def of_logits(self, product_TV: Tensor) -> Tensor:
        """Logits of what the head's matrix gives."""
        if self.logits != 1.0:
            product_TV = product_TV * self.logits
        return torch.tanh(product_TV / self.cap) * self.cap if self.cap else product_TV


PLAIN_ENDS = EndScales()


class Target(ABC):
    """A causal language model with its KV cache, ready to verify drafts."""

    cache: KVCache
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    """Longest context the model was made for, in tokens."""
    weight_bytes: int
    """Bytes one pass must read; see Machine.ceiling_tokens_per_s."""
    tap_layers: tuple[int, ...] = ()
    is_width_invariant: bool = False
    """Whether a position gets the same bits whatever else is in its pass, however its row's tokens were split into passes."""

    takes_trees: bool = False
    """Whether `forward` computes trees of tokens (`ForwardBatch.parents`)."""

    has_own_threads: bool = False
    """Whether it computes on threads of its own; PyTorch's threads, which spin when idle, would slow them down."""

    overwrites_taps: bool = True
    """Whether the next pass may overwrite the taps of this one: what keeps them longer must copy them."""

    _experts_read: float | Tensor | None = None

    recorder: Recorder | None = None
    """Records and replays passes of fixed shape, its drafters' too; None for a target that has none."""

    ends: EndScales = PLAIN_ENDS
    """Factors at both ends that the matrices do not hold. Drafters read the matrices, and have factors of their own."""

    @property
    def experts_read(self) -> float | None:
        """How many experts of a layer the last pass read, the mean over layers that have some; None for a model without."""
        if isinstance(self._experts_read, Tensor):
            self._experts_read = _num_read(self._experts_read)
        return self._experts_read

    @experts_read.setter
    def experts_read(self, read: float | Tensor | None) -> None:
        """`read`: the number, or the experts of each token by layer, [layers, tokens, experts], to be counted when asked."""
        self._experts_read = read

    def set_taps(self, tap_layers: tuple[int, ...]) -> None:
        """Choose the layers (0-based; layer l is Transformers' hidden_states[l + 1]) whose outputs `forward` returns."""
        self.tap_layers = tuple(tap_layers)

    @property
    def recording_s(self) -> float:
        """Seconds spent on recording so far: part of no round."""
        return 0.0 if self.recorder is None else self.recorder.seconds

    def record(self, most_count: int) -> None:
        """Record decode passes of up to `most_count` tokens a row, for every number of rows, with the present taps.
        Does nothing without a recorder. Takes seconds on CUDA, and is undone by `allocate_cache`."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compute with these weights from now on, by their Hugging Face names; of the same shapes. `cache` is replaced by an
        empty one. The tensors are copied; for that moment there is room for both sets.

        Raises ModelFileError naming a tensor that is unknown, missing, not finite or of another shape, and then nothing has
        changed; UnsupportedModelError of an implementation that keeps the weights it was made of.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} keeps the weights it was loaded with: new ones go into paceline's own decoder only (its "
            "families stand in docs/reference/families.md)"
        )

    @abstractmethod
    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        """Replace `cache` by an empty one of this size. Raises MemoryBudgetError or ContextLengthError."""

    def check_len(self, max_len: int) -> None:
        """Raises ContextLengthError."""
        if max_len > self.max_position:
            raise ContextLengthError(f"max_len {max_len} is beyond the model's {self.max_position} tokens: lower max_len")

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the tokens, append their keys and values to the cache, return logits and taps."""

    @abstractmethod
    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        """Rows of the embedding's matrix [T, D]."""

    @abstractmethod
    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        """What the head's matrix makes [T, V] of final hidden states [T, D] that are already normed."""

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Input embeddings [T, D] of token ids [T], as the first layer receives them."""
        embedded_TD = self.matrix_embed(tokens_T)
        return embedded_TD if self.ends.embedding == 1.0 else embedded_TD * self.ends.embedding

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] of final hidden states [T, D] that are already normed."""
        return self.ends.of_logits(self.matrix_head(hidden_TD))


def head_weight(target: Target) -> Tensor:
    """The target's head as a matrix [V, D], found by applying it to the unit vectors.

    Without the target's own factors (`Target.ends`). Raises UnsupportedModelError for a head that is no plain matrix.
    """
    with torch.no_grad():  # not inference mode: losses keep this matrix for their backward
        eye = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
        weight_VD = target.matrix_head(eye).T.to(target.dtype, copy=True)  # exact: each logit is one weight
        probe = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0))
        probe = probe.to(target.device, target.dtype)
        expected = probe.float() @ weight_VD.float().T
        if (target.matrix_head(probe).float() - expected).abs().max() > 0.05 * expected.abs().max():
            raise UnsupportedModelError(
                "this target's head is no plain matrix, it has a bias: training a drafter for it, and drafting over a part "
                "of the vocabulary, are not implemented"
            )
    return weight_VD


def _num_read(chosen_LTK: Tensor) -> float:
    """How many experts a layer reads for the experts of each token of L layers, the mean; waits for the device."""
    return sum(len(set(chosen.flatten().tolist()) - {-1}) for chosen in chosen_LTK.cpu()) / len(chosen_LTK)

"""The target interface: the forward pass that every engine round calls.

Implementations: the PyTorch decoder, Transformers models and the native pass. `forward(ForwardBatch) -> ForwardOutput`
appends
the given tokens to the cache; `cache.rollback` removes rejected ones.
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
"""Default number of tokens per cache row."""


class Sizes(Protocol):
    """Sizes that a drafter must match, of a loaded target or a config."""

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(slots=True)
class ForwardBatch:
    """Tokens of several rows, packed one row after another: T = sum(counts) tokens."""

    rows: list[int]
    starts: list[int]
    """Position of each row's first token; equals the row's cached length."""
    counts: list[int]
    tokens: list[int]
    logits: Literal["all", "last", "none"] = "all"
    """Compute logits of every token, of each row's last one, or of none (a prefill chunk that is not the last)."""
    only_argmax: bool = False
    """True if only the argmax of each logits row will be read; the implementation may omit the logits."""
    parents: list[int] | None = None
    """For a tree: each token's parent as an index among its row's tokens in this pass, -1 if the token follows the
    cache; parents come first. None: every token follows the previous one."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> list[int]:
        """Position of each token in its text: one after its parent. (Its cache index is start + index in its row.)"""
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
        """Raises UnsupportedModelError for a tree; for implementations that support only chains."""
        if self.parents is not None:
            raise UnsupportedModelError("this target cannot check trees of drafts: use a plan that drafts chains")


@dataclass(slots=True)
class ForwardOutput:
    """Results of a pass; tensors are views of buffers that the next pass may overwrite."""

    logits_TV: Tensor | None
    """Logits [T, V] for "all", [B, V] for "last"; float32 or the model's dtype. None for "none", or if `only_argmax`
    omitted them."""
    taps_TF: Tensor | None
    """[T, len(tap_layers) * hidden_size], concatenated outputs of the tapped layers; None without taps."""
    argmax_T: list[int] | None = None
    """Result of `best_T`, if the pass computed it."""

    def best_T(self) -> list[int]:
        """First token with the largest logit of each row; -1 if that is not finite or any logit is NaN."""
        if self.argmax_T is not None:
            return self.argmax_T
        assert self.logits_TV is not None
        # float32 first: PyTorch's bfloat16 argmax is five times slower on CPU, and widening preserves the order
        logits_TV = self.logits_TV.float()
        best_T1 = logits_TV.argmax(-1, keepdim=True)  # PyTorch's argmax returns NaN as the largest
        return best_T1.masked_fill(~logits_TV.gather(-1, best_T1).isfinite(), -1).flatten().tolist()


@dataclass(frozen=True, slots=True)
class EndScales:
    """Scale factors of a model's embedding and LM head, applied in addition to their matrices."""

    embedding: float = 1.0
    """Factor on rows of the embedding."""
    logits: float = 1.0
    """Factor on the head's output."""
    cap: float = 0.0
    """Soft cap of logits (tanh), applied after `logits`; 0 is off."""

    def of_logits(self, product_TV: Tensor) -> Tensor:
        """Logits from the output of the head's matrix."""
        if self.logits != 1.0:
            product_TV = product_TV * self.logits
        return torch.tanh(product_TV / self.cap) * self.cap if self.cap else product_TV


PLAIN_ENDS = EndScales()


class Target(ABC):
    """A causal language model with its KV cache."""

    cache: KVCache
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    """Maximum context length in tokens."""
    weight_bytes: int
    """Bytes that one pass reads; see Machine.ceiling_tokens_per_s."""
    tap_layers: tuple[int, ...] = ()
    is_width_invariant: bool = False
    """True if a position's result has the same bits for any batch and any split of its row into passes."""

    takes_trees: bool = False
    """True if `forward` supports trees of tokens (`ForwardBatch.parents`)."""

    has_own_threads: bool = False
    """True if it computes on its own threads; PyTorch's idle threads spin and would slow them down."""

    overwrites_taps: bool = True
    """True if the next pass may overwrite the taps; they must be copied to be kept longer."""

    _experts_read: float | Tensor | None = None

    recorder: Recorder | None = None
    """Records and replays passes of fixed shape, also those of drafters; None for a target that does not."""

    ends: EndScales = PLAIN_ENDS
    """Scale factors not contained in the embedding and head matrices. Drafters read the matrices and have factors of
    their own."""

    @property
    def experts_read(self) -> float | None:
        """Mean number of experts per layer read by the last pass, over layers with experts; None without experts."""
        if isinstance(self._experts_read, Tensor):
            self._experts_read = _num_read(self._experts_read)
        return self._experts_read

    @experts_read.setter
    def experts_read(self, read: float | Tensor | None) -> None:
        """`read`: the number, or the experts of each token [layers, tokens, experts], which are counted on access."""
        self._experts_read = read

    def set_taps(self, tap_layers: tuple[int, ...]) -> None:
        """Choose the layers whose outputs `forward` returns (0-based; layer l is Transformers' hidden_states[l +
        1])."""
        self.tap_layers = tuple(tap_layers)

    @property
    def recording_s(self) -> float:
        """Total seconds spent on recording; not part of any round's time."""
        return 0.0 if self.recorder is None else self.recorder.seconds

    def record(self, most_count: int) -> None:
        """Record decode passes of up to `most_count` tokens per row, for every number of rows, with the current taps.

        No-op without a recorder. Takes seconds on CUDA; `allocate_cache` discards the recordings."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, given by Hugging Face name with unchanged shapes. `cache` is replaced by an empty one.
        Tensors are copied; memory must suffice for both sets meanwhile.

        Raises ModelFileError naming a tensor that is unknown, missing, not finite or wrongly shaped, leaving everything
        unchanged; UnsupportedModelError if the implementation cannot replace weights.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} keeps the weights it was loaded with: new ones go into paceline's own decoder "
            "only (its "
            "families stand in docs/reference/families.md)"
        )

    @abstractmethod
    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        """Replace `cache` by an empty one of this size. Raises MemoryBudgetError or ContextLengthError."""

    def check_len(self, max_len: int) -> None:
        """Raises ContextLengthError if the model's context is shorter than `max_len`."""
        if max_len > self.max_position:
            raise ContextLengthError(
                f"max_len {max_len} is beyond the model's {self.max_position} tokens: lower max_len"
            )

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the tokens, append their keys and values to the cache, and return logits and taps."""

    @abstractmethod
    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        """Rows of the embedding matrix [T, D]; without `ends`."""

    @abstractmethod
    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        """Product [T, V] of normed final hidden states [T, D] with the head matrix; without `ends`."""

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Input embeddings [T, D] of token ids [T], as the first layer receives them."""
        embedded_TD = self.matrix_embed(tokens_T)
        return embedded_TD if self.ends.embedding == 1.0 else embedded_TD * self.ends.embedding

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] of normed final hidden states [T, D]."""
        return self.ends.of_logits(self.matrix_head(hidden_TD))


def head_weight(target: Target) -> Tensor:
    """The target's head as a matrix [V, D], without its scale factors (`Target.ends`).

    Computed by applying the head to unit vectors. Raises UnsupportedModelError for a head that is not a plain matrix.
    """
    with torch.no_grad():  # not inference mode: losses need this matrix in their backward pass
        eye = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
        weight_VD = target.matrix_head(eye).T.to(target.dtype, copy=True)  # exact: each logit is one weight
        probe = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0))
        probe = probe.to(target.device, target.dtype)
        expected = probe.float() @ weight_VD.float().T
        if (target.matrix_head(probe).float() - expected).abs().max() > 0.05 * expected.abs().max():
            raise UnsupportedModelError(
                "this target's head is no plain matrix, it has a bias: training a drafter for it, and drafting over a "
                "part "
                "of the vocabulary, are not implemented"
            )
    return weight_VD


def _num_read(chosen_LTK: Tensor) -> float:
    """Mean number of distinct experts per layer, from the experts of each token; waits for the device."""
    return sum(len(set(chosen.flatten().tolist()) - {-1}) for chosen in chosen_LTK.cpu()) / len(chosen_LTK)

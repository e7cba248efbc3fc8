"""The interface of target models: `Target`, with the forward pass that runs in every round of decoding.

`forward(ForwardBatch) -> ForwardOutput` appends the given tokens to the cache; `cache.rollback` removes rejected ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.errors import ContextLengthError, UnsupportedModelError
from paceline.model.kv_cache import KVCache
from paceline.model.torch.cuda_graphs import Recorder

DEFAULT_MAX_LEN = 2048
"""Default number of tokens per cache row."""


class Sizes(Protocol):
    """Sizes of a model, with which a drafter's are compared. Implemented by loaded targets (`Target`) and by
    configs."""

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(slots=True)
class ForwardBatch:
    """Input of a target pass: T = sum(counts) new tokens of several cache rows, packed one row after another."""

    rows: list[int]
    starts: list[int]
    """Position of each row's first new token: the number of tokens that the row has cached."""
    counts: list[int]
    tokens: list[int]
    logits: Literal["all", "last", "none"] = "all"
    """Compute logits of every token, of each row's last one, or of none (for all chunks of a prompt but its last)."""
    only_argmax: bool = False
    """The caller reads only the argmax of each row of logits; the implementation may omit the logits."""
    parents: list[int] | None = None
    """Parent of each token, if each row's tokens form a tree; None: every token follows the previous one.

    It is an index among the row's tokens in this pass, -1 if the token follows the cache. Parents precede their
    children.
    """

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> list[int]:
        """Position of each token in its text, for RoPE. A token without a parent has its row's position in `starts`;
        any other has its parent's position + 1. In a chain the parent is the token before.

        In a tree, tokens of equal depth have equal positions, although they have different indices in the cache.
        """
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
        """Raise UnsupportedModelError if the batch contains trees."""
        if self.parents is not None:
            raise UnsupportedModelError("this target cannot check trees of drafts: use a plan that drafts chains")


@dataclass(slots=True)
class ForwardOutput:
    """Logits of a target pass and outputs of its tapped layers. They may be views of buffers that the next pass
    overwrites."""

    logits_TV: Tensor | None
    """Logits [T, V] for "all", [B, V] for "last"; float32 or the model's dtype. None for "none", or if omitted for
    `only_argmax`."""
    taps_TF: Tensor | None
    """Outputs of the tapped layers (`Target.set_taps`), concatenated: [T, layers * hidden_size]; None if there are
    none."""
    argmax_T: list[int] | None = None
    """Result of `best_T`, if the pass already computed it."""

    def best_T(self) -> list[int]:
        """Return the argmax of each row of logits, the lowest id if several are equal; -1 if the largest logit is not
        finite or any logit is NaN."""
        if self.argmax_T is not None:
            return self.argmax_T
        assert self.logits_TV is not None
        # float32 first: PyTorch's bfloat16 argmax is five times slower on CPU, and widening preserves the order
        logits_TV = self.logits_TV.float()
        best_T1 = logits_TV.argmax(-1, keepdim=True)  # PyTorch's argmax returns NaN as the largest
        return best_T1.masked_fill(~logits_TV.gather(-1, best_T1).isfinite(), -1).flatten().tolist()


@dataclass(frozen=True, slots=True)
class EndScales:
    """A model's scale factors for embedding and LM head, which the matrices do not contain."""

    embedding: float = 1.0
    """Factor on rows of the embedding."""
    logits: float = 1.0
    """Factor on the head's output."""
    cap: float = 0.0
    """Soft cap of logits, cap * tanh(logit / cap), applied after the factor `logits`; 0 is off."""

    def of_logits(self, product_TV: Tensor) -> Tensor:
        """Apply scale and soft cap to the product [T, V] of hidden states and head matrix; returns logits [T, V]."""
        if self.logits != 1.0:
            product_TV = product_TV * self.logits
        return torch.tanh(product_TV / self.cap) * self.cap if self.cap else product_TV


PLAIN_ENDS = EndScales()


class Target(ABC):
    """A causal language model with its KV cache: the model that speculative decoding accelerates."""

    cache: KVCache
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    """Maximum context length in tokens."""
    weight_bytes: int
    """Bytes of weights that one pass reads; they limit the decoding speed."""
    tap_layers: tuple[int, ...] = ()
    is_width_invariant: bool = False
    """True if a token's result has the same bits in any batch, however its row is split into passes."""

    takes_trees: bool = False
    """True if `forward` supports trees of draft tokens (`ForwardBatch.parents`)."""

    has_own_threads: bool = False
    """True if the target computes on its own threads. PyTorch's idle threads spin and would slow these down."""

    overwrites_taps: bool = True
    """True if the next pass may overwrite `taps_TF`; callers must then copy taps that they keep."""

    _experts_read: float | Tensor | None = None
    _shared: WeakValueDictionary[Hashable, Any] | None = None

    @property
    def shared(self) -> WeakValueDictionary[Hashable, Any]:
        """Matrices and cache tensors that several drafters of this target use (`model/sharing.py`). An entry disappears
        with the last drafter that uses it."""
        if self._shared is None:
            self._shared = WeakValueDictionary()
        return self._shared

    recorder: Recorder | None = None
    """Captures passes of fixed shape, also those of drafters, as CUDA graphs and replays them; None if unsupported."""

    ends: EndScales = PLAIN_ENDS
    """Scale factors of `embed` and `head`. Drafters read the matrices without them and have factors of their own."""

    @property
    def experts_read(self) -> float | None:
        """Mean number of distinct experts that the last pass read per layer with experts; None for a model without
        experts."""
        if isinstance(self._experts_read, Tensor):
            self._experts_read = _num_read(self._experts_read)
        return self._experts_read

    @experts_read.setter
    def experts_read(self, read: float | Tensor | None) -> None:
        """Set the mean, over layers with experts, of the number of distinct experts that the last pass read. `read`:
        this mean, or the indices [layers, tokens, K] of the K experts of each token, from which the getter computes it;
        None for a model without experts."""
        self._experts_read = read

    def set_taps(self, tap_layers: tuple[int, ...]) -> None:
        """Choose the tapped layers: those whose outputs `forward` also returns, as input of drafters.

        Layers are numbered from 0; the output of layer l is Transformers' hidden_states[l + 1].
        """
        self.tap_layers = tuple(tap_layers)

    @property
    def recording_s(self) -> float:
        """Seconds spent so far on capturing CUDA graphs. Measured times of decoding rounds exclude them."""
        return 0.0 if self.recorder is None else self.recorder.seconds

    def record(self, most_count: int) -> None:
        """Capture decode passes as CUDA graphs for any number of rows, with up to `most_count` tokens per row. Does
        nothing for a target that cannot capture passes (`recorder` is None).

        Later passes replay the graphs. Call this after `set_taps`: a graph returns the outputs of the layers that were
        tapped when it was captured. `allocate_cache` discards the graphs. On CUDA, capturing takes seconds.
        """

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by `tensors`, (Hugging Face name, tensor) with the shapes of the old ones, and empty the
        cache.

        Tensors are copied; memory must suffice for both sets of weights meanwhile. Raises ModelFileError for a tensor
        that is unknown, missing, not finite or wrongly shaped; the target then stays unchanged. Raises
        UnsupportedModelError if the implementation cannot replace weights.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} keeps the weights it was loaded with: new ones go into paceline's own decoder only "
            "(its families stand in docs/reference/families.md)"
        )

    @abstractmethod
    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        """Replace `cache` by an empty one of this size. Raises MemoryBudgetError if there is not enough memory,
        ContextLengthError if `max_len` is beyond the model's context."""

    def check_len(self, max_len: int) -> None:
        """Raise ContextLengthError if the model's context is shorter than `max_len`."""
        if max_len > self.max_position:
            raise ContextLengthError(
                f"max_len {max_len} is beyond the model's {self.max_position} tokens: lower max_len"
            )

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the batch's tokens and append their keys and values to the cache; returns logits and outputs of tapped
        layers. Raises UnsupportedModelError for trees, unless `takes_trees` is True."""

    @abstractmethod
    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        """Return the embedding matrix's rows [T, D] of token ids [T], without the scale factor of `embed`."""

    @abstractmethod
    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        """Multiply normed final hidden states [T, D] by the head matrix; returns [T, V], without scale and soft cap."""

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the input embeddings [T, D] of token ids [T], scaled as the first layer receives them."""
        embedded_TD = self.matrix_embed(tokens_T)
        return embedded_TD if self.ends.embedding == 1.0 else embedded_TD * self.ends.embedding

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Compute the logits [T, V] of normed final hidden states [T, D]."""
        return self.ends.of_logits(self.matrix_head(hidden_TD))


def head_weight(target: Target) -> Tensor:
    """Return the matrix of the target's LM head [V, D], without the model's scale factors (`Target.ends`). Raises
    UnsupportedModelError if the head has a bias."""
    with torch.no_grad():  # not inference mode: losses need this matrix in their backward pass
        eye = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
        weight_VD = target.matrix_head(eye).T.to(target.dtype, copy=True)  # exact: each logit is one weight
        probe = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0))
        probe = probe.to(target.device, target.dtype)
        expected = probe.float() @ weight_VD.float().T
        if (target.matrix_head(probe).float() - expected).abs().max() > 0.05 * expected.abs().max():
            raise UnsupportedModelError(
                "this target's head is no plain matrix, it has a bias: training a drafter for it, and drafting over a "
                "part of the vocabulary, are not implemented"
            )
    return weight_VD


def _num_read(chosen_LTK: Tensor) -> float:
    """Mean number of distinct experts per layer, from the experts of each token; waits for the device."""
    return sum(len(set(chosen.flatten().tolist()) - {-1}) for chosen in chosen_LTK.cpu()) / len(chosen_LTK)

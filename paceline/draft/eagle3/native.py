"""EAGLE-3's decode path in native (C++) calls, for a native target, and its base class, which MTP's path shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.path import EagleNorms, within
from paceline.draft.level import Level
from paceline.model.config.decoder import DecoderConfig
from paceline.model.native.decoder import NativeDecoder, cache_view, layer_parts, native_cache, native_model
from paceline.model.native.library import Buffers, Matrix, Model, pointer
from paceline.model.native.packing import pack


class NativeChain:
    """Base class of native (C++) decode paths for networks that draft token by token, in one native pass per step.
    `TorchChain` describes its methods.

    For a draft tree, each pass also recomputes the round's earlier drafts, because a native pass must contain the
    parents of its tokens. These few additional tokens cost little.
    """

    reads_tokens = True
    """True if the native model embeds the tokens itself."""
    residual_dtype: torch.dtype
    weight_bytes: int
    """Bytes of the drafter's packed matrices, without the target's."""
    _model: Model

    def _open(self, shape: DecoderConfig, target: NativeDecoder, slack: int) -> None:
        """Allocate the cache. `slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        self.cache = native_cache(shape, target.cache.num_rows, target.cache.max_len, target.dtype, slack=slack)
        self._view, self._buffers = cache_view(self.cache), Buffers()
        self._drafts: dict[int, _Drafts] = {}
        """Drafts of the current round, by row."""

    @abstractmethod
    def logits(self, state_TD: Tensor) -> Tensor: ...

    @abstractmethod
    def next_state(self, hidden_TD: Tensor) -> Tensor:
        """Returns the states [T, D] that the next drafting step reads, from the hidden states after the last layer."""

    def _features(self, taps_TF: Tensor) -> Tensor:
        """Computes the input of the first drafting step [T, D] from the target's hidden states [T, F]."""
        return taps_TF

    def _inputs(self, tokens: list[int], hidden_TD: Tensor) -> Tensor:
        """Hidden states [T, D] that go into the native model."""
        return hidden_TD

    @torch.inference_mode()
    def extend(
        self, rows: list[int], starts: list[int], counts: list[int], tokens: list[int], taps_TF: Tensor
    ) -> Tensor:
        hidden_TD = self._pass(rows, starts, counts, tokens, self._features(taps_TF[: len(tokens)]), None)
        self.cache.append(rows, counts)
        return self.next_state(hidden_TD[torch.tensor([end - 1 for end in accumulate(counts)])])

    @torch.inference_mode()
    def step(self, level: Level, tokens: list[int], state_TD: Tensor) -> Tensor:
        starts, counts, parents = list[int](), list[int](), list[int]()
        read, states, output_rows, first = list[int](), list[Tensor](), list[int](), 0
        for row, base, before, seen in zip(level.rows, level.bases, level.before, level.seen, strict=True):
            if before == 0:
                self._drafts[row] = _Drafts()
            drafts, new = self._drafts[row], slice(first, first + len(seen))
            drafts.add(tokens[new], state_TD[new], [own[-2] if len(own) > 1 else -1 for own in seen])
            first += len(seen)
            known = before if drafts.is_chain else 0  # in a chain, the newest draft follows the cached ones
            starts.append(base + known)
            counts.append(len(drafts.tokens) - known)
            parents += [-1] if drafts.is_chain else drafts.parents
            read += drafts.tokens[known:]
            states += drafts.states[known:]
            output_rows += range(len(read) - len(seen), len(read))
        is_tree = any(parent >= 0 for parent in parents) or max(counts) > 1
        hidden_TD = self._pass(level.rows, starts, counts, read, torch.stack(states), parents if is_tree else None)
        return self.next_state(hidden_TD if len(output_rows) == len(read) else hidden_TD[torch.tensor(output_rows)])

    def _pass(
        self,
        rows: list[int],
        starts: list[int],
        counts: list[int],
        tokens: list[int],
        hidden_TD: Tensor,
        parents: list[int] | None,
    ) -> Tensor:
        """Hidden states [T, D] after the last layer. `hidden_TD`: features or states of the positions before the
        tokens."""
        hidden_TD = self._inputs(tokens, hidden_TD).float().contiguous()
        out_TD = torch.empty_like(hidden_TD)
        work = self._buffers.work
        work.num_rows, work.hidden, work.hidden_out = len(rows), pointer(hidden_TD), pointer(out_TD)
        self._buffers.fill(rows=rows, starts=starts, counts=counts, **({"tokens": tokens} if self.reads_tokens else {}))
        self._buffers.fill_parents(parents)
        self._model.forward(self._view, work)
        return out_TD


class Eagle3NativePath(EagleNorms, NativeChain):
    """EAGLE-3 in native (C++) calls, one pass through the layers per drafting step. With a target in block-quantised
    format, the drafter's matrices are rounded to Q8_0."""

    def __init__(self, config: Eagle3Config, network: Mapping[str, Tensor], target: NativeDecoder, slack: int) -> None:
        """`slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        shape, dtype = config.shape, target.dtype
        rounded = {name: tensor.detach().to("cpu", dtype) for name, tensor in network.items()}
        super().__init__(config, rounded, dtype, torch.float32)
        weights = {name: target.as_weight(tensor) for name, tensor in rounded.items()}
        self._fc, self._head = pack([weights["fc.weight"]], dtype), pack([weights["lm_head.weight"]], dtype)
        own = [pack([weights[name]], dtype) for name in ("embed_tokens.weight",) if name in weights]
        layers = [layer_parts(shape, at, within(weights, f"layers.{at}."), dtype) for at in range(shape.num_layers)]
        inner = [part for layer in layers for part in layer.values() if isinstance(part, Matrix)]
        self.weight_bytes = sum(matrix.num_bytes for matrix in (self._fc, self._head, *own, *inner))
        max_len = target.cache.max_len
        self._model = native_model(
            shape,
            dtype,
            max_len + slack,
            layers,
            first_position=1,
            embedding=own[0] if own else target.embedding_matrix,
            final_norm=rounded["norm.weight"].float().contiguous(),
            beside_norm=rounded["layers.0.hidden_norm.weight"].float().contiguous(),
            adds_to_normed=int(config.norm_before_residual),
        )
        self._open(shape, target, slack)

    @torch.inference_mode()
    def logits(self, state_TD: Tensor) -> Tensor:
        """Returns the logits [T, V] of T drafting states, over the draft vocabulary, float32."""
        return self._head.multiply(self.head_input(state_TD), self._dtype)

    def _features(self, taps_TF: Tensor) -> Tensor:
        return self._fc.multiply(self.normed_features(taps_TF), self._dtype)


class _Drafts:
    """Drafts of one row in this round, entry by entry."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[Tensor] = []
        self.parents: list[int] = []
        self.is_chain = True
        """True if every draft follows the previous one."""

    def add(self, tokens: list[int], state_TD: Tensor, parents: list[int]) -> None:
        self.is_chain = self.is_chain and parents == [len(self.tokens) - 1]
        self.tokens += tokens
        self.states += state_TD.unbind()
        self.parents += parents

"""Packs: blocks of one or several documents as tensors, for one forward and backward pass of the network. A block is an
anchor (a token of the text) and the draft positions after it.

Linear layers process all positions of a pack together; attention separates documents. The training loop handles only
documents, anchors and labels, so it trains any drafting method that has a `Trainable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.train.documents.dataset import Document, labels_of
from paceline.train.features.hidden_states import FeatureSource
from paceline.train.learn.attention import Layout, make_attention
from paceline.train.learn.losses import Head, Slots

Chosen = tuple[int, NDArray[np.int64]]
"""(document number, positions of the anchors of its blocks). A block is an anchor and the draft positions after it."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Inputs and labels of one forward and backward pass: a batch of A training blocks from some documents, with K =
    block_size - 1 draft positions each."""

    layout: Layout
    anchors_A: Tensor
    """Token ids of the anchors."""
    taps_NF: Tensor
    """Hidden states of some target layers at the N context positions: each document's positions before its last anchor
    in this pack."""
    slots: Slots
    behind_N: Tensor
    """Token id after each context position, for drafters that also read embeddings."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> Pack:
        """Returns a copy of the pack in which each tensor is replaced by `change(tensor)`, for example to copy the pack
        to another device."""
        slots, final = self.slots, self.slots.final_AKD
        return Pack(
            replace(self.layout, anchors=tuple(map(change, self.layout.anchors))),
            change(self.anchors_A),
            change(self.taps_NF),
            Slots(change(slots.labels_AK), change(slots.valid_AK), None if final is None else change(final)),
            change(self.behind_N),
        )

    @property
    def before_AK(self) -> Tensor:
        """Token id before each draft position, [A, K]: the anchor, then the target's tokens; 0 after the document's
        end."""
        tokens_AK = torch.where(self.slots.valid_AK, self.slots.labels_AK, 0).long()
        return torch.cat([self.anchors_A[:, None].to(tokens_AK), tokens_AK[:, :-1]], dim=1)

    def tensors(self) -> Iterator[Tensor]:
        slots = self.slots
        yield from (*self.layout.anchors, self.anchors_A, self.taps_NF, slots.labels_AK, slots.valid_AK, self.behind_N)
        if slots.final_AKD is not None:
            yield slots.final_AKD


@dataclass(frozen=True, slots=True)
class Packer:
    """Assembles packs (batches of blocks) from documents and the target's hidden states for them."""

    block_size: int
    documents: Sequence[Document]
    features: FeatureSource
    device: torch.device | str = "cpu"
    window: int | None = None
    """Largest sliding window of the network's layers, in positions; None if a layer attends to all."""

    def pack(self, chosen: list[Chosen]) -> Pack:
        size, device, anchors = self.block_size, self.device, [anchors_A for _, anchors_A in chosen]
        labels, valid, taps, finals, tokens, next_tokens, starts = [], [], [], [], [], [], []
        for number, anchors_A in chosen:
            document, features = self.documents[number], self.features.of(number)
            labels_AK, valid_AK = labels_of(document, anchors_A, size)
            labels.append(labels_AK)
            valid.append(valid_AK)
            context = context_of(anchors_A, self.window)
            taps.append(features.taps_SF[context.start : context.stop])
            starts.append(context.start)
            if features.final_SD is not None:
                # A hidden state predicts the next token: that of slot k, from 0, is predicted at anchor + k.
                before_AK = np.minimum(anchors_A[:, None] + np.arange(size - 1), len(document) - 1)
                finals.append(features.final_SD[torch.from_numpy(before_AK)])
            tokens.append(document.tokens[anchors_A])
            next_tokens.append(document.tokens[context.start + 1 : context.stop + 1])
        anchors = tuple(torch.from_numpy(anchors_A).to(device) for anchors_A in anchors)
        layout = Layout(tuple(map(len, taps)), anchors, size, tuple(starts) if any(starts) else ())
        slots = Slots(
            torch.from_numpy(np.concatenate(labels)).to(device),
            torch.from_numpy(np.concatenate(valid)).to(device),
            torch.cat(finals).to(device) if finals else None,
        )
        anchor_ids_A, behind_N = (
            torch.from_numpy(np.concatenate(ids)).long().to(device) for ids in (tokens, next_tokens)
        )
        return Pack(layout, anchor_ids_A, torch.cat(taps).to(device), slots, behind_N)


def context_of(anchors_A: NDArray[np.int64], window: int | None) -> range:
    """Returns the context of some blocks of one document, as a range of positions. It covers all positions that the
    blocks attend to, up to the last anchor (excluded). anchors_A [A]: positions of the blocks' anchors. `window`:
    largest sliding window of the network's layers, in positions; None if a layer attends to all positions."""
    return range(0 if window is None else max(0, int(anchors_A.min()) - window + 1), int(anchors_A.max()))


@dataclass(frozen=True, slots=True)
class PackBudget:
    """The largest number of blocks and of positions in one pack (batch of training blocks)."""

    blocks: int
    """Maximum number of blocks in a pack; a pack of a single document may have more."""
    tokens: int | None = None
    """Maximum number of context and draft positions in a pack; None for no limit. A document with more positions is
    split into parts; each has some of its blocks, with their full context. One part alone may exceed the limit if it
    has at most as many (query, context key) pairs as a pack of `tokens` positions can have, or only one block."""
    block_size: int = 1
    window: int | None = None
    """Largest sliding window of the network's layers, in positions; None if a layer attends to all."""

    def size(self, anchors_A: NDArray[np.int64]) -> int:
        """Returns the number of positions that one document takes in a pack: its context, and the blocks at `anchors_A`
        (positions in the document)."""
        return len(context_of(anchors_A, self.window)) + len(anchors_A) * self.block_size

    def pieces(self, chosen: Chosen) -> Iterator[Chosen]:
        """Splits the blocks of one document into parts that each fit one pack (batch of training blocks); yields the
        parts in the order of their anchors. `chosen`: (document number, positions of the blocks' anchors), as are the
        parts. If all blocks fit, `chosen` is the only part."""
        number, anchors_A = chosen
        if self.tokens is None or self.size(anchors_A) <= self.tokens:
            yield chosen
            return
        anchors_A, begin = np.sort(anchors_A), 0
        for end in range(1, len(anchors_A) + 1):
            # One block alone is yielded even if it does not fit.
            if end == len(anchors_A) or not self._fits(anchors_A[begin : end + 1]):
                yield number, anchors_A[begin:end]
                begin = end

    def _fits(self, anchors_A: NDArray[np.int64]) -> bool:
        assert self.tokens is not None
        # tokens^2 / 4: the most pairs of a pack of `tokens` positions, half of them context.
        pairs = len(anchors_A) * self.block_size * len(context_of(anchors_A, self.window))
        return self.size(anchors_A) <= self.tokens or pairs <= self.tokens**2 // 4


def split_into_packs(chosen: list[Chosen], budget: PackBudget) -> Iterator[list[Chosen]]:
    """Groups blocks into packs (batches) within `budget`; yields each pack's blocks. Blocks are (document number,
    positions of their anchors). A document's blocks stay together, unless they take too many positions for one pack."""
    group: list[Chosen] = []
    num_blocks = num_tokens = 0
    for document in chosen:
        for piece in budget.pieces(document):
            size = budget.size(piece[1])
            is_over = budget.tokens is not None and num_tokens + size > budget.tokens
            if group and (is_over or num_blocks + len(piece[1]) > budget.blocks):
                yield group
                group, num_blocks, num_tokens = [], 0, 0
            group.append(piece)
            num_blocks, num_tokens = num_blocks + len(piece[1]), num_tokens + size
    if group:
        yield group


def heldout_anchors(documents: Sequence[Document], number: int) -> list[Chosen]:
    """Returns (document number, positions of its anchors) for every document: up to `number` evenly spread anchors, the
    same in every call."""
    return [
        # Up to len - 2: the last anchor, too, has a token after it.
        (index, np.unique(np.linspace(document.answer_start, len(document) - 2, number).astype(np.int64)))
        for index, document in enumerate(documents)
    ]


class Trainable(Protocol):
    """Interface of a drafter in training; computes the hidden states from which its loss is computed."""

    network: nn.Module
    """The trained weights, float32. Checkpoints hold its `state_dict`."""
    raw: dict[str, Any]
    """config.json of its checkpoints."""
    block_size: int
    """Positions per block: the anchor and K = block_size - 1 draft positions."""
    layers: Iterable[nn.Module]
    """Modules of `network` that run one after another; each is sharded, or recomputed in the backward pass,
    separately."""

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        """Returns hidden states [A * K, D] (A blocks, K draft positions each) from which the LM head predicts the
        tokens at the draft positions; differentiable. embedding_VD [V, D]: the target's embedding matrix, in float32 or
        a 16-bit dtype. With `is_autocast`, matrix products are computed in bfloat16."""
        ...


class DFlashTrainable(Trainable):
    """A DFlash drafter in training. The input of a block is [anchor, MASK, MASK, ...]. Each layer attends to the
    context by keys and values, which are computed from hidden states of some target layers."""

    def __init__(self, network: DFlashNetwork, raw: dict[str, Any], attention: str = "auto") -> None:
        self.network, self.raw, self.layers = network, raw, network.layers
        self.block_size = network.config.block_size
        self._config, self._attention = network.config, attention

    @property
    def context_window(self) -> int | None:
        """Largest sliding window of the layers, in positions; None if a layer attends to all."""
        shape = self._config.shape
        windows = [shape.window(index) for index in range(shape.num_layers)]
        return None if None in windows else max(window for window in windows if window is not None)

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        size, mask = (len(pack.anchors_A), self.block_size), self._config.mask_token_id
        tokens_AB = torch.full(size, mask, device=embedding_VD.device)
        tokens_AB[:, 0] = pack.anchors_A
        return self.hidden_of(tokens_AB, pack, embedding_VD, is_autocast)

    def hidden_of(self, tokens_AB: Tensor, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        """Returns the hidden states of the draft positions, [A * K, D], as `hidden` does, but for the input tokens
        tokens_AB instead of [anchor, MASK, MASK, ...]. tokens_AB [A, B]: token ids of A blocks of B = block_size = K +
        1 positions."""
        config = self._config
        embedded_TD = F.embedding(tokens_AB.flatten(), embedding_VD).float() * config.input_embedding_scale
        dtype = torch.bfloat16 if is_autocast else torch.float32
        attend = make_attention(self._attention, config, pack.layout, dtype)
        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            taps_NF = pack.taps_NF if is_autocast else pack.taps_NF.float()
            hidden_TD = self.network(embedded_TD, taps_NF, attend)
        return hidden_TD.unflatten(0, (-1, self.block_size))[:, 1:].flatten(0, 1)

    @torch.no_grad()
    def right(self, hidden_TD: Tensor, pack: Pack, head: Head, embedding_VD: Tensor) -> Tensor:
        """Returns bool [A, K] (A blocks, K draft positions each): True where the drafter's most probable token is the
        target's; False after the document's end. hidden_TD [A * K, D]: result of `hidden` for the same pack; `head`:
        the LM head; `embedding_VD`: used only by subclasses."""
        rows_R, reached_R = head.local(pack.slots.labels_AK.flatten())
        right_R = (head.logits(hidden_TD).argmax(-1) == rows_R) & reached_R
        return right_R.view(pack.slots.valid_AK.shape) & pack.slots.valid_AK

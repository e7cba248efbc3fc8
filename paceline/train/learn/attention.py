"""Attention of many training blocks at once, in three implementations with equal results
(tests/train/test_attention.py).

A block attends to its document's context strictly before its anchor, and to its own draft positions; never to another
block or document. `SplitAttention` multiplies queries by the shared context once per document, and by their own block
separately: no copies of the context and no masked products. `SdpaAttention` is one call with a packed mask.
`FlexAttention` skips masked tiles: for GPUs, compiled.

Positions are absolute. A sliding window applies per query, as in serving; a causal mask hides only later positions of
the own block.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import Attend, visible
from paceline.model.torch.attention import Rope, rope_tables
from paceline.model.torch.fused import rotate
from paceline.model.torch.sdpa import working_kernels


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes the contents of a pack (a batch of training blocks from one or more documents): the context positions
    and the blocks of each document. A pack's tensors hold the context positions of one document after the other, and
    the blocks in the same order of documents."""

    context_lens: tuple[int, ...]
    """Number of context positions per document."""
    anchors: tuple[Tensor, ...]
    """Per document, the absolute positions [A] of its blocks' anchors."""
    block_size: int
    context_starts: tuple[int, ...] = ()
    """Absolute position of each document's first context position; if empty, 0 for all."""

    @property
    def starts(self) -> tuple[int, ...]:
        return self.context_starts or (0,) * len(self.context_lens)

    def block_positions(self) -> Tensor:
        """Returns the positions of the blocks' tokens in their documents, [T], block after block; T = number of blocks
        * block_size."""
        anchors = torch.cat(self.anchors)
        return (anchors[:, None] + torch.arange(self.block_size, device=anchors.device)).flatten()

    def context_positions(self) -> Tensor:
        device = self.anchors[0].device
        spans = zip(self.starts, self.context_lens, strict=True)
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in spans])


class _PackedAttention(ABC):
    """Base class: applies rotary embeddings, then calls the implementation."""

    def __init__(self, config: DFlashConfig, layout: Layout, dtype: torch.dtype) -> None:
        self.config, self.layout = config, layout
        context_ends = [start + length for start, length in zip(layout.starts, layout.context_lens, strict=True)]
        longest = max(*context_ends, 1 + max(int(anchors_A.max()) for anchors_A in layout.anchors))
        tables = rope_tables(config.shape, longest + layout.block_size)
        rope = Rope(*(table.to(layout.anchors[0].device, dtype) for table in tables))
        # (cos, signed sin), shared by all layers
        self._block = rope.tables_at(layout.block_positions())
        self._context = rope.tables_at(layout.context_positions())
        kinds = [(config.shape.window(index), config.is_causal[index]) for index in range(config.shape.num_layers)]
        plans = {kind: self._plan(*kind) for kind in set(kinds)}
        self._plans = [plans[kind] for kind in kinds]

    def __call__(
        self, layer: int, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        query_THD = rotate(query_THD, *self._block)
        own = (rotate(own[0], *self._block), own[1])
        context = (rotate(context[0], *self._context), context[1])
        return self._attend(self._plans[layer], query_THD, own, context)

    @abstractmethod
    def _plan(self, window: int | None, is_causal: bool) -> Any:
        """Prepares what layers with this window and causality need, once per pack."""

    @abstractmethod
    def _attend(
        self, plan: Any, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Returns the attention output [T, heads * head_dim] of rotated queries and keys."""


class SplitAttention(_PackedAttention):
    """Computes attention in a pack (batch of training blocks) one document at a time. The scores of a query with the
    document's context and with its own block are computed separately, followed by one softmax over both."""

    def _plan(self, window: int | None, is_causal: bool) -> list[Tensor]:
        """Returns an additive mask [A, 1, B, N + B] per document."""
        documents = zip(self.layout.anchors, self.layout.starts, self.layout.context_lens, strict=True)
        return [
            self._mask(anchors_A, range(start, start + length), window, is_causal)
            for anchors_A, start, length in documents
        ]

    def _mask(self, anchors_A: Tensor, context: range, window: int | None, is_causal: bool) -> Tensor:
        slots_B = torch.arange(self.layout.block_size, device=anchors_A.device)
        context_N = torch.arange(context.start, context.stop, device=anchors_A.device)
        sees_context = (context_N < anchors_A[:, None])[:, None, :].expand(-1, len(slots_B), -1)
        if window is not None:
            query_AB = anchors_A[:, None] + slots_B
            sees_context = sees_context & (query_AB[:, :, None] - context_N < window)
        sees_own = visible(slots_B, slots_B, window, is_causal).expand(len(anchors_A), -1, -1)
        is_visible = torch.cat([sees_context, sees_own], dim=-1)
        return torch.zeros(is_visible.shape, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))[:, None]

    def _attend(
        self, plan: list[Tensor], query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        layout, parts = self.layout, []
        first_slot = first_position = 0
        for mask, anchors_A, length in zip(plan, layout.anchors, layout.context_lens, strict=True):
            slots = slice(first_slot, first_slot := first_slot + len(anchors_A) * layout.block_size)
            positions = slice(first_position, first_position := first_position + length)
            own_part, context_part = [part[slots] for part in own], [part[positions] for part in context]
            parts.append(self._document(mask, query_THD[slots], own_part, context_part))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _document(self, mask: Tensor, query_THD: Tensor, own: list[Tensor], context: list[Tensor]) -> Tensor:
        """Attends for one document. The G query heads of a key head are additional rows of the same product."""
        num_blocks, size = len(mask), self.layout.block_size
        kv_heads, head_dim = own[0].shape[1:]
        length = len(context[0])
        query = query_THD.view(num_blocks, size, kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4)  # [KV, A, G, B, D]
        group = query.shape[2]
        query = (query * head_dim**-0.5).reshape(kv_heads, num_blocks, group * size, head_dim)
        own_key, own_value = (part.view(num_blocks, size, kv_heads, head_dim).permute(2, 0, 1, 3) for part in own)
        context_key, context_value = (part.transpose(0, 1) for part in context)  # [KV, N, D]
        to_context = torch.bmm(query.flatten(1, 2), context_key.transpose(1, 2)).unflatten(1, (num_blocks, -1))
        to_own = torch.matmul(query, own_key.transpose(2, 3))
        # With a mask of the products' dtype, scores take half the bytes; softmax is computed in float32 anyway.
        scores = torch.cat([to_context, to_own], dim=-1).unflatten(2, (group, size)) + mask.to(to_own.dtype)
        probs = torch.softmax(scores, dim=-1, dtype=scores.dtype).to(own_value.dtype)
        probs = probs.flatten(2, 3)  # [KV, A, G * B, N + B]
        out = torch.bmm(probs[..., :length].flatten(1, 2), context_value).unflatten(1, (num_blocks, -1))
        out = out + torch.matmul(probs[..., length:], own_value)
        return out.unflatten(2, (group, size)).permute(1, 3, 0, 2, 4).reshape(num_blocks * size, -1)


class SdpaAttention(_PackedAttention):
    """Computes attention with one scaled-dot-product call over a whole pack (batch of training blocks), with a dense
    mask."""

    def _plan(self, window: int | None, is_causal: bool) -> Any:
        """Returns a bool mask [T, N + T]."""
        places = self._places()
        slots, keys = (torch.arange(places_X.shape[1], device=places_X.device) for places_X in places)
        return mask_function(*places, window, is_causal)(None, None, slots[:, None], keys)

    def _attend(
        self, plan: Any, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        key, value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, own, strict=True))
        query = query_THD.transpose(0, 1)[None].to(value.dtype)
        return self._product(query, key.to(value.dtype), value, plan)[0].transpose(0, 1).flatten(1)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        with working_kernels(query.device):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=plan, enable_gqa=True)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Returns the inputs of `mask_function`: the places of the block positions [4, T] and of the keys [3, N + T],
        contexts first."""
        layout, device = self.layout, self.layout.anchors[0].device
        documents = torch.arange(len(layout.anchors), device=device)
        num_blocks = torch.tensor([len(anchors_A) for anchors_A in layout.anchors], device=device)
        context_document = documents.repeat_interleave(torch.tensor(layout.context_lens, device=device))
        slot_document = documents.repeat_interleave(num_blocks * layout.block_size)
        context_position, slot_position = layout.context_positions(), layout.block_positions()
        anchor = torch.cat(layout.anchors).repeat_interleave(layout.block_size)
        block = torch.arange(len(slot_document), device=device) // layout.block_size
        slots = torch.stack([slot_position, slot_document, block, anchor])
        context = torch.stack([context_position, context_document, torch.full_like(context_position, CONTEXT)])
        return slots, torch.cat([context, slots[:3]], dim=1)


CONTEXT, PADDING = -1, -2
"""Values used in place of a block number, for a context key and for padding."""


def mask_function(slots: Tensor, keys: Tensor, window: int | None, is_causal: bool) -> Callable[..., Tensor]:
    """Returns a mask function for FlexAttention: True where a query (a position of a block) may attend to a key. A
    query may attend to:
    - context keys of its document, before the anchor of its block;
    - keys of its own block; with `is_causal`, only those not after the query.

    With `window`, both are limited to keys fewer than `window` positions away. slots [4, T]: position, document, block,
    and anchor of the block, for each of the T queries. keys [3, S]: position, document and block (`CONTEXT` for a
    context key) of each of the S keys. The mask function can be compiled once and used for all packs (batches of
    training blocks); it ignores `batch` and `head`."""
    # Separate tensors: offsets into a common one would become constants of the compiled function.
    position_T, document_T, block_T, anchor_T = (row_T.clone() for row_T in slots)
    position_S, document_S, block_S = (row_S.clone() for row_S in keys)

    def is_visible(batch: Any, head: Any, slot: Tensor, key: Tensor) -> Tensor:
        distance = position_T[slot] - position_S[key]
        is_own = block_S[key] == block_T[slot]
        if is_causal:
            is_own = is_own & (distance >= 0)
        is_context = (block_S[key] == CONTEXT) & (document_S[key] == document_T[slot])
        is_seen = is_own | (is_context & (position_S[key] < anchor_T[slot]))
        return is_seen if window is None else is_seen & (distance.abs() < window)

    return is_visible


TILE = 128
"""Queries and keys per tile of the block mask."""


@functools.cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> tuple[Any, Any]:
    """Returns PyTorch's (flex_attention, create_block_mask), compiled by torch.compile with `backend` for inputs of any
    size."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    make = functools.partial(torch.compile, dynamic=True, backend=backend)
    return make(flex_attention), make(create_block_mask)


class FlexAttention(SdpaAttention):
    """Computes attention with PyTorch's FlexAttention over a whole pack (batch of training blocks); fully masked tiles
    cost nothing. Queries and keys are padded to whole tiles, so that one compiled kernel serves packs of all sizes."""

    def _plan(self, window: int | None, is_causal: bool) -> Any:
        slots, keys = self._places()
        # At least two tiles, and more tiles of keys than of slots: torch.compile specialises sizes that are 1 or equal.
        slots, keys = _padded(slots, 2 * TILE), _padded(keys, (2 + -(-slots.shape[1] // TILE)) * TILE)
        is_visible, sizes = mask_function(slots, keys, window, is_causal), (slots.shape[1], keys.shape[1])
        return self._functions(slots.device)[1](is_visible, None, None, *sizes, device=str(slots.device))

    def _product(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        num_slots, (filled_slots, filled_keys) = query.shape[2], plan.seq_lengths
        query = F.pad(query, (0, 0, 0, filled_slots - num_slots))
        key, value = (F.pad(part, (0, 0, 0, filled_keys - part.shape[2])) for part in (key, value))
        return self._functions(query.device)[0](query, key, value, block_mask=plan, enable_gqa=True)[:, :, :num_slots]

    def _functions(self, device: torch.device) -> tuple[Any, Any]:
        """Returns compiled functions on a GPU; plain ones on a CPU, for the tests."""
        if device.type == "cuda":
            return compiled()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        return flex_attention, create_block_mask


def _padded(places: Tensor, least: int) -> Tensor:
    """Pads places to whole tiles, to at least `least` positions, with at least one padding position."""
    size = max(least, (places.shape[1] // TILE + 1) * TILE)
    return F.pad(places, (0, size - places.shape[1]), value=PADDING)  # padding attends to padding: no row is empty


WAYS: dict[str, type[_PackedAttention]] = {"split": SplitAttention, "sdpa": SdpaAttention, "flex": FlexAttention}


def make_attention(way: str, config: DFlashConfig, layout: Layout, dtype: torch.dtype) -> Attend:
    """Returns the attention implementation for the pack that `layout` describes. `way`: split, sdpa, flex, or auto,
    which is flex on a GPU and split on a CPU."""
    if way == "auto":
        way = "flex" if layout.anchors[0].device.type == "cuda" else "split"
    return WAYS[way](config, layout, dtype)

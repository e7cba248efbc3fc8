"""Attention of many training blocks at once, in three ways that agree (tests/train/test_attention.py).

Every block of a document sees the document's context strictly before its anchor, and its own slots; never another block, never
another document. `SplitAttention` multiplies queries by the shared context once per document and by their own block apart: no
copy of the context per block, no products that a mask throws away. `SdpaAttention` is one call with a packed mask.
`FlexAttention` leaves out masked tiles: for GPUs, compiled.

Positions are absolute. A sliding window counts per query, as when serving; causality hides later slots of the own block only.
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the documents and blocks of one pack stand: contexts side by side, blocks in the order of their documents."""

    context_lens: tuple[int, ...]
    """Context positions per document, from its first one on."""
    anchors: tuple[Tensor, ...]
    """Per document: absolute positions [A] of its blocks' anchors."""
    block_size: int
    context_starts: tuple[int, ...] = ()
    """Absolute position of each document's first context position; without any they are all 0."""

    @property
    def starts(self) -> tuple[int, ...]:
        return self.context_starts or (0,) * len(self.context_lens)

    def block_positions(self) -> Tensor:
        """Absolute positions [T] of all slots, T = number of blocks * block_size."""
        anchors = torch.cat(self.anchors)
        return (anchors[:, None] + torch.arange(self.block_size, device=anchors.device)).flatten()

    def context_positions(self) -> Tensor:
        device = self.anchors[0].device
        spans = zip(self.starts, self.context_lens, strict=True)
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in spans])


class _PackedAttention(ABC):
    """What the three have in common: rotation before, one method per way of attending."""

    def __init__(self, config: DFlashConfig, layout: Layout, dtype: torch.dtype) -> None:
        self.config, self.layout = config, layout
        ends = [start + length for start, length in zip(layout.starts, layout.context_lens, strict=True)]
        longest = max(*ends, 1 + max(int(anchors_A.max()) for anchors_A in layout.anchors))
        tables = rope_tables(config.shape, longest + layout.block_size)
        rope = Rope(*(table.to(layout.anchors[0].device, dtype) for table in tables))
        # (cos, signed sin), looked up once for all layers
        self._block, self._context = rope.tables_at(layout.block_positions()), rope.tables_at(layout.context_positions())
        kinds = [(config.shape.window(index), config.is_causal[index]) for index in range(config.shape.num_layers)]
        plans = {kind: self._plan(*kind) for kind in set(kinds)}
        self._plans = [plans[kind] for kind in kinds]

    def __call__(self, layer: int, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor:
        query_THD = rotate(query_THD, *self._block)
        own = (rotate(own[0], *self._block), own[1])
        context = (rotate(context[0], *self._context), context[1])
        return self._attend(self._plans[layer], query_THD, own, context)

    @abstractmethod
    def _plan(self, window: int | None, is_causal: bool) -> Any:
        """What layers of this kind need to know, made once a pack."""

    @abstractmethod
    def _attend(self, plan: Any, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [T, heads * head_dim] from rotated queries and keys."""


class SplitAttention(_PackedAttention):
    """Context and own block as two products under one softmax, document by document."""

    def _plan(self, window: int | None, is_causal: bool) -> list[Tensor]:
        """Per document an additive mask [A, 1, B, N + B]."""
        documents = zip(self.layout.anchors, self.layout.starts, self.layout.context_lens, strict=True)
        return [
            self._mask(anchors_A, range(start, start + length), window, is_causal) for anchors_A, start, length in documents
        ]

    def _mask(self, anchors_A: Tensor, context: range, window: int | None, is_causal: bool) -> Tensor:
        slots_B = torch.arange(self.layout.block_size, device=anchors_A.device)
        context_N = torch.arange(context.start, context.stop, device=anchors_A.device)
        sees_context = (context_N < anchors_A[:, None])[:, None, :].expand(-1, len(slots_B), -1)
        if window is not None:
            query_AB = anchors_A[:, None] + slots_B
            sees_context = sees_context & (query_AB[:, :, None] - context_N < window)
        sees_own = visible(slots_B, slots_B, window, is_causal).expand(len(anchors_A), -1, -1)
        seen = torch.cat([sees_context, sees_own], dim=-1)
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]

    def _attend(
        self, plan: list[Tensor], query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        layout, parts = self.layout, []
        first_slot = first_position = 0
        for mask, anchors_A, length in zip(plan, layout.anchors, layout.context_lens, strict=True):
            slots = slice(first_slot, first_slot := first_slot + len(anchors_A) * layout.block_size)
            positions = slice(first_position, first_position := first_position + length)
            parts.append(
                self._document(mask, query_THD[slots], [part[slots] for part in own], [part[positions] for part in context])
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _document(self, mask: Tensor, query_THD: Tensor, own: list[Tensor], context: list[Tensor]) -> Tensor:
        """G query heads share a key head: they are further rows of the same product."""
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
        # A mask of the products' own type: sums and softmax are computed in float32 all the same, and kept in half the bytes.
        scores = torch.cat([to_context, to_own], dim=-1).unflatten(2, (group, size)) + mask.to(to_own.dtype)
        probs = torch.softmax(scores, dim=-1, dtype=scores.dtype).to(own_value.dtype).flatten(2, 3)  # [KV, A, G * B, N + B]
        out = torch.bmm(probs[..., :length].flatten(1, 2), context_value).unflatten(1, (num_blocks, -1))
        out = out + torch.matmul(probs[..., length:], own_value)
        return out.unflatten(2, (group, size)).permute(1, 3, 0, 2, 4).reshape(num_blocks * size, -1)


class SdpaAttention(_PackedAttention):
    """One scaled-dot-product call over all contexts and blocks of the pack, with a dense mask."""

    def _plan(self, window: int | None, is_causal: bool) -> Any:
        """Bool [T, N + T]."""
        places = self._places()
        slots, keys = (torch.arange(each.shape[1], device=each.device) for each in places)
        return sees(*places, window, is_causal)(None, None, slots[:, None], keys)

    def _attend(self, plan: Any, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor:
        key, value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, own, strict=True))
        query = query_THD.transpose(0, 1)[None].to(value.dtype)
        return self._product(query, key.to(value.dtype), value, plan)[0].transpose(0, 1).flatten(1)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=plan, enable_gqa=True)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where the slots [4, T] and the keys [3, N + T], contexts before slots, of a pack stand, as `sees` wants them."""
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


CONTEXT, NOWHERE = -1, -2
"""In place of a block's number: a key is of a context; a slot or key only fills up."""


def sees(slots: Tensor, keys: Tensor, window: int | None, is_causal: bool) -> Callable[..., Tensor]:
    """Whether a slot sees a key, by their numbers; `batch` and `head` do not matter.

    slots [4, T]: position, document, block, and the block's anchor. keys [3, S]: position, document, block. No other number
    enters, but the window's: what is compiled for one pack is right for the next.
    """
    # Tensors of their own: places in a common one would be compiled in.
    position_T, document_T, block_T, anchor_T = (each.clone() for each in slots)
    position_S, document_S, block_S = (each.clone() for each in keys)

    def seen(batch: Any, head: Any, slot: Tensor, key: Tensor) -> Tensor:
        distance = position_T[slot] - position_S[key]
        is_own = block_S[key] == block_T[slot]
        if is_causal:
            is_own = is_own & (distance >= 0)
        is_context = (block_S[key] == CONTEXT) & (document_S[key] == document_T[slot]) & (position_S[key] < anchor_T[slot])
        is_seen = is_context | is_own
        return is_seen if window is None else is_seen & (distance.abs() < window)

    return seen


TILE = 128
"""Slots and keys of one tile of the block mask."""


@functools.cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> tuple[Any, Any]:
    """(flex_attention, create_block_mask), compiled once for packs of every size; the former again for the second size."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    make = functools.partial(torch.compile, dynamic=True, backend=backend)
    return make(flex_attention), make(create_block_mask)


class FlexAttention(SdpaAttention):
    """FlexAttention over all contexts and blocks of the pack; tiles that the mask empties cost nothing.

    Slots and keys are filled up to whole tiles, so that few sizes occur and none has a compiled kernel of its own.
    """

    def _plan(self, window: int | None, is_causal: bool) -> Any:
        slots, keys = self._places()
        # Two tiles at least, and a tile more of keys than of slots: a size of 1, or one that equals another, is compiled apart.
        slots, keys = _filled(slots, 2 * TILE), _filled(keys, (2 + -(-slots.shape[1] // TILE)) * TILE)
        mask = self._functions(slots.device)[1]
        return mask(sees(slots, keys, window, is_causal), None, None, slots.shape[1], keys.shape[1], device=str(slots.device))

    def _product(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        num_slots, (filled_slots, filled_keys) = query.shape[2], plan.seq_lengths
        query = F.pad(query, (0, 0, 0, filled_slots - num_slots))
        key, value = (F.pad(each, (0, 0, 0, filled_keys - each.shape[2])) for each in (key, value))
        return self._functions(query.device)[0](query, key, value, block_mask=plan, enable_gqa=True)[:, :, :num_slots]

    def _functions(self, device: torch.device) -> tuple[Any, Any]:
        """Compiled on GPU, where the kernel is; as plain operations elsewhere, for the tests."""
        if device.type == "cuda":
            return compiled()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        return flex_attention, create_block_mask


def _filled(places: Tensor, least: int) -> Tensor:
    """With places of nowhere up to whole tiles, `least` of them or more, and one of them at the least."""
    size = max(least, (places.shape[1] // TILE + 1) * TILE)
    return F.pad(places, (0, size - places.shape[1]), value=NOWHERE)


WAYS: dict[str, type[_PackedAttention]] = {"split": SplitAttention, "sdpa": SdpaAttention, "flex": FlexAttention}


def make_attention(way: str, config: DFlashConfig, layout: Layout, dtype: torch.dtype) -> Attend:
    """`auto` takes flex on GPU, split elsewhere."""
    if way == "auto":
        way = "flex" if layout.anchors[0].device.type == "cuda" else "split"
    return WAYS[way](config, layout, dtype)

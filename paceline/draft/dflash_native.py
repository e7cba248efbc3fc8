"""DFlash's decode path as native calls: features to keys and values of all layers in one, the whole block pass in another.

Embedding and head are the target's own packed matrices; a draft vocabulary takes rows of the head as they are. Beside a target
that is read in blocks the drafter's matrices are rounded to Q8_0: half the bytes, and what it says is checked anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash_path import Drafts, Network
from paceline.model import native_lib as native
from paceline.model.blocks import quantise
from paceline.model.native_decoder import (
    NativeDecoder,
    cache_view,
    config_sizes,
    layer_struct,
    native_cache,
    pack,
    pack_vectors,
)
from paceline.model.native_lib import Buffers, CConfig, CLayer, Model, pointer
from paceline.model.rope import rope_tables


class NativePath:
    """A DraftPath for a native target."""

    def __init__(self, network: Network, target: NativeDecoder, draft_ids: Tensor | None = None) -> None:
        self.config, shape = network.config, network.config.shape
        self._dtype = target.dtype
        self._in_blocks = target.weight_format not in ("float32", "bfloat16")
        self._weights = {name: tensor.detach().to("cpu", target.dtype) for name, tensor in network.state_dict().items()}
        layers = [self._layer(index) for index in range(shape.num_layers)]
        self._head = target.head_matrix if draft_ids is None else target.head_matrix.select(draft_ids.tolist())
        slack = self.config.block_size
        max_len = target.cache.max_len
        cos, sin = (table.float().contiguous() for table in rope_tables(shape, max_len + slack))
        every = [f"layers.{index}.self_attn" for index in range(shape.num_layers)]
        context = [f"{name}.{which}_proj" for which in "kv" for name in every]
        parts: dict[str, Any] = {
            "fc": self._pack(["fc"]),
            "hidden_norm": self._vector("hidden_norm.weight"),
            "context_kv": self._pack(context),
            "context_bias": pack_vectors([self._weights.get(f"{name}.bias") for name in context]),
            "final_norm": self._vector("norm.weight"),
            "cos": cos,
            "sin": sin,
            "head": self._head,
            "embedding": target.embedding_matrix,
        }
        structs = (CLayer * shape.num_layers)(*(layer_struct(layer) for layer in layers))
        sizes = config_sizes(shape, target.dtype)
        config = CConfig(**sizes, layers=structs, embedding_scale=self.config.input_embedding_scale, **_handles(parts))
        self._model = Model(config, [layers, parts, structs])
        self.cache = native_cache(shape, target.cache.num_rows, max_len, target.dtype, slack=slack)
        self._view, self._buffers = cache_view(self.cache), Buffers()
        del self._weights

    def _vector(self, name: str) -> Tensor:
        return self._weights[name].float().contiguous()

    def _pack(self, names: list[str]) -> native.Matrix:
        weights = [self._weights[f"{name}.weight"] for name in names]
        return pack([quantise(weight, "Q8_0") for weight in weights] if self._in_blocks else list(weights), self._dtype)

    def _layer(self, index: int) -> dict[str, Any]:
        prefix, shape = f"layers.{index}", self.config.shape
        parts: dict[str, Any] = {
            "input_norm": self._vector(f"{prefix}.input_layernorm.weight"),
            "mlp_norm": self._vector(f"{prefix}.post_attention_layernorm.weight"),
            "q_norm": self._vector(f"{prefix}.self_attn.q_norm.weight"),
            "k_norm": self._vector(f"{prefix}.self_attn.k_norm.weight"),
            "window": shape.window(index) or 0,
            "is_causal": int(self.config.is_causal[index]),
        }
        for name, projections in (
            ("qkv", [f"{prefix}.self_attn.{which}_proj" for which in "qkv"]),
            ("output", [f"{prefix}.self_attn.o_proj"]),
            ("gate_up", [f"{prefix}.mlp.{which}_proj" for which in ("gate", "up")]),
            ("down", [f"{prefix}.mlp.down_proj"]),
        ):
            parts[name] = self._pack(projections)
            parts[f"{name}_bias"] = pack_vectors([self._weights.get(f"{projection}.bias") for projection in projections])
        return parts

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """As DraftPath.inject."""
        self._model.inject(self._view, rows, starts, counts, taps_TF)
        self.cache.append(rows, counts)

    def draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        """As DraftPath.draft; logits are float32."""
        num_rows, masks = len(rows), [self.config.mask_token_id] * (size - 1)
        wanted = [row * size + slot for row in range(num_rows) for slot in range(1, 1 + width)]
        logits_TV = torch.empty(len(wanted), self._head.rows) if with_logits else None
        work = self._buffers.work
        work.num_rows, work.num_logit_rows = num_rows, len(wanted)
        work.logits, work.logits_stride = pointer(logits_TV), self._head.rows
        self._buffers.fill(rows=rows, starts=[self.cache.lengths[row] for row in rows], counts=[size] * num_rows)
        self._buffers.fill(tokens=[token for anchor in anchors for token in (anchor, *masks)], logit_rows=wanted)
        best = self._buffers.room("argmax", len(wanted))
        self._model.forward(self._view, work)
        best_BK = [best[row * width : (row + 1) * width] for row in range(num_rows)]
        return best_BK, None if logits_TV is None else logits_TV.view(num_rows, width, -1)


def _handles(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part.handle if isinstance(part, native.Matrix) else pointer(part) for name, part in parts.items()}

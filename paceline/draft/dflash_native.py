"""DFlash's decode path as native calls: features to keys and values of all layers in one, the whole block pass in another.

Embedding and head are the target's own packed matrices; a draft vocabulary takes rows of the head as they are. Beside a target
that is read in blocks the drafter's matrices are rounded to Q8_0: half the bytes, and what it says is checked anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.draft.checkpoint import DFlashConfig
from paceline.draft.dflash_torch import Drafts
from paceline.model.blocks import Weight, quantise
from paceline.model.decoder import build_layers
from paceline.model.native_decoder import NativeDecoder, cache_view, layer_parts, native_cache, native_model, pack, pack_vectors
from paceline.model.native_lib import Buffers, pointer


class NativePath:
    """As TorchPath, for a native target; logits are float32."""

    def __init__(
        self, config: DFlashConfig, network: Mapping[str, Tensor], target: NativeDecoder, draft_ids: Tensor | None = None
    ) -> None:
        self.config, shape, dtype = config, config.shape, target.dtype
        in_blocks = target.weight_format not in ("float32", "bfloat16")
        rounded = {name: tensor.detach().to("cpu", dtype) for name, tensor in network.items()}
        weights = {name: quantise(tensor, "Q8_0") if in_blocks else tensor for name, tensor in rounded.items()}

        def make_layer(index: int, own: dict[str, Weight]) -> dict[str, Any]:
            return {**layer_parts(shape, index, own, dtype), "is_causal": int(config.is_causal[index])}

        layers, _ = build_layers(shape, weights.items(), make_layer, make_other=lambda name, weight: None)
        context = [f"layers.{index}.self_attn.{which}_proj" for which in "kv" for index in range(shape.num_layers)]
        self._head = target.head_matrix if draft_ids is None else target.head_matrix.select(draft_ids.tolist())
        slack, max_len = config.block_size, target.cache.max_len
        self._model = native_model(
            shape,
            dtype,
            max_len + slack,
            layers,
            fc=pack([weights["fc.weight"]], dtype),
            hidden_norm=rounded["hidden_norm.weight"].float().contiguous(),
            context_kv=pack([weights[f"{name}.weight"] for name in context], dtype),
            context_bias=pack_vectors([rounded.get(f"{name}.bias") for name in context]),
            final_norm=rounded["norm.weight"].float().contiguous(),
            head=self._head,
            embedding=target.embedding_matrix,
            embedding_scale=config.input_embedding_scale,
        )
        self.cache = native_cache(shape, target.cache.num_rows, max_len, dtype, slack=slack)
        self._view, self._buffers = cache_view(self.cache), Buffers()

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        self._model.inject(self._view, rows, starts, counts, taps_TF)
        self.cache.append(rows, counts)

    def draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
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

"""The decode paths of an MTP layer (its weights prepared for drafting with one target): PyTorch and native (C++)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.draft.eagle3.native import NativeChain
from paceline.draft.eagle3.path import TorchChain
from paceline.draft.mtp.checkpoint import MtpLayer
from paceline.model.backends import ROUTERS
from paceline.model.gguf.blocks import Weight
from paceline.model.native.decoder import NativeDecoder, layer_parts, native_model
from paceline.model.native.library import Matrix
from paceline.model.native.packing import pack
from paceline.model.target import Target
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope, rope_tables
from paceline.model.torch.decoder import Layer, LayerAttention
from paceline.model.torch.heads import Tables
from paceline.model.torch.parts import PackedLinear, Residual, RMSNorm


class MtpNorms:
    """Base class of the MTP layer's decode paths: norms before and after the layer, and the target's embedding and
    head."""

    def __init__(
        self, layer: MtpLayer, parts: Mapping[str, Tensor], target: Target, residual_dtype: torch.dtype
    ) -> None:
        """`parts`: the layer's tensors, in the target's dtype and on its device."""
        self._target, self._tells_normed = target, layer.tells_normed
        self._dtype, self._device, self.residual_dtype = target.dtype, target.device, residual_dtype
        eps, offset = layer.config.rms_norm_eps, layer.config.norm_offset
        self._embedding_norm, self._hidden_norm, self._final_norm = (
            RMSNorm(parts[f"{name}_norm.weight"], eps, offset) for name in ("embedding", "hidden", "final")
        )

    @torch.inference_mode()
    def logits(self, state_TD: Tensor) -> Tensor:
        """Returns the logits [T, V] of T drafting states, over the target's vocabulary."""
        return self._target.head(state_TD.to(self._dtype) if self._tells_normed else self._final_norm(state_TD))

    def next_state(self, hidden_TD: Tensor) -> Tensor:
        return self._final_norm(hidden_TD).to(self.residual_dtype) if self._tells_normed else hidden_TD

    def both(self, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """Returns the input [T, 2 D] of the layer's first matrix (`fc`). It concatenates the normed embeddings of T
        tokens and the normed hidden states `hidden_TD`."""
        embedded_TD = self._target.embed(tokens_T)
        return torch.cat([self._embedding_norm(embedded_TD), self._hidden_norm(hidden_TD)], dim=-1)


class MtpPath(MtpNorms, TorchChain):
    """The MTP layer in PyTorch operations on any device, with weights prepared for one target. Cache entry e combines
    the target's hidden state of position e with the embedding of the token after it."""

    def __init__(self, layer: MtpLayer, target: Target, slack: int) -> None:
        """`slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        shape, dtype, device = layer.config, target.dtype, target.device
        parts = {name: tensor.to(device, dtype, copy=True) for name, tensor in layer.tensors.items()}
        super().__init__(layer, parts, target, torch.float32 if device.type == "cpu" else dtype)
        self._fc = PackedLinear(parts.pop("fc.weight"))
        self._layers = [Layer.of(shape, 0, parts)]
        self.weight_bytes = self._fc.num_bytes + self._layers[0].num_bytes
        self._open(shape, target, Rope.of(shape, target.cache.max_len, dtype, device, slack=slack), slack)

    def _layers_of(
        self,
        plans: list[AttentionPlan],
        writer: CacheWriter,
        tables: Tables,
        tokens_T: Tensor,
        hidden_TD: Tensor,
        last_T: Tensor | None,
    ) -> Tensor:
        residual = Residual(self._fc(self.both(tokens_T, hidden_TD)).to(self.residual_dtype, copy=True))
        attention = LayerAttention(self.cache.keys[0], self.cache.values[0], plans[0], writer, self._rope, tables)
        self._layers[0].run(residual, attention)
        is_normed = self._tells_normed
        state_TD = residual.normed(self._final_norm).to(self.residual_dtype) if is_normed else residual.hidden_TD
        return state_TD if last_T is None else state_TD[last_T]


class MtpNativePath(MtpNorms, NativeChain):
    """The MTP layer in native (C++) calls: for each drafting step a product with `fc`, a pass through the layer, and a
    product with the target's own head, which is not copied.

    Supports every type of layer that a native target can have. With a target in block-quantised format the layer's
    matrices are rounded to Q8_0.
    """

    reads_tokens = False

    def __init__(self, layer: MtpLayer, target: NativeDecoder, slack: int) -> None:
        """`slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        shape, dtype, max_len = layer.config, target.dtype, target.cache.max_len
        rounded = {name: tensor.detach().to("cpu", dtype) for name, tensor in layer.tensors.items()}
        super().__init__(layer, rounded, target, torch.float32)
        weights: dict[str, Weight] = {
            name: tensor if name in ROUTERS else target.as_weight(tensor) for name, tensor in rounded.items()
        }
        self._fc = pack([weights.pop("fc.weight")], dtype)
        parts = layer_parts(shape, 0, weights, dtype)
        experts = [matrix for each in parts.get("experts", ()) for matrix in (each["gate_up"], each["down"])]
        matrices = [self._fc, *experts, *(part for part in parts.values() if isinstance(part, Matrix))]
        self.weight_bytes = sum(matrix.num_bytes for matrix in matrices)
        cos, sin = rope_tables(shape, max_len + slack, longest=max_len)
        final_norm = rounded["final_norm.weight"].float().contiguous()
        self._model = native_model(shape, dtype, max_len + slack, [parts], cos=cos, sin=sin, final_norm=final_norm)
        self._open(shape, target, slack)

    def _inputs(self, tokens: list[int], hidden_TD: Tensor) -> Tensor:
        return self._fc.multiply(self.both(torch.tensor(tokens, device=self._device), hidden_TD), self._dtype)

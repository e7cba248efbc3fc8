"""Per-layer embeddings, and what a layer does with them last (models with `DecoderConfig.layer_sizes`: Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.config.decoder import DecoderConfig
from paceline.model.layout import LAYER_FACTOR
from paceline.model.torch.parts import NoNorm, PackedLinear, Residual, RMSNorm, fuse, norm_of


class LayerInputs:
    """Computes per-layer embeddings (Gemma 4): a vector of I numbers for every token and layer, from the token's entry
    in a separate table and a projection of its embedding."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
        """`tensors`: those of the model outside its layers, by Hugging Face name."""
        assert config.layer_sizes is not None
        table = tensors["model.embed_tokens_per_layer.weight"]
        self._table, self._size = table, config.layer_sizes.input_size
        # Transformers rounds this factor to the weights' dtype, not the others.
        self._table_scale = float(torch.tensor(self._size**0.5, dtype=table.dtype))
        self._projection = PackedLinear(tensors["model.per_layer_model_projection.weight"])
        self._norm = norm_of(config, tensors["model.per_layer_projection_norm.weight"])
        self._scale = config.hidden_size**-0.5
        self.num_bytes = self._projection.num_bytes

    def __call__(self, tokens_T: Tensor, embedded_TD: Tensor) -> Tensor:
        """Compute the inputs [L, T, I] of L layers; embedded_TD: scaled embeddings [T, D] of the tokens."""
        own_TLI = F.embedding(tokens_T, self._table).unflatten(-1, (-1, self._size)) * self._table_scale
        projected_TX = self._projection(embedded_TD) * self._scale
        normed_TLI = self._norm(projected_TX.unflatten(-1, (-1, self._size)))
        return ((normed_TLI + own_TLI) * 2.0**-0.5).transpose(0, 1)


class LayerEnd:
    """The last step of a layer of Gemma 4: adds a gated update computed from per-layer embeddings, if the model has
    them, and multiplies the residual stream by a learned factor."""

    def __init__(self, config: DecoderConfig, parts: dict[str, Tensor]) -> None:
        self._factor = parts[LAYER_FACTOR]
        self._as_dtype = NoNorm(self._factor.dtype)
        self._gate: PackedLinear | None = None
        self.num_bytes = 0
        if config.layer_sizes is not None and config.layer_sizes.input_size:
            self._gate = fuse(parts, "per_layer_input_gate")
            self._projection = fuse(parts, "per_layer_projection")
            self._norm: RMSNorm = norm_of(config, parts["post_per_layer_input_norm.weight"])
            self.num_bytes = self._gate.num_bytes + self._projection.num_bytes

    def run(self, residual: Residual, input_TI: Tensor | None) -> None:
        """Apply the step to the residual stream, in place. input_TI: the layer's per-layer embeddings [T, I], if
        any."""
        if self._gate is not None and input_TI is not None:
            gate_TI = F.gelu(self._gate(residual.normed(self._as_dtype)), approximate="tanh")
            residual.add(self._projection(gate_TI * input_TI), self._norm)
        residual.hidden_TD.mul_(self._factor)

"""Matrix products with weights packed once for the device they run on.

On CPU the weight is reordered into oneDNN's blocked layout, which at 1 to 16 rows is 1.4 times as fast as `F.linear` in
bfloat16 and two to three times in float32 (docs/LOG.md). Elsewhere, and where oneDNN lacks the
dtype, it is `F.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_DECODE_ROWS = 8
"""Row count oneDNN is told to expect when it chooses the blocked layout; measured to suit 1 to 32."""


class PackedLinear:
    """y = x W^T + b for x [T, in] -> [T, out]; the original weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.numel() * weight.element_size()
        self._bias = bias
        self._is_packed = can_pack(weight)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _DECODE_ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
        else:
            self._weight = weight.contiguous()

    def __call__(self, inputs_TD: Tensor) -> Tensor:
        if self._is_packed:
            return self._multiply(inputs_TD, self._weight, self._bias, "none", [], "")
        return F.linear(inputs_TD, self._weight, self._bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can take this weight: on CPU, float32, or bfloat16 on a processor that multiplies it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension, result in the weight's dtype.

    On CPU it is computed by vector_norm and hypot, exactly and in half the time of `F.rms_norm` at one row.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._dtype = weight.dtype
        self._eps = eps
        self._is_cpu = weight.device.type == "cpu"
        size = weight.shape[-1]
        self._weight = weight.float() * size**0.5 if self._is_cpu else weight
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self._is_cpu:
            return F.rms_norm(inputs, inputs.shape[-1:], eps=self._eps).to(self._dtype) * self._weight
        scale = torch.hypot(torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32), self._floor)
        return inputs.div(scale).mul_(self._weight).to(self._dtype)

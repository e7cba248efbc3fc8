"""Building blocks of decoder layers: packed matrices, norms, the residual stream, gated MLPs and experts."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from paceline.model import sharing
from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.experts import Experts, gating
from paceline.model.torch.kernels import layer as kernels
from paceline.model.torch.kernels import skinny
from paceline.model.torch.kernels.experts import ExpertStack
from paceline.model.torch.kernels.layer import NormWeight

_DECODE_ROWS = 8
"""Row count given to oneDNN when it chooses the blocked layout; suits 1 to 32 rows in measurements."""


class PackedLinear:
    """A linear layer, y = x W^T + b for x [T, in] -> [T, out]; the weight is packed once for its device.

    On CPU the weight gets oneDNN's blocked layout, if oneDNN supports the weight (`can_pack`). With 1 to 16 tokens this
    is 1.4 to 3 times faster than `F.linear`. On CUDA a Triton kernel multiplies up to 16 bfloat16 tokens. In all other
    cases `F.linear` is used.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_bytes = weight.nbytes
        self._bias = bias
        self._is_packed = can_pack(weight)
        self._weight = sharing.matrix(lambda: _packed(weight), [weight], "linear", num_bytes=lambda _: weight.nbytes)
        if self._is_packed:
            self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, inputs_TD: Tensor) -> Tensor:
        if self._is_packed:
            return self._multiply(inputs_TD, self._weight, self._bias, "none", [], "")
        compute = skinny.product if skinny.can_run(inputs_TD, self._weight) else skinny.product_twin
        return compute(inputs_TD, self._weight, self._bias)

    def gated(self, inputs_TD: Tensor, activation: str) -> Tensor | None:
        """Compute activation(gate) * up [T, inner] in one kernel launch, for a matrix with the rows of gate, then those
        of up. Returns None if no kernel supports this case."""
        is_supported = not self._is_packed and activation in kernels.GATED
        if not is_supported or not skinny.can_run(inputs_TD, self._weight, is_gated=True):
            return None
        return skinny.product(inputs_TD, self._weight, self._bias, activation)


def _packed(weight: Tensor) -> Tensor:
    if can_pack(weight):
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _DECODE_ROWS)
    return weight.contiguous()


def can_pack(weight: Tensor) -> bool:
    """Return True if oneDNN supports this weight: on CPU, float32, or bfloat16 if the processor has instructions for
    it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * (weight + offset). The result has the weight's
    dtype."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0, is_wide: bool = False) -> None:
        """is_wide: compute the product with the weight in float32, as always with an offset."""
        self._dtype = weight.dtype
        self._eps = eps
        self._is_cpu = weight.device.type == "cpu"
        self._is_wide = self._is_cpu or bool(offset) or is_wide
        """True if it multiplies by the weight in float32, as Transformers does for norms with an offset."""
        size = weight.shape[-1]
        self._weight = weight.float() + offset if self._is_wide else weight
        if self._is_cpu:
            self._weight = self._weight * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self._is_cpu:
            compute = kernels.rms_norm if self._weight.ndim == 1 and kernels.can_run(inputs) else kernels.rms_norm_twin
            return compute(inputs, self.for_kernel, self._dtype)
        scale = torch.hypot(torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32), self._floor)
        return inputs.div(scale).mul_(self._weight).to(self._dtype)

    def of_first(self, heads_THD: Tensor, num_heads: int) -> Tensor:
        """Apply the norm to the first `num_heads` heads of each token and drop the others; returns [T, num_heads,
        head_dim]."""
        if self._is_cpu:
            return self(heads_THD[:, :num_heads])
        normed_THD = kernels.normed(heads_THD, self.for_kernel)[:, :num_heads]
        return kernels.weighted(normed_THD, self.for_kernel, self._dtype)

    @property
    def for_kernel(self) -> NormWeight:
        """The norm's parameters, as the functions of `kernels/layer.py` take them. Not valid on the CPU, where the
        stored weight is scaled differently."""
        assert not self._is_cpu
        return NormWeight(self._weight, self._eps, self._is_wide)


def norm_of(config: DecoderConfig, weight: Tensor) -> RMSNorm:
    """Build an RMSNorm with this weight, and with eps and offset of the config."""
    return RMSNorm(weight, config.rms_norm_eps, config.norm_offset, is_wide=config.layer_sizes is not None)


class NoNorm:
    """Takes the place of a norm in layers without one: converts its input to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs.to(self._dtype)


class WholeNorm:
    """RMSNorm over all queries of a token together, and another over all its keys (OLMo 2).

    Input and output: heads [T, num_heads + num_kv_heads, head_dim].
    """

    def __init__(self, query_norm: RMSNorm, key_norm: RMSNorm, num_heads: int) -> None:
        self._query_norm, self._key_norm, self._num_heads = query_norm, key_norm, num_heads

    def __call__(self, heads_THD: Tensor) -> Tensor:
        query_THD, key_THD = heads_THD.tensor_split([self._num_heads], dim=1)
        queries, keys = self._query_norm(query_THD.flatten(1)), self._key_norm(key_THD.flatten(1))
        return torch.cat([queries, keys], dim=1).view(heads_THD.shape)

    def of_first(self, heads_THD: Tensor, num_heads: int) -> Tensor:
        """Apply the norms to the first `num_heads` heads of each token, which must be all queries and keys; drops the
        values."""
        return self(heads_THD[:, :num_heads])

    @cached_property
    def for_kernel(self) -> NormWeight:
        """The parameters of both norms, as the functions of `kernels/layer.py` take them, with concatenated weights.
        Not valid on the CPU, where the stored weights are scaled differently."""
        query, key = self._query_norm.for_kernel, self._key_norm.for_kernel
        return query._replace(weight=torch.cat([query.weight, key.weight]))


Norm = RMSNorm | NoNorm


class Residual:
    """The residual stream of a pass: hidden states to which layers add their outputs. On CUDA each addition is
    deferred, and runs in one kernel with the next norm."""

    def __init__(self, hidden_TD: Tensor) -> None:
        """`hidden_TD` [T, D] is modified in place."""
        self._hidden_TD = hidden_TD
        self._waiting: tuple[Tensor, NormWeight | None, float] | None = None

    def add(self, update_TD: Tensor, norm: Norm | None = None, scale: float = 1.0) -> None:
        """Add scale * norm(update) to the hidden states, or scale * update without `norm`."""
        if kernels.can_run(update_TD):
            self._complete(None)
            self._waiting = update_TD, norm.for_kernel if isinstance(norm, RMSNorm) else None, scale
        else:
            self._hidden_TD.add_(update_TD if norm is None else norm(update_TD), alpha=scale)

    def normed(self, norm: Norm) -> Tensor:
        """Apply a norm to the hidden states; returns [T, D]."""
        if self._waiting is None or not isinstance(norm, RMSNorm):
            return norm(self.hidden_TD)
        normed_TD = self._complete(norm.for_kernel)
        assert normed_TD is not None
        return normed_TD

    @property
    def hidden_TD(self) -> Tensor:
        """Hidden states [T, D], after all additions."""
        self._complete(None)
        return self._hidden_TD

    def _complete(self, norm: NormWeight | None) -> Tensor | None:
        """Carry out the deferred addition; returns the norm of the sum."""
        if self._waiting is None:
            return None
        (update_TD, update_norm, scale), self._waiting = self._waiting, None
        return kernels.add_norm(self._hidden_TD, update_TD, update_norm, norm, scale)


class GatedMLP:
    """An MLP with a gate: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, gate_up: PackedLinear, down: PackedLinear) -> None:
        """gate_up: matrix with the rows of gate, then of up."""
        self._gate_up, self._down = gate_up, down
        self._multiply, self._activation = gating(config), config.activation
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes

    @classmethod
    def of(cls, config: DecoderConfig, parts: dict[str, Tensor], name: str) -> GatedMLP:
        """Build the MLP from the weights in `parts` whose names begin with `name`. Removes its matrices from there."""
        gate_up = fuse(parts, f"{name}.gate_proj", f"{name}.up_proj")
        return cls(config, gate_up, fuse(parts, f"{name}.down_proj"))

    def __call__(self, normed_TD: Tensor) -> Tensor:
        gated_TX = self._gate_up.gated(normed_TD, self._activation)
        if gated_TX is not None:
            return self._down(gated_TX)
        gate_up_TX = self._gate_up(normed_TD)
        if self._activation in kernels.GATED and kernels.can_run(gate_up_TX):
            return self._down(kernels.gated(gate_up_TX, self._activation))
        gate, up = gate_up_TX.chunk(2, dim=-1)
        return self._down(self._multiply(gate, up))


def make_mlp(config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> GatedMLP | Experts:
    """Build the MLP or the experts of layer `index` from its weights `parts`. Removes their matrices from `parts`."""
    return make_experts(config, parts) if config.has_experts(index) else GatedMLP.of(config, parts, "mlp")


def run_mlp(mlp: GatedMLP | Experts, normed_TD: Tensor, live_T: Tensor | None) -> Tensor:
    """Run an MLP or experts on normed hidden states; [T, D] -> [T, D]. live_T: mask of valid tokens in a pass of fixed
    shape; None: all are valid."""
    return mlp(normed_TD, live_T) if isinstance(mlp, Experts) else mlp(normed_TD)


def fuse(weights: dict[str, Tensor], *names: str) -> PackedLinear:
    """Fuse projections of the same input into one matrix, in the order of `names`. Removes their weights from
    `weights`, to free memory."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
    return PackedLinear(weight, torch.cat(biases) if biases else None)


def make_experts(config: DecoderConfig, parts: dict[str, Tensor]) -> Experts:
    """Build a layer's experts from the weights `parts`, removing them from `parts`. On GPUs the experts' matrices are
    stacked in one tensor, as the kernels require."""
    stack, names = None, [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
    if not has_stacks(parts["mlp.gate.weight"]):
        experts = [GatedMLP.of(config, parts, name) for name in names]
    else:
        gate_ups = [[f"{name}.gate_proj", f"{name}.up_proj"] for name in names]
        gate_up, gate_up_bias = _stacked(parts, gate_ups)
        down, down_bias = _stacked(parts, [[f"{name}.down_proj"] for name in names])
        rest = config.activation, config.swiglu_limit, config.swiglu_alpha
        stack = ExpertStack(gate_up, down, gate_up_bias, down_bias, *rest)
        experts = [
            GatedMLP(config, _one(gate_up, gate_up_bias, expert), _one(down, down_bias, expert))
            for expert in range(config.num_experts)
        ]
    shared = None
    if config.shared_expert_size:
        shared = GatedMLP.of(config, parts, "mlp.shared_expert"), fuse(parts, "mlp.shared_expert_gate")
    return Experts(fuse(parts, "mlp.gate"), experts, config.experts_per_token, config.normed_experts, shared, stack)


def has_stacks(weight: Tensor) -> bool:
    """Return True if experts are stacked in one tensor for kernels. On a CPU each expert's matrices are packed
    separately for oneDNN. `weight`: any weight of the layer."""
    return weight.device.type != "cpu"


def _stacked(parts: dict[str, Tensor], names: list[list[str]]) -> tuple[Tensor, Tensor | None]:
    """Stack experts' matrices [E, out, in] and biases [E, out]; each expert's are concatenated from several names.
    Removes them from `parts` one by one, so that at most one expert is in memory twice."""
    stacks: list[Tensor | None] = [None, None]
    for place, kind in enumerate(("weight", "bias")):
        if f"{names[0][0]}.{kind}" not in parts:
            continue
        first = [parts[f"{name}.{kind}"] for name in names[0]]
        stack = first[0].new_empty(len(names), sum(map(len, first)), *first[0].shape[1:])
        for own, each in zip(stack, names, strict=True):
            torch.cat([parts.pop(f"{name}.{kind}") for name in each], out=own)
        stacks[place] = stack
    matrices, biases = stacks
    assert matrices is not None
    return matrices, biases


def _one(matrices: Tensor, biases: Tensor | None, expert: int) -> PackedLinear:
    return PackedLinear(matrices[expert], None if biases is None else biases[expert])

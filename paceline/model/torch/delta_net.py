"""Gated delta nets (arXiv 2412.06464): layers of Qwen3-Next and Qwen3.5 with a recurrent state instead of a KV cache.

For each token and value head: S <- exp(g) S; S <- S + k u^T with the change u = beta (v - S^T k); output S^T q. Queries
q, keys k and values v come from a short causal convolution, g <= 0 and 0 < beta < 1 from the token itself.

Several tokens at once (section 3.3 of the paper): the changes u solve the triangular system (I + A) U = beta (V -
decayed K S - pending changes), A_ij = beta_i exp(G_i - G_j) k_i.k_j for each j that i attends to, with G the cumulative
sum of g. So a token's u does not depend on later tokens, and S after any of them is the decayed S0 plus a sum of
decayed k u^T: `delta_cache.py` stores k, u and g of the latest positions and lets the state lag behind. A mask selects
the tokens that a token attends to, in chains and trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.config.decoder import DecoderConfig
from paceline.model.layout import DELTA_NORM, NORMS, delta_apart
from paceline.model.torch.delta_cache import Commit, DeltaMemory, FixedStage, Stage
from paceline.model.torch.experts import Experts
from paceline.model.torch.kernels import delta as kernels
from paceline.model.torch.kernels.delta import DeltaWeights
from paceline.model.torch.kernels.layer import can_run
from paceline.model.torch.parts import GatedMLP, Norm, Residual, fuse, make_mlp, norm_of, run_mlp

L2_EPS = 1e-6


class DeltaNet:
    """A gated delta net: computes its output [T, D] from normed hidden states [T, D], and updates its recurrent
    memory."""

    def __init__(self, config: DecoderConfig, parts: dict[str, Tensor]) -> None:
        """`parts`: the layer's weights by name; the projections are removed from it."""
        assert config.delta is not None
        self._shape, self._eps = config.delta, config.rms_norm_eps
        if config.has_mixed_delta:
            delta_apart(config.delta, parts)
        self._inputs = fuse(parts, *(f"linear_attn.in_proj_{which}" for which in ("qkv", "z", "b", "a")))
        self._output = fuse(parts, "linear_attn.out_proj")
        kernel_KX = parts["linear_attn.conv1d.weight"].squeeze(1).T.float().contiguous()
        rate_H = -parts["linear_attn.A_log"].float().exp()
        self._weights = DeltaWeights(kernel_KX, rate_H, parts["linear_attn.dt_bias"].float(), parts[DELTA_NORM].float())
        self.num_bytes = self._inputs.num_bytes + self._output.num_bytes

    def __call__(self, normed_TD: Tensor, memory: DeltaMemory, stages: Sequence[Stage] | FixedStage) -> Tensor:
        if not isinstance(stages, FixedStage):
            return self._output(self.gated(self._inputs(normed_TD), memory, stages))
        if can_run(normed_TD):
            fused_TX = self._inputs(normed_TD)
            return self._output(kernels.recur(fused_TX, memory, stages, self._weights, self._shape, self._eps, L2_EPS))
        # Multiplying by zero would not remove NaN or infinity.
        fused_TX = self._inputs(normed_TD.masked_fill(~stages.live_T[:, None], 0.0))
        stage = stages.whole(memory.decays_BNH.shape[1], self._shape.kernel)
        return self._output(self.gated(fused_TX, memory, [stage]))

    def gated(self, fused_TX: Tensor, memory: DeltaMemory, stages: Sequence[Stage]) -> Tensor:
        """Compute the layer without its two projections: convolution, recurrence and gated norm. fused_TX [T, X]:
        result of the fused input projection. Returns the input of the output projection, [T, value heads * value_dim],
        and updates `memory`. `stages`: steps of the pass (`DeltaCache.stages`)."""
        shape, heads = self._shape, self._shape.num_value_heads
        inputs_TX, gate_TY, beta_TH, step_TH = fused_TX.split([shape.channels, shape.values, heads, heads], dim=-1)
        beta_TH = beta_TH.sigmoid().float()
        decay_TH = self._weights.rate_H * F.softplus(step_TH.float() + self._weights.step_H)
        output_THV = fused_TX.new_empty(len(fused_TX), heads, shape.value_dim, dtype=torch.float32)
        for stage in stages:
            if stage.commit is not None:
                self._commit(memory, stage.commit)
            places = stage.tokens_RC
            output_THV[places] = self._compute(memory, stage, inputs_TX[places], beta_TH[places], decay_TH[places])
        output_THV = output_THV.to(fused_TX.dtype).float()
        normed = F.rms_norm(output_THV, (shape.value_dim,), eps=self._eps).to(fused_TX.dtype).float()
        normed = normed * self._weights.norm_V
        return (normed * F.silu(gate_TY.float()).view_as(normed)).to(fused_TX.dtype).flatten(1)

    def _compute(
        self, memory: DeltaMemory, stage: Stage, inputs_RCX: Tensor, beta_RCH: Tensor, decay_RCH: Tensor
    ) -> Tensor:
        """Outputs [R, C, H, value_dim] in float32; appends to the pending windows."""
        shape, count, rows, held = self._shape, stage.tokens_RC.shape[1], stage.rows_R, stage.most_held
        convolved_RCX = self._convolved(memory, stage, inputs_RCX)
        query, key, value = convolved_RCX.split([shape.keys, shape.keys, shape.values], dim=-1)
        query, key = (_unit(each.float().unflatten(-1, (shape.num_key_heads, -1))) for each in (query, key))
        value = value.float().unflatten(-1, (shape.num_value_heads, -1))
        is_held_RN = torch.arange(held, device=rows.device) < stage.held_R[:, None]
        old_keys, old_changes, old_decays = (
            tensor[rows, :held].masked_fill(~is_held_RN.view(*is_held_RN.shape, *[1] * (tensor.ndim - 2)), 0.0)
            for tensor in (memory.keys_BNK, memory.changes_BNHV, memory.decays_BNH)
        )
        old_sums, total_RH = old_decays.cumsum(1), old_decays.sum(1)
        seen_RCC = stage.seen_RCC
        if seen_RCC is None:
            seen_RCC = torch.ones(1, count, count, dtype=torch.bool, device=rows.device).tril()
            sums_RCH = decay_RCH.cumsum(1)
        else:
            sums_RCH = seen_RCC.float() @ decay_RCH
        sums_RCH = sums_RCH + total_RH[:, None]
        # Heads come first from here on: [R, H, C or N, ...].
        q, k, u0, k0 = (each.transpose(1, 2) for each in (query * shape.key_dim**-0.5, key, old_changes, old_keys))
        q, k, k0 = (self._spread(each) for each in (q, k, k0))
        sums, beta = sums_RCH.transpose(1, 2)[..., None], beta_RCH.transpose(1, 2)[..., None]
        of_old = (sums - old_sums.transpose(1, 2)[:, :, None]).exp() * is_held_RN[:, None, None]
        of_new = (sums - sums.transpose(2, 3)).masked_fill(~seen_RCC[:, None], -torch.inf).exp()
        from_state = torch.cat([k, q], dim=2) @ memory.states_BHKV[rows] * torch.cat([sums, sums], dim=2).exp()
        known_k, known_q = from_state.tensor_split(2, dim=2)
        known_k = known_k + (k @ k0.transpose(2, 3) * of_old) @ u0
        known_q = known_q + (q @ k0.transpose(2, 3) * of_old) @ u0
        system = k @ k.transpose(2, 3) * of_new * beta
        changes = beta * (value.transpose(1, 2) - known_k)
        if count > 1:
            changes = _solved(system, changes)
        outputs = known_q + (q @ k.transpose(2, 3) * of_new) @ changes
        place_RC = stage.held_R[:, None] + torch.arange(count, device=rows.device)
        for tensor, new in zip(memory.pending, (inputs_RCX, key, changes.transpose(1, 2), decay_RCH), strict=True):
            if stage.live_RC is not None:
                is_live = stage.live_RC.view(*place_RC.shape, *[1] * (new.ndim - 2))
                new = torch.where(is_live, new, tensor[rows[:, None], place_RC])
            tensor[rows[:, None], place_RC] = new
        return outputs.transpose(1, 2)

    def _convolved(self, memory: DeltaMemory, stage: Stage, inputs_RCX: Tensor) -> Tensor:
        """SiLU of the causal convolution [R, C, X] over each token's last inputs."""
        rows, kernel = stage.rows_R, self._shape.kernel
        behind = torch.cat([memory.windows_BWX[rows], memory.inputs_BNX[rows, : stage.most_held]], dim=1)
        place_RW = stage.held_R[:, None] + torch.arange(kernel - 1, device=rows.device)
        window_RWX = behind.gather(1, place_RW[..., None].expand(-1, -1, behind.shape[2]))
        inputs = torch.cat([window_RWX, inputs_RCX], dim=1).float()
        if stage.conv_inputs_RCK is None:
            windows_RCKX = inputs.unfold(1, kernel, 1).transpose(2, 3)
        else:
            row_R11 = torch.arange(len(rows), device=rows.device)[:, None, None]
            windows_RCKX = inputs[row_R11, stage.conv_inputs_RCK]
        return F.silu((windows_RCKX * self._weights.kernel_KX).sum(2).to(inputs_RCX.dtype))

    def _commit(self, memory: DeltaMemory, commit: Commit) -> None:
        """Commit the oldest pending positions to the states; the remaining ones move to the front."""
        rows, gone, left = commit.rows_R, commit.most_gone, commit.most_left
        place = torch.arange(gone, device=rows.device)
        goes_RN = place < commit.gone_R[:, None]
        decays = memory.decays_BNH[rows, :gone].masked_fill(~goes_RN[..., None], 0.0)
        keys = memory.keys_BNK[rows, :gone].masked_fill(~goes_RN[..., None, None], 0.0)
        changes = memory.changes_BNHV[rows, :gone].masked_fill(~goes_RN[..., None, None], 0.0)
        total_RH = decays.sum(1)
        rest = (total_RH[:, None] - decays.cumsum(1)).exp()
        keys = self._spread(keys.transpose(1, 2)) * rest.transpose(1, 2)[..., None]
        states = memory.states_BHKV[rows] * total_RH.exp()[..., None, None]
        memory.states_BHKV[rows] = states + keys.transpose(2, 3) @ changes.transpose(1, 2)
        width = self._shape.kernel - 1
        behind = torch.cat([memory.windows_BWX[rows], memory.inputs_BNX[rows, :gone]], dim=1)
        from_RW = commit.gone_R[:, None] + torch.arange(width, device=rows.device)
        memory.windows_BWX[rows] = behind.gather(1, from_RW[..., None].expand(-1, -1, behind.shape[2]))
        if left:
            from_RL = commit.gone_R[:, None] + torch.arange(left, device=rows.device)
            from_RL = from_RL.clamp(max=memory.decays_BNH.shape[1] - 1)
            for tensor in memory.pending:
                tensor[rows, :left] = tensor[rows[:, None], from_RL]

    def _spread(self, heads: Tensor) -> Tensor:
        """Repeat key heads [R, G, ...] for their value heads [R, H, ...]."""
        return heads.repeat_interleave(self._shape.num_value_heads // self._shape.num_key_heads, dim=1)


MOST_INVERTED = 32
"""Maximum tokens per row for which a GPU solves the triangular system by a matrix inverse."""


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """Solve (I + A) X = right for X, with A the part of `system` below its diagonal.

    On a GPU, few tokens use products of fixed shape: cuBLAS's triangular solver allocates and uploads pointers, which
    cannot be captured in a CUDA graph. On CPU the solver is one call instead of dozens of products.
    """
    if system.device.type == "cpu" or system.shape[-1] > MOST_INVERTED:
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return unit_lower_inverse(system) @ right


def unit_lower_inverse(system: Tensor) -> Tensor:
    """Compute (I + A)^-1 [..., C, C], where A is the part of `system` [..., C, C] below its diagonal, in log2(C) steps.

    Each step doubles the inverted blocks on the diagonal: the inverse of [[P, 0], [B, Q]] is [[P^-1, 0], [-Q^-1 B P^-1,
    Q^-1]]. The shorter formula (I - A)(I + A^2)(I + A^4) ... fails: with repeated keys, powers of A grow to hundreds of
    millions at 32 tokens and cancel.
    """
    count = system.shape[-1]
    size = 1 << (count - 1).bit_length()
    lower = F.pad(system, (0, size - count, 0, size - count))
    inverse = torch.ones_like(lower[..., :1, :1]).unsqueeze(-3).expand(*lower.shape[:-2], size, 1, 1)
    width = 1
    while width < size:
        pairs = lower.unflatten(-1, (-1, 2 * width)).unflatten(-3, (-1, 2 * width))  # [..., n, 2 width, n, 2 width]
        below = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., width:, :width]
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ below @ first)
        upper = F.pad(first, (0, width))
        inverse = torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2)
        width *= 2
    return inverse[..., 0, :count, :count]


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + L2_EPS)


@dataclass(slots=True)
class DeltaLayer:
    """A decoder layer with a gated delta net instead of attention."""

    config: DecoderConfig
    input_norm: Norm
    delta: DeltaNet
    mlp_norm: Norm
    mlp: GatedMLP | Experts

    @classmethod
    def of(cls, config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> DeltaLayer:
        """Build layer `index` from its weights `parts`, by name within the layer. Removes the matrices from `parts`, so
        that each is freed once it is packed."""
        names = NORMS[config.norms]
        before, between = (norm_of(config, parts[f"{names[field]}.weight"]) for field in ("input_norm", "mlp_norm"))
        return cls(config, before, DeltaNet(config, parts), between, make_mlp(config, index, parts))

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices that a pass with one token reads."""
        return self.delta.num_bytes + self.mlp.num_bytes

    def run(self, residual: Residual, memory: DeltaMemory, stages: Sequence[Stage] | FixedStage) -> None:
        """Run the layer: adds the outputs of delta net and MLP to the residual stream, and updates `memory`. `stages`:
        steps of the pass (`DeltaCache.stages`)."""
        residual.add(self.delta(residual.normed(self.input_norm), memory, stages))
        live_T = stages.live_T if isinstance(stages, FixedStage) else None
        residual.add(run_mlp(self.mlp, residual.normed(self.mlp_norm), live_T))

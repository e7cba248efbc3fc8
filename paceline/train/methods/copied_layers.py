"""Initialises a drafter's layers as copies of the target's Llama-like layers, including biases, norms and head sizes.

A draft layer is a Qwen3 layer: with biases if the config has `attention_bias`, and with RMS norms of each query and key
head. If the target has no such norms (Llama, Qwen2), the norm's weight is set to the size of the target's heads, so
that attention scores have about the same size. If the target has biases of queries, keys and values only (Qwen2), the
output's bias is set to zero, since `attention_bias` of a Qwen3 config means all four.

The context enters a draft layer as keys and values of `hidden_norm(fc(taps))`, without the layer's own input norm.
(Taps are hidden states of some target layers.) So `hidden_norm` is initialised as the mean of the copied input norms,
and `fc` as the mean of the taps, each scaled to the same size (`fuse_taps`), since late layers are much larger than
early ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.errors import ConfigError
from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, has_llama_layers
from paceline.model.layout import as_ours
from paceline.train.features.hidden_states import begin_without_mean, train_in_scaled_units

NOISE = 0.1
"""Share of the random weights that remains in `fc`, so that its rows learn different things."""
HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
REMEDY = "start from random layers (--first-layers random)"


@torch.no_grad()
def copy_layers(network: DFlashNetwork, tensors: Iterable[tuple[str, Tensor]], target: Any) -> None:
    """Fills the draft layers with copies of target layers, evenly spread over the target's depth.

    `tensors`: (Hugging Face name, tensor) pairs of the target. `target`: its DecoderConfig, or None for a model that
    Transformers runs; such a target must have as many heads as the drafter, of the same `head_dim`. Parts that a target
    layer does not have stay random, such as the MLP if the layer has experts. Raises ConfigError if the target's layers
    cannot be copied."""
    shape, num_layers = network.config.shape, network.config.num_target_layers
    if num_layers is None:
        raise ConfigError(f"the drafter's config does not say how many layers its target has: {REMEDY}")
    draft_layers: dict[int, list[int]] = {}  # by target layer
    for index in range(shape.num_layers):
        draft_layers.setdefault(round((index + 0.5) * num_layers / shape.num_layers - 0.5), []).append(index)
    source = shape
    if isinstance(target, DecoderConfig):
        source, tensors = target, as_ours(target, expected_shapes(target), tensors, "the target")
        if not has_llama_layers(target.family):
            raise ConfigError(
                f"layers of {target.family} compute otherwise than a draft layer and cannot be copied: {REMEDY}"
            )
    target_layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in draft_layers}
    for name, tensor in tensors:
        pieces = name.split(".")
        if name.startswith("model.layers.") and int(pieces[2]) in target_layers:
            target_layers[int(pieces[2])][".".join(pieces[3:])] = tensor.float()
    for layer, parts in target_layers.items():
        fitting = _narrowed(_heads_of(parts, source, shape), shape)
        for index in draft_layers[layer]:
            _fill(cast(Any, network.layers)[index], fitting, f"layer {layer} of the target")
    norms = [cast(Any, layer).input_layernorm.weight for layer in network.layers]
    network.hidden_norm.weight.copy_(torch.stack(norms).mean(0))


@torch.no_grad()
def fuse_taps(network: DFlashNetwork, scale_F: Tensor) -> None:
    """Initialises `fc`, the projection of hidden states of some target layers (taps), so that it computes the average
    of the taps, with a little noise. Each tap is first divided by its root mean square. Call it before
    `train_in_scaled_units`. scale_F [F]: result of `measure_scale`."""
    size = network.config.shape.hidden_size
    scale_F = scale_F.to(network.fc.weight)
    scale_LD = scale_F.unflatten(0, (-1, size))
    loud_L = scale_LD.reciprocal().square().mean(1).sqrt()
    weights = network.fc.weight.mul_(NOISE * scale_F).unflatten(1, (-1, size))
    eye = torch.eye(size, device=scale_F.device)
    weights.add_(eye[:, None] / (len(loud_L) * loud_L)[None, :, None])


def _heads_of(parts: dict[str, Tensor], source: DecoderConfig, shape: DecoderConfig) -> dict[str, Tensor]:
    """Returns the first heads if the drafter has fewer. Raises ConfigError for another head size or group size."""
    group, own = source.num_heads // source.num_kv_heads, shape.num_heads // shape.num_kv_heads
    if source.head_dim != shape.head_dim or group != own or shape.num_kv_heads > source.num_kv_heads:
        raise ConfigError(
            f"copied layers need heads of the target's: {shape.num_heads} of {shape.head_dim} over "
            f"{shape.num_kv_heads} key heads cannot be made of its {source.num_heads} of {source.head_dim} over "
            f"{source.num_kv_heads}; {REMEDY}"
        )
    if source.num_heads == shape.num_heads and source.num_kv_heads == shape.num_kv_heads:
        return parts
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = dict(zip(HEADS, (queries, keys, keys), strict=False))
    cut = {}
    for name, tensor in parts.items():
        owner = name.rpartition(".")[0]
        cut[name] = tensor[: rows[owner]] if owner in rows else tensor
        if name == "self_attn.o_proj.weight":
            cut[name] = tensor[:, :queries]
    return cut


def _narrowed(parts: dict[str, Tensor], shape: DecoderConfig) -> dict[str, Tensor]:
    """Returns the MLP neurons with the largest weights if the drafter's MLP is narrower."""
    gate, up, down = (parts.get(f"{name}.weight") for name in MLP)
    if gate is None or up is None or down is None or len(gate) <= shape.intermediate_size:
        return parts
    loudness_I = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    largest = loudness_I.topk(shape.intermediate_size).indices.sort().values
    return parts | {
        f"{MLP[0]}.weight": gate[largest],
        f"{MLP[1]}.weight": up[largest],
        f"{MLP[2]}.weight": down[:, largest],
    }


def _fill(layer: Any, parts: dict[str, Tensor], source: str) -> None:
    """Copies what fits; initialises head norms and output bias that the target does not have."""
    own, num_copied = dict(layer.named_parameters()), 0
    for name, tensor in parts.items():
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)
            num_copied += name.endswith("proj.weight")
        elif name in own and name.startswith("mlp."):  # the draft layer's MLP is wider: the rest stays random
            own[name][: tensor.shape[0], : tensor.shape[1]].copy_(tensor)
    if not num_copied:
        raise ConfigError(f"{source} has nothing that fits a draft layer: {REMEDY}")
    attention = layer.self_attn
    for which in "qk":
        projection, norm = getattr(attention, f"{which}_proj"), getattr(attention, f"{which}_norm")
        if f"self_attn.{which}_norm.weight" not in parts:
            norm.weight.fill_(head_size(projection, layer.input_layernorm.weight, attention.head_dim))
    for name in HEADS:
        bias = own.get(f"{name}.bias")
        if bias is not None and f"{name}.bias" not in parts:
            bias.zero_()


@torch.no_grad()
def head_size(projection: Any, norm_D: Tensor, head_dim: int) -> float:
    """Returns the typical magnitude of the outputs of a query or key projection. A copied draft layer that norms these
    outputs begins with this value as the norm's weight; otherwise the norm would change their magnitude. `projection`:
    linear layer with heads of `head_dim` outputs each. `norm_D`: weight of the norm of its inputs. The result is a
    geometric mean over the heads, so a single head with very large biases has little effect."""
    square_X = (projection.weight * norm_D).square().sum(1)
    if projection.bias is not None:
        square_X = square_X + projection.bias.square()
    return float(square_X.unflatten(0, (-1, head_dim)).mean(1).sqrt().clamp(min=1e-6).log().mean().exp())


def settle_units(network: DFlashNetwork, scale_F: Tensor, mean_F: Tensor, *, is_new: bool, is_copied: bool) -> None:
    """Makes `fc`, the projection of hidden states of some target layers, train on scaled features. In a new drafter
    (`is_new`), it is initialised first: by `fuse_taps` if the layers are copies of the target's (`is_copied`),
    otherwise by `begin_without_mean`. scale_F, mean_F [F]: results of `measure_scale`."""
    if is_new and is_copied:
        fuse_taps(network, scale_F)
    train_in_scaled_units(network, scale_F)
    if is_new and not is_copied:
        begin_without_mean(network, mean_F)

"""Parts of the stage `kernels`: the kernels of mixtures of experts and of gated delta nets, at published widths.

Each is compared with its PyTorch twin, and timed within a graph beside what reading its bytes takes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_day_stages.layer_kernels import BOUNDS, launch_us
from gpu_day_stages.models import read_rate, shape_of, weights
from gpu_day_stages.visit import Visit
from paceline.model.checkpoint import expected_shapes
from paceline.model.torch.delta_cache import HALF, DeltaCache, FixedStage
from paceline.model.torch.delta_net import L2_EPS, DeltaNet
from paceline.model.torch.experts import Experts
from paceline.model.torch.kernels import available, delta, experts
from paceline.model.torch.parts import PackedLinear, make_experts

CHOICES = 8
"""Choices of experts that a timed graph takes in turn: together they read more than a GPU keeps in its own caches."""
LEAST_S = 3.0


@torch.inference_mode()
def experts_of_a_layer(visit: Visit) -> None:
    """One layer of 30B-A3B: kernels against the same experts called one by one, then microseconds."""
    config, dtype = shape_of(visit, "30B-A3B"), visit.sized(torch.bfloat16, torch.float32)
    layer, kind = _experts(visit, dtype), {"dtype": dtype, "device": visit.device}
    for count in visit.sized((1, 16, 100), (1, 16)):
        visit.need(LEAST_S)
        inputs_TD = torch.randn(count, config.hidden_size, **kind)
        live_T = torch.ones(count, dtype=torch.bool, device=visit.device)
        ours = layer(inputs_TD, live_T)
        assert layer.chosen_TK is not None
        logits_TE, chosen_TK = layer._router(inputs_TD), layer.chosen_TK.long()
        best_TK, own_TK = logits_TE.topk(config.experts_per_token).values, logits_TE.gather(-1, chosen_TK)
        are_best = torch.equal(own_TK.sort(-1).values, best_TK.sort(-1).values)  # of equal ones either may be taken
        shares_TK = logits_TE.softmax(-1, torch.float32).gather(-1, chosen_TK)
        weights_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        expected = experts.mix_twin(inputs_TD, layer._experts, weights_TK, chosen_TK)
        error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())
        is_same = torch.equal(ours, layer(inputs_TD, live_T))
        is_right = error <= BOUNDS[dtype] and is_same and are_best
        visit.check(f"experts, {count} tokens", is_right, error=error, same_twice=is_same, are_best=are_best)
        several = itertools.cycle([torch.randn_like(inputs_TD) for _ in range(CHOICES)])
        read = []
        for _ in range(CHOICES):
            layer(next(several), live_T)
            read.append(len(layer.chosen_TK.unique()))
        num_bytes = sum(read) / CHOICES * 3 * config.hidden_size * config.expert_size * dtype.itemsize
        work = partial(_next, layer, several, live_T)
        _report(visit, f"experts of a layer, {count} tokens", work, num_bytes)


def _next(layer: Experts, several: Iterator[Tensor], live_T: Tensor) -> None:
    layer(next(several), live_T)


def _experts(visit: Visit, dtype: torch.dtype) -> Experts:
    """A layer's experts whose router is as loud as a trained one."""
    config = replace(shape_of(visit, "30B-A3B"), num_layers=1)
    prefix = "model.layers.0."
    own = {name: size for name, size in expected_shapes(config).items() if name.startswith(f"{prefix}mlp.")}
    parts = {name.removeprefix(prefix): tensor for name, tensor in weights(own, visit.device, dtype)}
    parts["mlp.gate.weight"].mul_(5.0)
    layer = make_experts(config, parts)
    assert isinstance(layer._router, PackedLinear)
    return layer


@torch.inference_mode()
def a_delta_net(visit: Visit) -> None:
    """One layer of the hybrid 27B behind a state and a trail of half its room: kernels against PyTorch's operations."""
    config, dtype = shape_of(visit, "hybrid 27B"), visit.sized(torch.bfloat16, torch.float32)
    assert config.delta is not None
    prefix = "model.layers.0."
    own = {name: size for name, size in expected_shapes(config).items() if name.startswith(f"{prefix}linear_attn.")}
    parts = {name.removeprefix(prefix): tensor for name, tensor in weights(own, visit.device, dtype)}
    layer, cache = DeltaNet(config, parts), DeltaCache(config, 1, 64, dtype, visit.device)
    memory, room = cache.memories[0], cache.room
    for tensor in memory.tensors():
        tensor.normal_(0.0, 0.1)
    memory.decays_BNH.abs_().neg_()
    for count in visit.sized((1, 16), (1, 4)):
        for held in (HALF, room):
            visit.need(LEAST_S)
            stage = _stage(count, held, room, visit.device)
            fused_TX = torch.randn(
                count, config.delta.channels + config.delta.values + 2 * config.delta.num_value_heads
            )
            fused_TX = fused_TX.to(visit.device, dtype)
            outputs, states = list[Tensor](), list[Tensor]()
            for run in (_by_kernels, _by_operations):
                mine = copy.deepcopy(memory)
                outputs.append(run(layer, fused_TX, mine, stage))
                states.append(mine.states_BHKV)
            error = max(
                float((one.float() - two.float()).abs().max() / two.float().abs().max())
                for one, two in ((outputs[0], outputs[1]), (states[0], states[1]))
            )
            visit.check(f"delta net, {count} tokens behind {held}", error <= BOUNDS[dtype], error=error)
            num_bytes = (1 if held < room else 3) * memory.states_BHKV.nbytes
            work = partial(_by_kernels, layer, fused_TX, memory, stage)
            _report(visit, f"delta net, {count} tokens behind {held}", work, num_bytes)


def _stage(count: int, held: int, room: int, device: str) -> FixedStage:
    starts_B, counts_B, settled_B = (torch.tensor([each], device=device) for each in (held, count, 0))
    slot_J = torch.arange(count, device=device)
    relation_2BJ = torch.stack([slot_J, (2 << slot_J) - 1])[:, None]
    return FixedStage.of(starts_B, counts_B, settled_B, room, relation_2BJ, slot_J < count)


def _by_kernels(layer: DeltaNet, fused_TX: Tensor, memory: Any, stage: FixedStage) -> Tensor:
    """On a device without kernels PyTorch's operations."""
    if not available.can_use(fused_TX.device):
        return _by_operations(layer, fused_TX, memory, stage)
    return delta.recur(fused_TX, memory, stage, layer._weights, layer._shape, layer._eps, L2_EPS)


def _by_operations(layer: DeltaNet, fused_TX: Tensor, memory: Any, stage: FixedStage) -> Tensor:
    return layer.gated(fused_TX, memory, [stage.whole(memory.decays_BNH.shape[1], layer._shape.kernel)])


def _report(visit: Visit, what: str, work: Callable[[], object], num_bytes: float) -> None:
    us = launch_us(visit, work)
    visit.report(what, us=us, bytes=num_bytes, share_of_read=num_bytes / (1e-6 * us["median"]) / read_rate(visit))

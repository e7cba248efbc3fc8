"""Kernels of gated delta nets: they equal their twin under Triton's interpreter, and compile for an H100.

As in `test_kernels_layer.py`, in processes of their own; without Triton only the twin is tested.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_kernels import MOST_SHARED, compiling, in_a_process
from model.test_kernels_layer import DTYPES, error, poisoned_empties, round_to_nearest
from torch import Tensor

from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.torch.attention import ancestors
from paceline.model.torch.delta_cache import HALF, ROOM, DeltaCache, DeltaMemory, FixedStage
from paceline.model.torch.delta_net import DeltaNet
from paceline.model.torch.kernels import available, delta

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CONFIG = DecoderConfig(
    "qwen3_5_text", 50, 40, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_position=512, qk_norm=True,
    norm_offset=1.0, output_gate=True, rotary_dim=4, delta=DeltaShape(2, 4, 16, 40, 4), linear_layers=(0,),
)  # fmt: skip
MOST_STACK = 128
"""Bytes of a thread that may spill: three products in TF32 for each in float32 need more registers than there are."""
ROWS = ((5, 3, 0), (ROOM - 4, 4, HALF + 9), (ROOM, 0, 20), (0, 1, 0), (2, 2, 7))
"""For each row: pending positions, tokens of the pass, and positions in its state."""


def layer_of(config: DecoderConfig, dtype: torch.dtype) -> DeltaNet:
    prefix, generator = "model.layers.0.", torch.Generator().manual_seed(1)
    shapes = {
        name.removeprefix(prefix): size for name, size in expected_shapes(config).items() if name.startswith(prefix)
    }
    parts = {name: torch.randn(size, generator=generator) * 0.3 for name, size in shapes.items()}
    return DeltaNet(
        config, {name: (part - 2.0 if name.endswith("A_log") else part).to(dtype) for name, part in parts.items()}
    )


def stage_of(count: int, parents: list[list[int]] | None) -> FixedStage:
    """Passes of ROWS with `count` tokens a row, those too many of a row left out."""
    held, counts, committed = (torch.tensor(each) for each in zip(*ROWS, strict=True))
    counts = counts.clamp(max=count)
    slot_J = torch.arange(count)
    relation_2BJ = torch.stack([slot_J, (2 << slot_J) - 1])[:, None].repeat(1, len(ROWS), 1)
    for row, own in enumerate(parents or []):
        seen_CC, depths = ancestors(own)
        relation_2BJ[0, row, : len(own)] = torch.tensor(depths)
        relation_2BJ[1, row, : len(own)] = (seen_CC.long() << torch.arange(len(own))).sum(-1)
    live_T = (slot_J < counts[:, None]).flatten()
    return FixedStage.of(committed + held, counts, committed, ROOM, relation_2BJ, live_T)


def memory_of(config: DecoderConfig, dtype: torch.dtype, stage: FixedStage) -> DeltaMemory:
    """Random; behind what a trail holds there are no numbers."""
    memory, generator = DeltaCache(config, len(ROWS), 200, dtype).memories[0], torch.Generator().manual_seed(2)
    for tensor in memory.tensors():
        tensor.normal_(generator=generator)
    memory.keys_BNK.copy_(torch.nn.functional.normalize(memory.keys_BNK, dim=-1))
    memory.decays_BNH.abs_().mul_(-0.2)
    for row, held in enumerate((stage.held_B + stage.gone_B).tolist()):
        for tensor in memory.pending:
            if stage.counts_B[row] > 0:
                tensor[row, held:] = float("nan")
    return memory


def left(memory: DeltaMemory, stage: FixedStage) -> Iterator[tuple[str, Tensor]]:
    """The part of a recurrent memory that matters after the pass."""
    names = ("states", "windows", "inputs", "keys", "changes", "decays")
    for name, tensor in zip(names, memory.tensors(), strict=True):
        for row, (held, count) in enumerate(zip(stage.held_B.tolist(), stage.counts_B.tolist(), strict=True)):
            if name in ("states", "windows"):
                yield f"{name} of row {row}", tensor[row]
            elif length := held + count if count else ROOM:
                yield f"{name} of row {row}", tensor[row, :length]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """One token a row, chains and trees; rows that settle, idle rows with a full trail; values in tiles that are not
    full."""
    shapes = {"large": CONFIG, "small": replace(CONFIG, delta=DeltaShape(2, 4, 4, 3, 3))}
    tree = [[-1, 0, 0], [-1, 0, 0, 1], [], [-1], [-1, -1]]
    for name, config in shapes.items():
        layer = layer_of(config, dtype)
        for count, parents in ((1, None), (4, None), (4, tree)):
            stage = stage_of(count, parents)
            inputs_TD = torch.randn(len(ROWS) * count, config.hidden_size).to(dtype)
            inputs_TD[~stage.live_T] = float("nan")
            outputs, memories = list[Tensor](), list[DeltaMemory]()
            for can_use in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(available, "can_use", lambda device, can_use=can_use: can_use)
                    memories.append(memory_of(config, dtype, stage))
                    outputs.append(layer(inputs_TD, memories[-1], stage)[stage.live_T])
            what = f"{name}, {count} tokens{', tree' if parents else ''}"
            yield what, error(outputs[1], outputs[0])
            for (part, expected), (_, actual) in zip(*(left(memory, stage) for memory in memories), strict=True):
                yield f"{what}, {part}", error(actual, expected)


def interpreted(dtype: str) -> dict[str, float]:
    """The error of each case, in a process of its own under the interpreter."""
    from gpu_day_stages.attention_cases import mend_interpreter

    def poisoned(*size: Any, **options: Any) -> Tensor:
        return torch.full(size, float("nan"), **options)

    mend_interpreter()
    round_to_nearest()
    poisoned_empties()
    torch.manual_seed(1)
    delta.torch.empty = poisoned
    return dict(cases(DTYPES[dtype][0]))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_equal_their_twin(dtype: str) -> None:
    errors = in_a_process(__file__, f"interpreted({dtype!r})", TRITON_INTERPRET="1")
    assert len(errors) > 150
    assert {name: size for name, size in errors.items() if not size <= DTYPES[dtype][1]} == {}


def resources() -> dict[str, dict[str, int]]:
    """Bytes of stack and of shared memory of each kernel, compiled for an H100, for 1 and 16 tokens a row."""
    from paceline.model.torch.kernels.triton import delta as delta_triton

    used: dict[str, dict[str, int]] = {}
    delta._launch = compiling(delta_triton, used)
    shape = DeltaShape(16, 48, 128, 128, 4)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    config = replace(CONFIG, delta=shape)
    memory = DeltaCache(config, 2, 64, torch.bfloat16, "meta").memories[0]
    full = {"dtype": torch.float32, "device": "meta"}
    weights = delta.DeltaWeights(
        torch.empty(4, shape.channels, **full),
        torch.empty(48, **full),
        torch.empty(48, **full),
        torch.empty(128, **full),
    )
    for count in (1, 16):
        starts_B, relation_2BJ = (
            torch.empty(2, dtype=torch.long, device="meta"),
            torch.empty(2, 2, count, dtype=torch.long, device="meta"),
        )
        stage = FixedStage.of(
            starts_B, starts_B, starts_B, ROOM, relation_2BJ, torch.empty(2 * count, dtype=torch.bool, device="meta")
        )
        fused_TX = torch.empty(2 * count, shape.channels + shape.values + 96, **kind)
        delta.recur(fused_TX, memory, stage, weights, shape, 1e-6, 1e-6)
    return used


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_an_h100() -> None:
    used = in_a_process(__file__, "resources()")
    assert len(used) == 2 + 2 * 2
    assert {
        name: each for name, each in used.items() if each["stack"] > MOST_STACK or each["shared"] >= MOST_SHARED
    } == {}


def test_lengths_on_the_device_are_the_cache_s() -> None:
    """Positions committed to the state and positions left, as `DeltaCache.passed` counts them, over many passes."""
    cache, rng = DeltaCache(CONFIG, 1, 400, torch.float32), random.Random(3)
    row = cache.allocate()
    assert row is not None
    from paceline.model.target import ForwardBatch

    gone = 0
    while cache.lengths[row] < 360:
        count = rng.choice([1, 4, 8, 16, 32])
        own = rng.randint(1, count)
        numbers = (torch.tensor([each]) for each in (cache.lengths[row], own, cache.committed(row)))
        stage = FixedStage.of(
            *numbers, cache.room, torch.zeros(2, 1, count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
        )
        batch = ForwardBatch([row], [cache.lengths[row]], [own], [0] * own)
        before = cache.committed(row)
        cache.passed(batch, count)
        assert cache.committed(row) - before == int(stage.gone_B) and cache.held([row]) == stage.held_B.tolist()
        assert int(stage.held_B) + count <= cache.room
        gone += int(stage.gone_B)
        cache.append([row], [own])
        cache.rollback([row], [cache.lengths[row] - rng.randint(0, own - 1)])
    assert gone > ROOM

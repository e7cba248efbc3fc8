"""FSDP2 in a group of one follows the whole network, killed and resumed.

`make_parallel` gives a process without others the whole network, so that `Sharded` runs on several GPUs only. Here it
is put in a trainer's place by hand: what FSDP2 does with NCCL, mixed precision and optimiser states is seen on one GPU.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from many_processes import RandomFeatures
from small_training import Killed
from torch.distributed.tensor import DTensor

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.runs.ranks import Ranks
from paceline.train.config import LoopConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.optimisers import Optimisers
from paceline.train.learn.packs import DFlashTrainable
from paceline.train.processes.parallel import Sharded

HIDDEN, VOCAB, LAYERS, TAPS, STEPS, KILLED_AT = 64, 96, 2, (1, 3), 4, 3
Split = Callable[[Trainer], Trainer]


@contextlib.contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """A process group of this process alone, by a store in its memory."""
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trainer(folder: Path, device: str, optimiser: str, is_autocast: bool) -> Trainer:
    """A drafter of two layers over random documents, its network whole."""
    raw = new_config(
        HIDDEN, VOCAB, 6, num_layers=LAYERS, block_size=4, mask_token_id=VOCAB - 1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96,
    )  # fmt: skip
    raw["dflash_config"]["target_layer_ids"] = list(TAPS)
    numbers = np.random.default_rng(0)
    documents = [Document(str(key), numbers.integers(0, VOCAB - 1, 20 + key).astype(np.int32), 4) for key in range(12)]
    weight_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    network = DFlashNetwork.random(DFlashConfig.from_json(raw)).to(device)
    config = LoopConfig(
        max_steps=STEPS, blocks_per_step=16, anchors=4, blocks_per_pack=8, autocast=is_autocast, checkpoint_minutes=0.0,
        optim=OptimConfig(optimiser, lr=1e-3),
    )  # fmt: skip
    # Split: the kernel of FlexAttention would compile for longer than all else takes.
    drafter, features = DFlashTrainable(network, raw, "split"), RandomFeatures(documents, len(TAPS) * HIDDEN)
    return Trainer(drafter, Corpus(documents, []), features, weight_VD, Head(weight_VD), config, folder=folder)


def shard(one: Trainer) -> Trainer:
    """The trainer with `Sharded` in the place of the whole network, and optimisers of its parts."""
    one.parallel = Sharded(Ranks(), one.device)
    one.parallel.prepare(one.drafter, one.config.autocast)
    one.optimisers = Optimisers(one.network, one.config.optim)
    assert all(isinstance(each, DTensor) for each in one.network.parameters())
    return one


def losses(one: Trainer, killed_at: int | None = None) -> dict[int, float]:
    """Loss by step, until the end or until it is killed after a step."""
    seen: dict[int, float] = {}

    def on_step(figures: dict[str, Any]) -> None:
        if figures["step"] == killed_at:
            raise Killed
        seen[figures["step"]] = figures["loss"]

    with contextlib.suppress(Killed):
        one.run(on_step)
    return seen


def misplaced(one: Trainer) -> list[str]:
    """States of optimisers that are not on the device of their parameters."""
    return [name for name, tensor in one.optimisers.states() if tensor.device.type != one.device.type]


def sharded_alone(device: str, optimiser: str, is_autocast: bool, split: Split = shard) -> dict[str, Any]:
    """Train the whole network, then its parts killed and resumed; the largest difference of losses and weights between
    the two, and states on a wrong device. `split`: what makes the trainer of the parts."""
    with tempfile.TemporaryDirectory() as scratch, group_of_one(device):
        whole = trainer(Path(scratch) / "whole", device, optimiser, is_autocast)
        expected = losses(whole)
        first = losses(split(trainer(Path(scratch) / "parts", device, optimiser, is_autocast)), KILLED_AT)
        again = split(trainer(Path(scratch) / "parts", device, optimiser, is_autocast))
        assert again.resume(), "nothing to resume: the first part saved no checkpoint"
        wrong = misplaced(again)
        by_step = first | losses(again)
        weights = again.parallel.weights(again.network)
        pairs = ((tensor, weights[name]) for name, tensor in whole.parallel.weights(whole.network).items())
        apart = max(float((one - other).abs().max()) for one, other in pairs)
    return {
        "steps": sorted(by_step),
        "loss_difference": max(abs(by_step[step] - loss) for step, loss in expected.items()),
        "weight_difference": apart,
        "states_misplaced": wrong,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("optimiser", "is_autocast"), [("muon", False), ("adamw", True)])
def test_parts_follow_the_whole_network(optimiser: str, is_autocast: bool) -> None:
    check(sharded_alone("cpu", optimiser, is_autocast), optimiser, is_autocast)
    assert not dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("optimiser", "is_autocast"), [("adamw", False), ("muon", False), ("adamw", True)])
def test_parts_follow_the_whole_network_on_a_gpu(optimiser: str, is_autocast: bool) -> None:
    check(sharded_alone("cuda", optimiser, is_autocast), optimiser, is_autocast)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_whole_network_resumes_on_a_gpu(optimiser: str) -> None:
    """On a CPU tests/train/test_checkpoint.py has this."""
    check(sharded_alone("cuda", optimiser, False, lambda one: one), optimiser, False)


def check(figures: dict[str, Any], optimiser: str, is_autocast: bool) -> None:
    """With autocast FSDP2 gathers weights in bfloat16, norms too, which the whole network has in float32. Muon's
    Newton-Schulz steps are in bfloat16, and sum in another order on parts of a matrix."""
    close = 1e-2 if is_autocast else 1e-3 if optimiser == "muon" else 1e-4
    assert figures["steps"] == [1, 2, 3, 4] and figures["states_misplaced"] == []
    assert figures["loss_difference"] < (0.1 if is_autocast else 1e-4)
    assert figures["weight_difference"] < close

"""The stage `train`: training steps of a drafter of real shape."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_day_stages.models import Clock, free_memory, random_network, raw_dflash, shape_of, summary, weights
from gpu_day_stages.visit import Visit
from paceline.train.config import LoopConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import Features
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head, head_loss, softmax_over
from paceline.train.learn.packs import DFlashTrainable

BLOCK = 16


class RandomFeatures:
    """Hidden states of no meaning, the same for every document."""

    def __init__(self, taps_SF: Tensor) -> None:
        self._features = Features(taps_SF, None)

    def of(self, number: int) -> Features:
        return self._features


def train(visit: Visit) -> None:
    """Steps of a drafter of real shape on random features: blocks per second, share of the peak, time by part."""
    with visit.part("softmax in place"):
        softmax_in_place(visit)
    for anchors in visit.sized((128, 512), (4,)):
        with visit.part(f"training, {anchors} anchors"):
            steps(visit, anchors)
        free_memory()


def steps(visit: Visit, anchors: int) -> None:
    what, documents = f"training, {anchors} anchors", visit.sized(4, 2)
    trainer, clock = real_trainer(visit, anchors, documents), Clock(visit.device)

    def step() -> None:
        chosen, num_slots, trainer.state.place = trainer.planner.step(trainer.state.place)
        losses.append(trainer.forward_backward(chosen, num_slots, trainer.head)[0])
        torch.nn.utils.clip_grad_norm_(trainer.network.parameters(), 1.0)
        trainer.optimisers.step(1e-3)

    losses: list[float] = []
    first = clock.once(step)
    samples = [clock.once(step) for _ in range(visit.sized(6, 2))]
    blocks, median_s = anchors * documents, 1e-3 * statistics.median(samples)
    flops = trainer.flops_per_block(trainer.head) * blocks / median_s
    peak = next(
        (line["flops_per_s"] for line in visit.earlier.get("ceilings", []) if line.get("what") == "matmul bfloat16"),
        None,
    )
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    figures = {
        "blocks_per_s": blocks / median_s,
        "flops_per_s": flops,
        "share_of_measured_peak": flops / peak if peak else None,
    }
    figures |= {"memory_bytes": memory, "parts_ms": parts(trainer, clock)}
    visit.report(what, ms=summary(samples), first_ms=first, **figures)
    visit.check(f"{what}: losses are finite", all(map(math.isfinite, losses)), losses=losses)
    if peak:
        visit.goal(f"{what}: share of the measured peak", flops / peak, 0.35)


def parts(trainer: Trainer, clock: Clock) -> dict[str, float]:
    """Milliseconds of the parts of one pack, each by itself."""
    chosen, num_slots, _ = trainer.planner.step(trainer.state.place)
    piece = next(iter(trainer.parallel.pieces(chosen, trainer.budget)))
    pack, config = trainer.pack(piece.chosen), trainer.config
    inputs, slots = (pack, trainer.embedding_VD, config.autocast), (pack.slots, trainer.head, config.loss)
    hidden_TD = trainer.drafter.hidden(*inputs)
    upstream, detached = torch.randn_like(hidden_TD), hidden_TD.detach().requires_grad_()
    works: dict[str, Callable[[], object]] = {
        "packing": lambda: trainer.pack(piece.chosen),
        "layers, forward": lambda: trainer.drafter.hidden(*inputs),
        "layers, both ways": lambda: trainer.drafter.hidden(*inputs).backward(upstream),
        "head and loss": lambda: head_loss(detached, *slots, num_slots, False)[0].backward(),
        "optimiser": lambda: [optimiser.step() for optimiser in trainer.optimisers.every],
    }
    return {name: statistics.median(clock.samples(work, 3, warm=1)) for name, work in works.items()}


def real_trainer(visit: Visit, anchors: int, documents: int) -> Trainer:
    """A drafter for 8B's widths over random documents; the target is not there, as its features are given."""
    own, device = shape_of(visit, "8B"), torch.device(visit.device)
    length, dtype = visit.sized(2048, 24), visit.sized(torch.bfloat16, torch.float32)
    raw = raw_dflash(own, visit.sized(5, 1), visit.sized(BLOCK, 4))
    network = random_network(raw, visit.device, torch.float32)
    draw = np.random.default_rng(0)
    corpus = [
        Document(f"doc-{number}@0/0", draw.integers(0, own.vocab_size, length).astype(np.int32), 8)
        for number in range(documents)
    ]
    ends = dict(
        weights(
            {"embedding": (own.vocab_size, own.hidden_size), "head": (own.vocab_size, own.hidden_size)},
            visit.device,
            dtype,
        )
    )
    taps = torch.randn(length, len(network.config.target_layer_ids) * own.hidden_size, device=device, dtype=dtype)
    loop = LoopConfig(
        epochs=1e6, blocks_per_step=anchors * documents, anchors=anchors, blocks_per_pack=512, tokens_per_pack=32768,
        autocast=not visit.is_tiny, optim=OptimConfig(lr=1e-4),
    )  # fmt: skip
    trainable = DFlashTrainable(network.to(device), raw, loop.attention)
    head = Head(ends["head"])
    trainer_parts = trainable, Corpus(corpus, []), RandomFeatures(taps), ends["embedding"], head, loop
    return Trainer(*trainer_parts, folder=Path("unused"))


def softmax_in_place(visit: Visit) -> None:
    """The softmax of the losses, which may reuse the memory of its input, against one that writes elsewhere."""
    sizes, worst = visit.sized((1000, 32768, 151936, 248320), (1000,)), 0.0
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            values = 3 * torch.randn(64, size, device=visit.device).to(dtype)
            expected = torch.softmax(values, -1)
            worst = max(worst, float((softmax_over(values) - expected).abs().max()))
    visit.check("softmax of the losses", worst == 0.0, largest_difference=worst, sizes=sizes)

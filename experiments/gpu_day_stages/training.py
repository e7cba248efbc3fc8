"""Stages 11 and 12: a training step of real shape, and a tiny training that is stopped, resumed and sharded."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_day_stages.models import Clock, free_memory, random_network, raw_dflash, shape_of, summary, weights
from gpu_day_stages.tiny_models import VOCAB, loud_tensors, tiny_llama
from gpu_day_stages.visit import Visit
from paceline.model.target import head_weight
from paceline.model.torch.decoder import Decoder
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import Features, OnlineFeatures
from paceline.train.features.prefetch import packs_ahead
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head, head_loss, softmax_over
from paceline.train.learn.packs import DFlashTrainable
from paceline.train.processes.parallel import Sharded

BLOCK, TAPS = 16, 5


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


def resume(visit: Visit) -> None:
    """A tiny training stopped half-way and resumed, with packs prefetched, and sharded over a world of one."""
    total = visit.sized(12, 4)
    for name in visit.sized(("adamw", "muon"), ("muon",)):
        with visit.part(f"resumed, {name}"), tempfile.TemporaryDirectory() as folder:
            options = {"optim": OptimConfig(name, lr=3e-3)}
            losses = run(tiny_trainer(visit, Path(folder), total, **options), stop_at=total // 2)
            again = tiny_trainer(visit, Path(folder), total, **options)
            is_resumed = again.resume()
            losses |= run(again)
            compare(visit, f"resumed, {name}", whole(visit, total, **options), losses if is_resumed else {})
    with visit.part("packs prefetched"), tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(visit, Path(folder), total)
        with packs_ahead(trainer):
            compare(visit, "packs prefetched", whole(visit, total), run(trainer))
    with visit.part("sharded over one"), process_group(visit):
        with mock.patch("paceline.train.learn.loop.make_parallel", lambda way, ranks, device: Sharded(ranks, device)):
            losses = whole(visit, 2)
        compare(visit, "sharded over one", whole(visit, 2), losses)


def compare(visit: Visit, name: str, expected: dict[int, float], losses: dict[int, float]) -> None:
    """Losses step by step; equal up to what other orders of float32 sums make of them."""
    worst = (
        max(abs(losses[step] - loss) / abs(loss) for step, loss in expected.items())
        if losses.keys() == expected.keys()
        else math.inf
    )
    visit.check(name, worst < 1e-5, largest_difference=worst, same_bits=losses == expected)


def whole(visit: Visit, total: int, **changes: Any) -> dict[int, float]:
    """Losses by step of a tiny training that goes through."""
    with tempfile.TemporaryDirectory() as folder:
        return run(tiny_trainer(visit, Path(folder), total, **changes))


def run(trainer: Trainer, stop_at: int | None = None) -> dict[int, float]:
    losses: dict[int, float] = {}
    trainer.run(
        lambda figures: losses.update({figures["step"]: figures["objective"]}),
        should_stop=lambda: trainer.state.step == stop_at,
    )
    return losses


def tiny_trainer(visit: Visit, folder: Path, total: int, **changes: Any) -> Trainer:
    config = tiny_llama()
    target = Decoder(config, loud_tensors(config), num_rows=1, max_len=64, device=visit.device)
    draw = np.random.default_rng(1)
    documents = [Document(f"doc-{number}@0/0", draw.integers(0, VOCAB, 24).astype(np.int32), 4) for number in range(10)]
    settings = LoopConfig(**{
        "max_steps": total, "blocks_per_step": 8, "anchors": 3, "blocks_per_pack": 4,
        "autocast": False, "attention": "split",
        "loss": LossConfig("ce"), "optim": OptimConfig(lr=3e-3), "checkpoint_minutes": 1e9, **changes,
    })  # fmt: skip
    raw, network = network_for(target, "none", DrafterShape(num_layers=1, block_size=4, num_taps=2), None, 0)
    network.to(target.device)
    features = OnlineFeatures(target, documents, network.config.target_layer_ids, False)
    embedding = target.matrix_embed(torch.arange(VOCAB, device=target.device)).clone()
    trainable = DFlashTrainable(network, raw, settings.attention)
    trainer_parts = trainable, Corpus(documents, []), features, embedding, Head(head_weight(target)), settings
    return Trainer(*trainer_parts, folder=folder)


@contextmanager
def process_group(visit: Visit) -> Iterator[None]:
    """A group of this process alone, over NCCL on a GPU."""
    is_cuda = torch.device(visit.device).type == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

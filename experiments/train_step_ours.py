"""paceline's DFlash training step on a prepared batch, for experiments/train_step_vs_peers.py: the Trainer's own step, whole.

The loss vocabulary stays off here, so that all sides compute the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from train_step_batch import Batch, Settings, Step

from paceline.draft.checkpoint import DFlashConfig, new_config
from paceline.draft.dflash import DFlashNetwork
from paceline.train.config import LoopConfig, LossConfig
from paceline.train.dataset import Corpus, Document, num_valid_slots
from paceline.train.features import Features
from paceline.train.loop import Trainer
from paceline.train.losses import Head
from paceline.train.packs import Chosen, DFlashTrainable


class Prepared:
    """The batch's features, document by document."""

    def __init__(self, taps: Tensor) -> None:
        self._taps = taps

    def of(self, number: int) -> Features:
        return Features(self._taps[number], None)


def paceline(settings: Settings, batch: Batch) -> dict[str, Callable[[], Step]]:
    ways = ("split", "sdpa") if settings.device == "cpu" else ("flex", "split", "sdpa")
    return {way: lambda way=way: paceline_step(settings, batch, way) for way in ways}


def trainer_for(settings: Settings, batch: Batch, attention: str) -> Trainer:
    raw = new_config(
        settings.hidden_size,
        settings.vocab_size,
        30,
        num_layers=settings.layers,
        block_size=settings.block_size,
        head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size,
        mask_token_id=batch.mask_token_id,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
    )
    raw["dflash_config"]["target_layer_ids"] = list(range(1, 1 + settings.features))
    network = DFlashNetwork.of(DFlashConfig.from_json(raw), {name: weight.clone() for name, weight in batch.weights.items()})
    documents = [Document(str(index), ids.cpu().int().numpy(), 0) for index, ids in enumerate(batch.input_ids)]
    config = LoopConfig(
        epochs=1e6,
        blocks_per_step=settings.anchors * settings.sequences,
        anchors=settings.anchors,
        loss=LossConfig({"decay": "ce", "dpace": "d-pace"}[settings.loss], settings.gamma),
        autocast=settings.dtype == "bfloat16",
        attention=attention,
    )
    head = Head(batch.embedding.to(settings.torch_dtype))
    features = Prepared(batch.taps)
    return Trainer(
        DFlashTrainable(network, raw, attention),
        Corpus(documents, []),
        features,
        batch.embedding,
        head,
        config,
        folder=Path("unused"),
    )


def paceline_step(settings: Settings, batch: Batch, attention: str) -> Step:
    trainer = trainer_for(settings, batch, attention)
    if settings.compile:
        trainer.network.compile()
    documents, parameters = trainer.corpus.train, list(trainer.network.parameters())

    def chosen() -> tuple[list[Chosen], int]:
        if batch.anchors is None:
            blocks, num_slots, trainer.state.place = trainer.planner.step(trainer.state.place)
            return blocks, num_slots
        blocks = [(index, anchors.cpu().numpy()) for index, anchors in enumerate(batch.anchors)]
        return blocks, sum(num_valid_slots(documents[index], anchors, settings.block_size) for index, anchors in blocks)

    def forward_backward() -> tuple[float, int]:
        for parameter in parameters:
            parameter.grad = None
        blocks, num_slots = chosen()
        loss, _ = trainer.forward_backward(blocks, num_slots, trainer.head)
        counted[0] = num_slots
        return loss, sum(len(anchors) for _, anchors in blocks)

    def full_step() -> tuple[float, int]:
        _, blocks = forward_backward()
        torch.nn.utils.clip_grad_norm_(parameters, trainer.config.optim.clip)
        trainer.optimisers.step(1.0)
        return math.nan, blocks

    def comparable(value: float, blocks: int) -> float:
        if settings.loss == "dpace":
            return value * counted[0] * (settings.block_size - 1) / blocks
        slots = torch.arange(settings.block_size - 1)
        return value * (settings.block_size - 1) / float(torch.exp(-slots / settings.gamma).sum())

    counted = [0]
    return Step(parameters, forward_backward, full_step, comparable)

"""Shared by tests of training: a tiny target, documents that it can learn from, and a fast trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.model.checkpoint import random_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.target import Target, head_weight
from paceline.model.torch.decoder import Decoder
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import Features, FeatureSource, OnlineFeatures
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import Pack
from paceline.train.methods.selector import trainable_of

VOCAB, HIDDEN = 24, 32
SMALL: dict[str, Any] = {"num_layers": 1, "block_size": 4, "num_taps": 2}
SHAPE = DecoderConfig(
    "llama", hidden_size=HIDDEN, vocab_size=VOCAB, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-6, max_position=256,
)  # fmt: skip


def tiny_decoder(seed: int = 0) -> Decoder:
    """A random Llama, loud enough that every layer matters."""
    tensors = [(name, tensor if "norm" in name else 8 * tensor) for name, tensor in random_tensors(SHAPE, seed)]
    return Decoder(SHAPE, tensors, num_rows=2, max_len=64)


def document(number: int, prompt: int = 4, answer: int = 16, **changes: Any) -> Document:
    """Random prompt, then a cycle through the vocabulary in steps of its own: easy to learn."""
    generator = np.random.default_rng(number)
    answer_tokens = (generator.integers(VOCAB) + (1 + number % 3) * np.arange(answer)) % (VOCAB - 1)
    tokens = np.concatenate([generator.integers(0, VOCAB - 1, prompt), answer_tokens]).astype(np.int32)
    values: dict[str, Any] = {"key": f"doc-{number}@0/0", "tokens": tokens, "answer_start": prompt} | changes
    return Document(**values)


def documents(number: int = 10) -> list[Document]:
    return [document(index, 3 + index % 4, 10 + index % 7) for index in range(number)]


class Poisoned:
    """Features of which one document's are no numbers."""

    def __init__(self, source: FeatureSource, number: int) -> None:
        self.source, self.number = source, number

    def of(self, number: int) -> Features:
        features = self.source.of(number)
        return Features(features.taps_SF * float("nan"), features.final_SD) if number == self.number else features


def config(**changes: Any) -> LoopConfig:
    """Steps of eight blocks in packs of four, no autocast."""
    values: dict[str, Any] = {
        "max_steps": 8,
        "blocks_per_step": 8,
        "anchors": 3,
        "blocks_per_pack": 4,
        "autocast": False,
    }
    values |= {"loss": LossConfig("ce"), "optim": OptimConfig(lr=3e-3), "checkpoint_minutes": 1e9} | changes
    return LoopConfig(**values)


def trainer(
    folder: Path,
    settings: LoopConfig | None = None,
    *,
    poisoned: int | None = None,
    target: Target | None = None,
    learned: list[Document] | None = None,
    needs_final: bool = False,
    shape: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A new drafter of one layer and blocks of four over ten documents, or those `learned`; `shape`: further fields of
    its DrafterShape; `options` as Trainer's."""
    settings = settings or config()
    target = target or tiny_decoder()
    raw, network = network_for(target, "none", DrafterShape(**{**SMALL, **(shape or {})}), None, settings.seed)
    corpus = Corpus(learned or documents(), [])
    features: FeatureSource = OnlineFeatures(
        target, corpus.train, network.config.target_layer_ids, needs_final or settings.loss.needs_target_probs
    )
    if poisoned is not None:
        features = Poisoned(features, poisoned)
    drafter = trainable_of(network, raw, settings.attention)
    return Trainer(
        drafter, corpus, features, embedding(target), head_of(target, network), settings, folder=folder, **options
    )


class Killed(Exception):
    """Stops a run between its checkpoints."""


def killed_in(step: int) -> Callable[[dict[str, Any]], None]:
    """A callback of `Trainer.run` that stops the run while this step is reported."""

    def kill(figures: dict[str, Any]) -> None:
        if figures["step"] == step:
            raise Killed

    return kill


def steps_of(one: Trainer) -> list[dict[str, Any]]:
    """Figures of every step of a run to its end."""
    steps: list[dict[str, Any]] = []
    one.run(steps.append)
    assert [figures["step"] for figures in steps] == list(range(one.state.step - len(steps) + 1, one.state.step + 1))
    return steps


def losses(one: Trainer, name: str = "loss") -> dict[int, float]:
    """This figure of every step of a run to its end, by the step's number."""
    return {figures["step"]: figures[name] for figures in steps_of(one)}


def resumed(make: Callable[[], Trainer], step: int) -> Trainer:
    """A trainer that continues where another one of the same folder stopped, after this step."""
    stopped = make()
    assert not stopped.run(should_stop=lambda: stopped.state.step == step)
    again = make()
    assert again.resume() and again.state.step == step
    return again


def assert_resumes(make: Callable[[Path], Trainer], folder: Path, step: int = 3, name: str = "loss") -> None:
    """Checks that a run that stopped after this step has the same losses and weights in the end as an uninterrupted
    one."""
    whole, again = make(folder / "whole"), resumed(lambda: make(folder / "parts"), step)
    expected = {number: loss for number, loss in losses(whole, name).items() if number > step}
    assert expected and losses(again, name) == pytest.approx(expected, rel=1e-6)
    for key, tensor in again.parallel.weights(again.network).items():
        torch.testing.assert_close(tensor, whole.parallel.weights(whole.network)[key], atol=1e-6, rtol=1e-5)


def a_pack(one: Trainer) -> Pack:
    chosen, _, _ = one.planner.step(one.state.place)
    return one.packer.pack(chosen)


def embedding(target: Target) -> torch.Tensor:
    return target.matrix_embed(torch.arange(target.vocab_size)).clone()


def head_of(target: Target, network: DFlashNetwork) -> Head:
    return Head(head_weight(target), network.config.output_multiplier, network.config.final_logit_softcapping)

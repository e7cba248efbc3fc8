"""Trains the drafter to follow the policy: a few steps between two rollouts, on the latest samples.

A policy update changes the drafter's inputs (hidden states) and its targets (tokens). The new policy reads the latest
rollouts once, and the drafter trains on these hidden states with the policy's embedding and head, or its own if it has
another width. Samples are exact in any case; a stale drafter only costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from paceline.bounds import Checked, Count, within
from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.codebooks import materialised
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.formats.family import network_of
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.rl.rollouts import Sample
from paceline.train.config import LossConfig, OptimConfig
from paceline.train.documents.dataset import Document, draw_anchors, num_valid_slots
from paceline.train.features.hidden_states import OnlineFeatures, ScaledFeatures, measure_scale
from paceline.train.learn.initial_weights import OWN_HEAD, embedding_matrix, head_of
from paceline.train.learn.losses import Head, SlotMetrics, head_loss
from paceline.train.learn.optimisers import Optimisers
from paceline.train.learn.packs import Chosen, PackBudget, Packer, split_into_packs
from paceline.train.methods.copied_layers import settle_units
from paceline.train.methods.dspark import DSparkTrainable
from paceline.train.methods.selector import DFlash2Trainable, trainable_of

BLOCKS_PER_PACK, TOKENS_PER_PACK = 128, 4096


@dataclass(frozen=True, slots=True)
class FollowConfig(Checked):
    """Settings of the drafter's training between two rollouts. Raises ConfigError on impossible values."""

    steps: Count = 2
    """Training steps between two rollouts."""
    anchors: Count = 8
    """Number of draft blocks to train on per sample and step, at random positions."""
    documents: Count = 32
    """Largest number of samples to train on, spread evenly over the latest batch of rollouts."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))
    seed: Annotated[int, within("0 or more", least=0)] = 0


class DFlashFollower:
    """Trains the engine's DFlash, DFlash 2 or DSpark drafter after each policy update; implements
    `rollouts.Follower`."""

    def __init__(self, drafter: Drafter, config: FollowConfig | None = None) -> None:
        """Raises ConfigError if `drafter` is of a kind that cannot be trained here."""
        if not isinstance(drafter, DFlashDrafter) or drafter.config.from_anchor:
            raise ConfigError(
                f"the drafter {drafter.name!r} does not follow a policy: DFlash drafters do; lookups (ngram) need "
                "nothing, leave the follower out"
            )
        self.drafter, self.config = drafter, config or FollowConfig()
        if drafter.config.has_own_width and self.config.loss.needs_target_probs:
            raise ConfigError(OWN_HEAD)
        self._dtypes = {name: tensor.dtype for name, tensor in drafter.network.state_dict().items()}
        weights = {name: tensor.float().clone() for name, tensor in drafter.network.state_dict().items()}
        self.network = network_of(drafter.config, weights)
        self.trainable = trainable_of(self.network, drafter.config.raw)
        self._optimisers: Optimisers | None = None
        self._scale_F: Tensor | None = None
        self._num_learned = 0

    def learn(self, llm: LLM, samples: Sequence[Sample]) -> dict[str, float]:
        """Trains the drafter on the samples for `config.steps` steps, and copies the trained weights into the engine's
        drafter. Returns two values of the first step: "drafter_loss", and "drafter_eal", the expected acceptance
        length. If all samples are too short for a draft block, does not train and returns {}."""
        documents = self._documents(samples)
        if not documents:
            return {}
        config, target = self.config, llm.target
        source = OnlineFeatures(target, documents, self.drafter.tap_layers, config.loss.needs_target_probs)
        if self._scale_F is None:
            self._scale_F, mean_F = measure_scale(source, documents)
            settle_units(self.network, self._scale_F, mean_F, is_new=False, is_copied=False)
            self._optimisers = Optimisers(self.network, config.optim)
        own = Vocabulary(self.drafter.draft_ids, self.drafter.head_VD)
        embedding_VD = embedding_matrix(target, self.drafter.config, own).float()
        head = head_of(target, self.drafter.config, *own)
        packer = Packer(self.drafter.block_size, documents, ScaledFeatures(source, self._scale_F), target.device)
        first: dict[str, float] = {}
        for number in range(config.steps):
            chosen = [
                (index, draw_anchors(document, config.anchors, config.seed, self._num_learned + number))
                for index, document in enumerate(documents)
            ]
            figures = self._step(chosen, documents, packer, head, embedding_VD)
            first = first or figures
        self._num_learned += config.steps
        self._hand_over(embedding_VD)
        return first

    def _documents(self, samples: Sequence[Sample]) -> list[Document]:
        """Converts samples to documents; skips those too short for a block."""
        number = min(len(samples), self.config.documents)
        documents = []
        for index in range(number):
            sample = samples[index * len(samples) // number]
            tokens = np.array(sample.prompt_ids + sample.completion_ids, dtype=np.int32)
            document = Document(f"rollout-{index}", tokens, len(sample.prompt_ids))
            if document.num_anchors:
                documents.append(document)
        return documents

    @torch.enable_grad()
    def _step(
        self, chosen: list[Chosen], documents: list[Document], packer: Packer, head: Head, embedding_VD: Tensor
    ) -> dict[str, float]:
        assert self._optimisers
        block_size, trainable, loss = self.drafter.block_size, self.trainable, self.config.loss
        num_slots = sum(num_valid_slots(documents[index], anchors_A, block_size) for index, anchors_A in chosen)
        metrics = SlotMetrics.zero(block_size - 1)
        for part in split_into_packs(chosen, PackBudget(BLOCKS_PER_PACK, TOKENS_PER_PACK, block_size)):
            pack = packer.pack(part)
            hidden_TD = trainable.hidden(pack, embedding_VD, False)
            inputs = hidden_TD, pack, head, embedding_VD, loss, num_slots
            if isinstance(trainable, DSparkTrainable):
                objective, measured = trainable.loss(*inputs)
            else:
                objective, measured = head_loss(hidden_TD, pack.slots, head, loss, num_slots)
            if isinstance(trainable, DFlash2Trainable):
                more, walked = trainable.selector_loss(*inputs, is_measured=True, is_learning=True)
                objective, measured.flat = objective + more, measured.flat + walked.flat
            objective.backward()
            metrics.flat += measured.flat
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optim.clip)
        self._optimisers.step(1.0)
        rates = metrics.rates()
        return {"drafter_loss": rates["loss"], "drafter_eal": rates["eal"]}

    @torch.no_grad()
    def _hand_over(self, embedding_VD: Tensor) -> None:
        """Copies the trained weights into the engine's drafter, in its dtypes; the engine packs them when it rebinds
        it."""
        weights = self.network.state_dict()
        if isinstance(self.network, DFlash2Network):
            weights = materialised(weights, embedding_VD)
        weights = {name: tensor.to(self._dtypes[name], copy=True) for name, tensor in weights.items()}
        self.drafter.replace_weights(weights)

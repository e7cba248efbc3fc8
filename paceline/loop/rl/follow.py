"""The drafter follows the policy: a few steps of training between two rollouts, on the tokens that were just said.

A policy's update is a drift: what the drafter reads (the policy's hidden states) and what it guesses (its tokens) both move.
The latest rollouts are free data for it. They are read once by the new weights, whose hidden states the drafter learns from;
embedding and head are the new policy's, too. Lookups in the text need none of this. Lossless either way: a drafter that fell
behind costs time, never another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from paceline.bounds import Count, check, within
from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Network, materialised, network_of
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.rl.rollouts import Sample
from paceline.train.config import LossConfig, OptimConfig
from paceline.train.documents.dataset import Document, draw_anchors, num_valid_slots
from paceline.train.features.hidden_states import OnlineFeatures, ScaledFeatures, measure_scale
from paceline.train.learn.initial_weights import head_of
from paceline.train.learn.losses import Head, SlotMetrics, head_loss
from paceline.train.learn.optimisers import Optimisers
from paceline.train.learn.packs import Chosen, PackBudget, Packer, split_into_packs
from paceline.train.methods.copied_layers import settle_units
from paceline.train.methods.selector import DFlash2Trainable, trainable_of

BLOCKS_PER_PACK, TOKENS_PER_PACK = 128, 4096


@dataclass(frozen=True, slots=True)
class FollowConfig:
    """How the drafter follows. Raises ConfigError on impossible values."""

    steps: Count = 2
    """Updates of the drafter between two rollouts."""
    anchors: Count = 8
    """Blocks of each document in each of them, at random places."""
    documents: Count = 32
    """Of the latest rollouts at most so many, evenly spread."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))
    seed: Annotated[int, within("0 or more", least=0)] = 0

    def __post_init__(self) -> None:
        check(self)


class DFlashFollower:
    """Trains the engine's DFlash drafter, of either version, at the policy's side; as `rollouts.Follower`."""

    def __init__(self, drafter: Drafter, config: FollowConfig | None = None) -> None:
        """Raises ConfigError for drafters that have nothing to train, or that this does not know how to."""
        if not isinstance(drafter, DFlashDrafter) or drafter.config.from_anchor:
            raise ConfigError(
                f"the drafter {drafter.name!r} does not follow a policy: DFlash drafters do; lookups (ngram) need nothing, "
                "leave the follower out"
            )
        self.drafter, self.config = drafter, config or FollowConfig()
        self._dtypes = {name: tensor.dtype for name, tensor in drafter.network.state_dict().items()}
        weights = {name: tensor.float().clone() for name, tensor in drafter.network.state_dict().items()}
        self.network = network_of(drafter.config, weights)
        self.trainable = trainable_of(self.network, drafter.config.raw)
        self._optimisers: Optimisers | None = None
        self._scale_F: Tensor | None = None
        self._num_learned = 0

    def learn(self, llm: LLM, samples: Sequence[Sample]) -> dict[str, float]:
        """As Follower.learn. `eal`: tokens a round expected of the drafter on the first blocks, before it learned from them."""
        documents = self._documents(samples)
        if not documents:
            return {}
        config, target = self.config, llm.target
        source = OnlineFeatures(target, documents, self.drafter.tap_layers, config.loss.needs_target_probs)
        if self._scale_F is None:
            self._scale_F, mean_F = measure_scale(source, documents)
            settle_units(self.network, self._scale_F, mean_F, is_new=False, is_copied=False)
            self._optimisers = Optimisers(self.network, config.optim)
        embedding_VD = target.matrix_embed(torch.arange(target.vocab_size, device=target.device)).float().clone()
        head = head_of(target, self.drafter.config, self.drafter.draft_ids, self.drafter.head_VD)
        packer = Packer(self.drafter.block_size, documents, ScaledFeatures(source, self._scale_F), target.device)
        told: dict[str, float] = {}
        for number in range(config.steps):
            chosen = [
                (index, draw_anchors(document, config.anchors, config.seed, self._num_learned + number))
                for index, document in enumerate(documents)
            ]
            figures = self._step(chosen, documents, packer, head, embedding_VD)
            told = told or figures
        self._num_learned += config.steps
        self._hand_over(embedding_VD)
        return told

    def _documents(self, samples: Sequence[Sample]) -> list[Document]:
        """The samples with their prompts; of several turns from the first token that the policy said."""
        step = max(1, len(samples) // self.config.documents)
        found = []
        for index, each in enumerate(samples[::step][: self.config.documents]):
            tokens = np.array(each.prompt_ids + each.completion_ids, dtype=np.int32)
            document = Document(f"rollout-{index}", tokens, len(each.prompt_ids))
            if document.num_anchors:
                found.append(document)
        return found

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
            objective, measured = head_loss(hidden_TD, pack.slots, head, loss, num_slots)
            if isinstance(trainable, DFlash2Trainable):
                given = hidden_TD, pack, head, embedding_VD, loss, num_slots
                more, walked = trainable.selector_loss(*given, is_measured=True, is_learning=True)
                objective, measured.flat = objective + more, measured.flat + walked.flat
            objective.backward()
            metrics.flat += measured.flat
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optim.clip)
        self._optimisers.step(1.0)
        rates = metrics.rates()
        return {"drafter_loss": rates["loss"], "drafter_eal": rates["eal"]}

    @torch.no_grad()
    def _hand_over(self, embedding_VD: Tensor) -> None:
        """The drafter's weights as its file has them; the engine packs them when it binds the drafter again."""
        weights = self.network.state_dict()
        if isinstance(self.network, DFlash2Network):
            weights = materialised(weights, embedding_VD)
        made = {name: tensor.to(self._dtypes[name], copy=True) for name, tensor in weights.items()}
        self.drafter.network.load_state_dict(made, assign=True)

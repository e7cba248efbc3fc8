"""Which network a training run begins with, by `DrafterShape.kind`: DFlash and DFlash 2, EAGLE-3, a target's own MTP layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.model.target import Target
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import Corpus
from paceline.train.learn.initial_weights import FirstNorm, head_of, init_folder, most_frequent, network_for
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import Trainable
from paceline.train.methods.copied_layers import settle_units
from paceline.train.methods.eagle3 import Eagle3Trainable, drafted_ids, eagle3_for, settle_eagle3_units, teacher_of
from paceline.train.methods.mtp import MtpNetwork, MtpTrainable, head_for, mtp_for
from paceline.train.methods.selector import trainable_of
from paceline.train.plan.choices import is_trained_already


@dataclass(frozen=True, slots=True)
class Begun:
    """A drafter before its first step."""

    drafter: Trainable
    network: DFlashNetwork | Eagle3Network | MtpNetwork
    """`drafter.network`, by its own type."""
    taps: tuple[int, ...]
    """Target layers whose hidden states it reads."""
    head: Head
    """Of the losses."""
    drafting: Head
    """What held-out documents are drafted with."""
    is_new: bool
    """Whether its first weights are made here: no --init, and no layer of the target's own."""
    is_copied: bool

    @property
    def first_norm(self) -> FirstNorm | None:
        """Of a new network the norm before the head, by which its first logits are scaled."""
        if not self.is_new:
            return None
        if isinstance(self.network, MtpNetwork):
            return FirstNorm(self.network.get_parameter("final_norm.weight"), self.network.config.norm_offset)
        return FirstNorm(self.network.norm.weight)


def draft_ids_of(config: TrainConfig, corpus: Corpus, target: Target, say: Callable[[str], None]) -> Tensor | None:
    """The tokens of a new drafter's draft vocabulary, or of any that has a head of its own; None for all."""
    if config.shape.kind == "eagle3":
        return drafted_ids(config.shape, init_folder(config.init, config.target.model), corpus, target, say)
    return most_frequent(config.shape.draft_vocab, corpus, target, say)


def begun(config: TrainConfig, target: Target, draft_ids: Tensor | None) -> Begun:
    """Makes a new drafter, or reads that of `config.init`, on the target's device.

    Raises DrafterMismatchError when `init` is of another target, and what reading it does.
    """
    begins = _begun(config, target, draft_ids)
    if config.loop.autocast or target.device.type != "cpu":
        return begins
    # A processor without bfloat16 makes products of it out of others, a hundred times slower than in float32.
    head = begins.head.in_float32()
    drafting = head if begins.drafting is begins.head else begins.drafting.in_float32()
    return replace(begins, head=head, drafting=drafting)


def _begun(config: TrainConfig, target: Target, draft_ids: Tensor | None) -> Begun:
    shape, loop, init = config.shape, config.loop, init_folder(config.init, config.target.model)
    flags = init is None and not is_trained_already(shape), shape.is_copied
    drafter: Trainable
    if shape.kind == "mtp":
        raw, layer = mtp_for(target, config)
        drafter = MtpTrainable(layer.to(target.device), raw, shape.block_size, target.ends.embedding)
        head = head_for(target)
        return Begun(drafter, layer, (target.num_layers - 1,), head, head, *flags)
    if shape.kind == "eagle3":
        assert draft_ids is not None
        raw, eagle = eagle3_for(target, shape, init, draft_ids, loop.seed)
        head = teacher_of(target, draft_ids)
        drafter = Eagle3Trainable(eagle.to(target.device), raw, shape.block_size)
        return Begun(drafter, eagle, eagle.config.tap_layers, head, head, *flags)
    raw, network = network_for(target, config.target.model, shape, init, loop.seed)
    drafting = head_of(target, network.config, draft_ids)
    head = drafting if draft_ids is None or not loop.loss.vocab else head_of(target, network.config, None)
    drafter = trainable_of(network.to(target.device), raw, loop.attention)
    return Begun(drafter, network, network.config.target_layer_ids, head, drafting, *flags)


def settled(begins: Begun, scale_F: Tensor, mean_F: Tensor) -> Tensor:
    """Bring features to one scale while it learns (`features/hidden_states.py`); the scale that they are to be given in."""
    network = begins.network
    if isinstance(network, MtpNetwork):
        return torch.ones_like(scale_F)  # they are the target's, behind its final norm, and go through a norm first
    if isinstance(network, Eagle3Network):
        return settle_eagle3_units(network, scale_F, mean_F, is_new=begins.is_new)
    settle_units(network, scale_F, mean_F, is_new=begins.is_new, is_copied=begins.is_copied)
    return scale_F

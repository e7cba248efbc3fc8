"""Creates a training run's initial drafter, by the drafting method `DrafterShape.kind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash2.drafter import ExtendedNetwork
from paceline.draft.eagle3.checkpoint import read_eagle3
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import ConfigError, DrafterMismatchError, ModelNotFoundError, UnsupportedModelError
from paceline.model.config.decoder import has_llama_layers
from paceline.model.target import Target
from paceline.train.config import DrafterShape, TrainConfig
from paceline.train.documents.dataset import Corpus
from paceline.train.learn.initial_weights import (
    OWN_HEAD,
    FirstNorm,
    embedding_matrix,
    head_of,
    init_folder,
    most_frequent,
    network_for,
    own_sizes,
)
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import Trainable
from paceline.train.methods.copied_layers import REMEDY, settle_units
from paceline.train.methods.eagle3 import Eagle3Trainable, eagle3_for, target_head, use_scaled_eagle3_units
from paceline.train.methods.mtp import MtpNetwork, MtpTrainable, head_for, mtp_for
from paceline.train.methods.selector import trainable_of
from paceline.train.plan.choices import is_trained_already
from paceline.train.plan.target_facts import TargetFacts, read_target


@dataclass(frozen=True, slots=True)
class InitialDrafter:
    """A drafter before its first training step, with the objects that its training needs: an embedding matrix, LM
    heads, and the indices of the target layers that it reads."""

    drafter: Trainable
    network: DFlashNetwork | Eagle3Network | MtpNetwork
    """`drafter.network`, with its specific type."""
    taps: tuple[int, ...]
    """Target layers whose hidden states the drafter reads."""
    embedding_VD: Tensor
    """Embedding matrix for the input tokens of blocks, [V, D]: the target's, or the drafter's own."""
    head: Head
    """Head for the training losses."""
    drafting_head: Head
    """Head for drafting and for held-out documents: only the draft vocabulary, if the drafter has one."""
    is_new: bool
    """True if the drafter was not trained before: its weights are random, or copies of the target's layers."""
    is_copied: bool
    """True if the layers of a new drafter are copies of the target's."""

    @property
    def first_norm(self) -> FirstNorm | None:
        """The norm before the LM head of a new network, for `scale_first_logits`; None for a network that was already
        trained."""
        if not self.is_new:
            return None
        if isinstance(self.network, MtpNetwork):
            return FirstNorm(self.network.get_parameter("final_norm.weight"), self.network.config.norm_offset)
        return FirstNorm(self.network.norm.weight)


def check_drafter(config: TrainConfig) -> None:
    """Checks that the run's drafter fits the target, before time is spent on answers. Checks nothing with --scale tiny,
    or if the target's sizes cannot be read without its weights. Raises:
    - ConfigError if a new drafter's settings do not fit the target, or if the user gave other sizes than those of the
      drafter in `config.init`;
    - DrafterMismatchError if the drafter in `config.init` belongs to another target;
    - another PacelineError if it cannot be read."""
    if config.scale != "default":
        return
    init = init_folder(config.init, config.target.model)
    try:
        target = read_target(config.target)
    except (ModelNotFoundError, UnsupportedModelError):
        return
    sizes = cast(Target, target.shape)  # no more of a target is read with --init
    try:
        if init is None:
            _check_new(config.shape, target)
        elif config.shape.kind == "mtp":
            mtp_for(sizes, config)
        elif config.shape.kind == "eagle3":
            _check_kept(config, eagle3_for(sizes, config.shape, init, torch.empty(0), config.loop.seed)[1])
        else:
            _check_kept(config, network_for(sizes, config.target.model, config.shape, init, config.loop.seed)[1])
    except DrafterMismatchError as error:
        raise DrafterMismatchError(f"--init {config.init}: {error}") from error


def _check_kept(config: TrainConfig, network: DFlashNetwork | Eagle3Network) -> None:
    """Raises ConfigError if the user gave a size or method that `network`, the drafter in `config.init`, does not
    have."""
    stored = network.config
    own = {name: getattr(stored.shape, name) for name in ("num_layers", "intermediate_size", "num_heads")}
    own |= {"num_kv_heads": stored.shape.num_kv_heads, "attention_bias": stored.shape.qkv_bias}
    if isinstance(stored, DFlashConfig):
        own |= {"num_taps": len(stored.target_layer_ids), "tap_layers": stored.target_layer_ids}
        own |= {"mask_token_id": stored.mask_token_id, "is_causal": all(stored.is_causal), "kind": stored.kind}
        rank = stored.second.selector_rank if stored.second else stored.markov and stored.markov.rank
        own |= {"selector_rank": rank, "codebooks": network.codebooks} if isinstance(network, ExtendedNetwork) else {}
    else:
        wanted, number = config.shape.draft_vocab or 0, stored.draft_vocab_size
        is_all = number == stored.shape.vocab_size and not 0 < wanted < number  # 0, and more than there are, mean all
        own |= {"tap_layers": stored.tap_layers, "draft_vocab": wanted if is_all else number}
        own |= {"eagle_version": "3.1" if stored.fc_norm and stored.norm_output else "3"}
    for name, value in own.items():
        if (given := getattr(config.shape, name)) not in (None, value) and config.is_given(f"shape.{name}"):
            drafter = f"the drafter of --init {config.init}"
            raise ConfigError(f"{name} is {given}, but {value} in {drafter}: leave {name} out")


def _check_new(shape: DrafterShape, target: TargetFacts) -> None:
    taps, mask, sizes = shape.tap_layers or (), shape.mask_token_id or 0, target.shape
    own_sizes(shape, target.raw if target.family else {})
    if max(taps, default=0) >= sizes.num_layers:
        raise ConfigError(f"--tap-layers: the target has layers 0 to {sizes.num_layers - 1}")
    if len(set(taps)) < len(taps):
        raise ConfigError("--tap-layers names a layer twice: leave one out")
    if taps and shape.num_taps not in (None, len(taps)):
        raise ConfigError(f"--taps is {shape.num_taps}, but --tap-layers names {len(taps)} layers: leave one out")
    if mask >= sizes.vocab_size:
        raise ConfigError(f"--mask-token {mask}: the target has tokens 0 to {sizes.vocab_size - 1}")
    if shape.is_copied and not shape.is_chained and not has_llama_layers(target.family or "llama"):
        raise ConfigError(f"--first-layers copied: layers of {target.family} cannot be copied: {REMEDY}")


def draft_ids_of(config: TrainConfig, corpus: Corpus, target: Target, say: Callable[[str], None]) -> Tensor | None:
    """Returns the draft vocabulary of a run, as ascending token ids; None if the drafter drafts all tokens.
    - An EAGLE-3 drafter in `config.init` keeps its vocabulary.
    - Other drafters get the `config.shape.draft_vocab` most frequent tokens of the answers. Among equally frequent
      tokens, those that the drafter in `config.init` has are preferred.
    - If a new EAGLE-3 drafter drafts all tokens, all ids are returned, not None.

    `say`, given by the caller, gets a line of text for the user: the share of the answers' tokens that the vocabulary
    covers."""
    init, number = init_folder(config.init, config.target.model), config.shape.draft_vocab
    is_eagle3 = config.shape.kind == "eagle3"
    if is_eagle3 and init is not None:
        return read_eagle3(init).ids.sort().values
    known = read_draft_ids(init) if init is not None and number else None
    chosen = most_frequent(number, corpus, target, say, known)
    return torch.arange(target.vocab_size) if chosen is None and is_eagle3 else chosen


def initial_drafter(config: TrainConfig, target: Target, draft_ids: Tensor | None) -> InitialDrafter:
    """Creates a new drafter, or reads that of `config.init`, on the target's device. `draft_ids`: result of
    `draft_ids_of`. Raises DrafterMismatchError if `init` belongs to another target, ConfigError if it does not exist or
    cannot be trained with these settings, and another PacelineError if its files cannot be read."""
    initial = _built(config, target, draft_ids)
    if config.loop.autocast or target.device.type != "cpu":
        return initial
    # A processor without bfloat16 emulates its products, a hundred times slower than in float32.
    head = initial.head.in_float32()
    drafting_head = head if initial.drafting_head is initial.head else initial.drafting_head.in_float32()
    return replace(initial, head=head, drafting_head=drafting_head)


def _built(config: TrainConfig, target: Target, draft_ids: Tensor | None) -> InitialDrafter:
    shape, loop, init = config.shape, config.loop, init_folder(config.init, config.target.model)
    flags = init is None and not is_trained_already(shape), shape.is_copied
    drafter: Trainable
    if shape.kind == "mtp":
        raw, layer = mtp_for(target, config)
        drafter = MtpTrainable(layer.to(target.device), raw, shape.block_size, target.ends.embedding)
        head = head_for(target)
        return InitialDrafter(drafter, layer, (target.num_layers - 1,), embedding_matrix(target), head, head, *flags)
    if shape.kind == "eagle3":
        assert draft_ids is not None
        raw, eagle = eagle3_for(target, shape, init, draft_ids, loop.seed)
        head = target_head(target, draft_ids)
        drafter = Eagle3Trainable(eagle.to(target.device), raw, shape.block_size)
        return InitialDrafter(drafter, eagle, eagle.config.tap_layers, embedding_matrix(target), head, head, *flags)
    block_size = shape.block_size if config.is_given("shape.block_size") else None
    raw, network = network_for(
        target, config.target.model, shape, init, loop.seed, block_size=block_size, window=shape.sliding_window
    )
    own = _own_vocabulary(network.config, config, draft_ids, init)
    drafting_head = head_of(target, network.config, *own)
    is_whole = own.ids is None or own.head_VD is not None or not loop.loss.vocab
    head = drafting_head if is_whole else head_of(target, network.config, None)
    embedding_VD = embedding_matrix(target, network.config, own)
    drafter = trainable_of(network.to(target.device), raw, loop.attention)
    taps = network.config.target_layer_ids
    return InitialDrafter(drafter, network, taps, embedding_VD, head, drafting_head, *flags)


def _own_vocabulary(
    drafter: DFlashConfig, config: TrainConfig, draft_ids: Tensor | None, init: Path | None
) -> Vocabulary:
    """Returns the draft vocabulary of a training; that of `init` if this drafter has another width than its target.
    Raises ConfigError if such a drafter is given other tokens, or a loss against the target's probabilities."""
    if not drafter.has_own_width or init is None:
        return Vocabulary(draft_ids)
    if draft_ids is not None:
        raise ConfigError(
            f"--init {init} has another width than its target and a head of its own, whose tokens are fixed: leave "
            "--draft-vocab out"
        )
    if config.loop.loss.needs_target_probs:
        raise ConfigError(f"--init {init}: {OWN_HEAD}")
    return read_stored(init).vocabulary


def use_scaled_units(initial: InitialDrafter, scale_F: Tensor, mean_F: Tensor) -> Tensor:
    """Prepares the drafter for training on features of similar magnitude; returns the scale [F] by which the caller
    must multiply features. It is all ones for drafters that norm features themselves, such as mtp drafters. scale_F,
    mean_F [F]: results of `measure_scale`."""
    network = initial.network
    if isinstance(network, MtpNetwork):
        return torch.ones_like(scale_F)  # features come from the target's final norm, and the layer norms them first
    if isinstance(network, Eagle3Network):
        return use_scaled_eagle3_units(network, scale_F, mean_F, is_new=initial.is_new)
    settle_units(network, scale_F, mean_F, is_new=initial.is_new, is_copied=initial.is_copied)
    return scale_F

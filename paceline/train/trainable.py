"""What the training loop needs of a drafter: five things, and DFlash's way of giving them.

Another kind of drafter (EAGLE-3, DFlash 2) is trained by the same loop as soon as one class says these five for it. The loop
itself knows blocks and slots: which document, which anchor, which tokens come behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.draft.dflash import DFlashNetwork
from paceline.train.attention import make_attention
from paceline.train.packs import Pack


class Trainable(Protocol):
    """A drafter while it learns."""

    network: nn.Module
    """The weights that are trained, float32. Its `state_dict` is what a checkpoint holds."""
    raw: dict[str, Any]
    """config.json of its checkpoints."""
    block_size: int
    """The anchor and the tokens drafted after it, K = block_size - 1 of them."""
    layers: Iterable[nn.Module]
    """Modules of `network` that run one after another: each is sharded, or computed again in the backward pass, alone."""

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        """Hidden states [A * K, D] from which the target's head predicts the slots, block by block; differentiable.

        embedding_VD: the target's, float32 or less. With `is_autocast` products are made in bfloat16.
        """
        ...


class DFlashTrainable(Trainable):
    """DFlash: every block is [anchor, MASK, MASK, ...]; the context enters each layer as keys and values of the taps."""

    def __init__(self, network: DFlashNetwork, raw: dict[str, Any], attention: str = "auto") -> None:
        self.network, self.raw, self.layers = network, raw, network.layers
        self.block_size = network.config.block_size
        self._config, self._attention = network.config, attention

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        """As Trainable.hidden."""
        config = self._config
        tokens_AB = torch.full((len(pack.anchors_A), self.block_size), config.mask_token_id, device=embedding_VD.device)
        tokens_AB[:, 0] = pack.anchors_A
        embedded_TD = F.embedding(tokens_AB.flatten(), embedding_VD).float() * config.input_embedding_scale
        dtype = torch.bfloat16 if is_autocast else torch.float32
        attend = make_attention(self._attention, config, pack.layout, dtype)
        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            taps_NF = pack.taps_NF if is_autocast else pack.taps_NF.float()
            hidden_TD = self.network(embedded_TD, taps_NF, attend)
        return hidden_TD.unflatten(0, (-1, self.block_size))[:, 1:].flatten(0, 1)

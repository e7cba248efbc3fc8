"""A pack: blocks of one or several documents as tensors, ready for one forward and backward of the network; and the network.

Linear layers see all slots of a pack at once; attention knows where documents begin and end. The loop itself knows blocks and
slots: which document, which anchor, which tokens come behind it. Another kind of drafter (EAGLE-3, DFlash 2) is trained by the
same loop as soon as one class says for it the five things of `Trainable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.draft.dflash import DFlashNetwork
from paceline.train.attention import Layout, make_attention
from paceline.train.dataset import Document, labels_of
from paceline.train.features import FeatureSource
from paceline.train.losses import Slots

Chosen = tuple[int, NDArray[np.int64]]
"""A document's number and the anchors of its blocks."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Inputs and labels of A blocks from some documents, K = block_size - 1 slots each."""

    layout: Layout
    anchors_A: Tensor
    """Token ids of the anchors."""
    taps_NF: Tensor
    """Features of all contexts, cut behind each document's last anchor."""
    slots: Slots


@dataclass(frozen=True, slots=True)
class Packer:
    """Makes packs from documents and their features."""

    block_size: int
    documents: list[Document]
    features: FeatureSource
    device: torch.device | str = "cpu"

    def pack(self, chosen: list[Chosen]) -> Pack:
        """One pack of these documents and anchors."""
        size, device, anchors = self.block_size, self.device, [anchors_A for _, anchors_A in chosen]
        labels, valid, taps, finals, tokens = [], [], [], [], []
        for number, anchors_A in chosen:
            document, features = self.documents[number], self.features.of(number)
            labels_AK, valid_AK = labels_of(document, anchors_A, size)
            labels.append(labels_AK)
            valid.append(valid_AK)
            taps.append(features.taps_SF[: int(anchors_A.max())])
            if features.final_SD is not None:
                before_AK = np.minimum(anchors_A[:, None] + np.arange(size - 1), len(document) - 1)
                finals.append(features.final_SD[torch.from_numpy(before_AK)])
            tokens.append(document.tokens[anchors_A])
        layout = Layout(tuple(map(len, taps)), tuple(torch.from_numpy(each).to(device) for each in anchors), size)
        slots = Slots(
            torch.from_numpy(np.concatenate(labels)).to(device),
            torch.from_numpy(np.concatenate(valid)).to(device),
            torch.cat(finals).to(device) if finals else None,
        )
        return Pack(layout, torch.from_numpy(np.concatenate(tokens)).long().to(device), torch.cat(taps).to(device), slots)


def split_into_packs(chosen: list[Chosen], blocks_per_pack: int) -> Iterator[list[Chosen]]:
    """Groups of whole documents of at most this many blocks; a longer document is a group of its own."""
    group: list[Chosen] = []
    num_blocks = 0
    for each in chosen:
        if group and num_blocks + len(each[1]) > blocks_per_pack:
            yield group
            group, num_blocks = [], 0
        group.append(each)
        num_blocks += len(each[1])
    if group:
        yield group


def heldout_anchors(documents: list[Document], number: int) -> list[Chosen]:
    """The same evenly spread anchors of every document each time."""
    return [
        (index, np.unique(np.linspace(document.answer_start, len(document) - 2, number).astype(np.int64)))
        for index, document in enumerate(documents)
    ]


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

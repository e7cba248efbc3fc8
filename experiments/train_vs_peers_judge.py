"""The judge of `train_vs_peers.py`: one figure for weights of any side, with paceline's own target and engine.

`eal` is what held-out documents are expected to bring, teacher-forced: 1 + sum over k of the share of blocks whose first k
slots are all right, over the same evenly spread anchors each time. `served` are tokens a round of the engine itself, greedy.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from train_vs_peers_curve import Text

from paceline.config import EngineConfig
from paceline.draft.checkpoint import DFlashConfig
from paceline.draft.dflash2 import drafter_of, network_of
from paceline.engine.llm import LLM
from paceline.model.backends import load_target, settle
from paceline.train.config import LossConfig
from paceline.train.dataset import Document
from paceline.train.features import Features, OnlineFeatures
from paceline.train.losses import SlotMetrics, head_loss
from paceline.train.packs import DFlashTrainable, Packer, heldout_anchors, split_into_packs
from paceline.train.served import SERVED_BATCH, serve_heldout
from paceline.train.start import head_of

ANCHORS, BLOCKS_AT_ONCE = 16, 128
"""Blocks of a document; blocks computed at once."""


class Kept:
    """Features of all documents, in memory."""

    def __init__(self, source: OnlineFeatures) -> None:
        self._found = [source.of(number).taps_SF.clone() for number in range(len(source.documents))]

    def of(self, number: int) -> Features:
        return Features(self._found[number], None)


class Judge:
    def __init__(self, settings: EngineConfig, raw: dict[str, Any], texts: list[Text]) -> None:
        self._settings, self._raw, self.config = settings, raw, DFlashConfig.from_json(raw)
        self._documents = [Document(str(n), np.array(text.ids, dtype=np.int32), text.start) for n, text in enumerate(texts)]
        longest = max(map(len, self._documents))
        target = load_target(settle(replace(settings, max_batch=1, max_len=longest + 1)))
        features = OnlineFeatures(target, self._documents, self.config.target_layer_ids, needs_final=False)
        packer = Packer(self.config.block_size, self._documents, Kept(features))
        chosen = heldout_anchors(self._documents, ANCHORS)
        self._packs = [packer.pack(each) for each in split_into_packs(chosen, BLOCKS_AT_ONCE)]
        self._head = head_of(target, self.config, None)
        self._embedding_VD = target.embed(torch.arange(target.vocab_size)).clone()

    @torch.no_grad()
    def eal(self, tensors: dict[str, Tensor]) -> float:
        """Of these weights, named as in a z-lab checkpoint; rounded to bfloat16 first, as they are served."""
        network = network_of(self.config, {name: tensor.bfloat16().float() for name, tensor in tensors.items()})
        drafter, metrics = DFlashTrainable(network, self._raw), SlotMetrics.zero(self.config.block_size - 1)
        for pack in self._packs:
            hidden_TD = drafter.hidden(pack, self._embedding_VD, True)
            metrics.flat += head_loss(hidden_TD, pack.slots, self._head, LossConfig("ce"), 1.0)[1].flat
        return float(metrics.rates()["eal"])

    def served(self, tensors: dict[str, Tensor], max_tokens: int) -> float:
        """Tokens a round of the held-out prompts."""
        longest = max(document.answer_start for document in self._documents) + max_tokens
        llm = LLM.of(replace(self._settings, drafter="none", max_batch=SERVED_BATCH, max_len=longest))
        drafter = drafter_of(network_of(self.config, {name: tensor.bfloat16() for name, tensor in tensors.items()}))
        return serve_heldout(llm, drafter, self._documents, max_tokens).tokens_per_round

    def judged(self, folder: Path) -> list[dict[str, Any]]:
        """The lines of a curve with `eal`; the last one is `served` too."""
        lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
        for line in lines:
            tensors = load_file(folder / line.pop("weights"))
            line["eal"] = round(self.eal(tensors), 4)
        lines[-1]["served"] = round(self.served(tensors, 96), 4)
        return lines

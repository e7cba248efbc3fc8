"""Tiny DFlash 2 drafters, their rounds on record, and the authors' module with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_dflash import loud_, raw_config

from paceline.draft.dflash.config import DFlashConfig, as_dflash2
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.types import Batch


def raw_2(top_k: int = 6, group: int = 16, **keys: Any) -> dict[str, Any]:
    """VOCAB is 11, so that 6 candidates leave some out. Native calls need groups of 16 channels."""
    raw = as_dflash2(raw_config(**keys), rank=5, top_k=top_k)
    raw["dflash_config"]["conv_group_size"] = group
    return raw


def network_2(raw: dict[str, Any], seed: int = 0) -> DFlash2Network:
    built = DFlash2Network.random(DFlashConfig.from_json(raw))
    loud_(built, seed)
    for name, parameter in built.named_parameters():
        if name.endswith("base_kernel"):
            parameter.data[:, 0] += 1
        elif name.endswith("kernel_projection.weight"):
            parameter.data *= 0.3  # as loud as the others it would make large numbers of rounding
    return built


class Recording2(DFlash2Drafter):
    """Keeps every round's logits and drafts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[torch.Tensor] = []
        self.drafts: list[list[int]] = []

    def _make_path(self, target: Any) -> Any:
        path = super()._make_path(target)
        read = path.read

        def recorded(*args: Any) -> Any:
            hidden, logits = read(*args)
            self.logits += list(logits.clone())
            return hidden, logits

        path.read = recorded  # pyright: ignore[reportAttributeAccessIssue]
        return path

    def propose(self, batch: Batch) -> Any:
        block = super().propose(batch)
        self.drafts += [tokens for tokens in block.tokens_B if tokens]
        return block


def reference_of(raw: dict[str, Any], network: DFlash2Network) -> Any:
    """The authors' module with these weights."""
    authors = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    from transformers import Qwen3Config

    reference = authors.DFlash2DraftModel(Qwen3Config(**raw)).eval()
    network.codebook_suffix = ".weight"
    reference.load_state_dict(network.of_file())
    return authors, reference

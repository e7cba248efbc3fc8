"""Drafters in folders, and the drafts they make: for tests of formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_dflash2
import torch
from round_loop import generate
from tiny_dflash import MIXED, PROMPT, SLIDING, loud_, network

from paceline.draft.base import Drafter
from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.types import Batch, DraftBlock

IDS = torch.tensor([1, 4, 5, 9])
BOTH_WAYS = {**SLIDING, "layer_types": MIXED, "is_causal": False}
CAUSAL = {**SLIDING, "layer_types": MIXED}


def raw_2(**keys: Any) -> dict[str, Any]:
    return tiny_dflash2.raw_2(group=4, **keys)


def written(folder: Path, raw: dict[str, Any], ids: torch.Tensor | None = None) -> Path:
    config = DFlashConfig.from_json(raw)
    drafter_network = network(raw) if config.second is None else DFlash2Network.random(config)
    if config.second:
        loud_(drafter_network)
    write_checkpoint(folder, raw, drafter_network.of_file(), ids)
    return folder


def drafted(target: Any, drafter: Drafter) -> list[list[int]]:
    """Every round's drafts."""
    drafts, propose = list[list[int]](), drafter.propose

    def recorded(batch: Batch) -> DraftBlock:
        block = propose(batch)
        drafts.append(block.tokens_B[0])
        return block

    drafter.propose = recorded
    generate(target, drafter, [PROMPT], 16)
    return drafts

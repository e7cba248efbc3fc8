"""A tiny target and a drafter for it with a draft vocabulary: `pytest_plugins = ("small_drafter",)`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_llm import tiny_model

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork


def write_drafter(folder: Path, hidden: int = 32) -> Path:
    raw = new_config(hidden, 258, 2, num_layers=1, block_size=4, head_dim=8)
    raw["dflash_config"]["target_layer_ids"] = [0]
    ids = torch.arange(0, 258, 2)
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw)), draft_ids=ids).save(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "own")

"""Reads DFlash, DFlash 2 and DSpark drafters: config.json selects which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.draft.dflash.checkpoint import StoredDrafter, read_stored
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.dspark.drafter import DSparkDrafter, DSparkNetwork
from paceline.errors import ModelFileError


def network_of(config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> DFlashNetwork:
    """Creates the network of a DFlash, DFlash 2 or DSpark config, with the parameters `tensors`. `source`: their
    origin, for error messages. Raises ModelFileError if a tensor does not fit the config."""
    if any(name.endswith("_factor") for name in tensors):
        raise ModelFileError(
            f"{source} is a checkpoint of a training, whose codebooks are factors: give the run's folder drafter"
        )
    kind = DFlash2Network if config.second else DSparkNetwork if config.markov else DFlashNetwork
    return kind.of(config, tensors, source)


def drafter_of(network: DFlashNetwork, **options: Any) -> DFlashDrafter:
    """Creates the drafter for a DFlash, DFlash 2 or DSpark network; `options` go to its constructor."""
    if isinstance(network, DSparkNetwork):
        return DSparkDrafter(network, **options)
    return (DFlash2Drafter if isinstance(network, DFlash2Network) else DFlashDrafter)(network, **options)


def read_drafter(folder: Path | str, *, num_drafted: int | None = None) -> DFlashDrafter:
    """Reads a DFlash, DFlash 2 or DSpark drafter from a folder or GGUF file. `num_drafted`: maximum drafts per round;
    None: a full block. Raises UnsupportedModelError if the format or architecture is not supported, ModelFileError if a
    file is missing or damaged."""
    return drafter_from(read_stored(folder), folder, num_drafted=num_drafted)


def drafter_from(
    stored: StoredDrafter, source: Path | str = "checkpoint", *, num_drafted: int | None = None
) -> DFlashDrafter:
    """Creates the drafter of a stored checkpoint. `source`: its origin, for error messages. `num_drafted`: maximum
    drafts per round; None: a full block. Raises ModelFileError if config and weights do not fit each other."""
    network = network_of(stored.config, stored.tensors, source)
    return drafter_of(
        network, num_drafted=num_drafted, draft_ids=stored.vocabulary.ids, head_VD=stored.vocabulary.head_VD
    )

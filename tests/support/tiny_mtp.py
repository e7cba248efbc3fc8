"""A tiny MTP drafter for any tiny target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tiny_dflash import loud

from paceline.draft.mtp.checkpoint import MtpLayer
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.model.checkpoint import expected_shapes


def mtp_for(own: Any, tells_normed: bool = True) -> MtpDrafter:
    """A drafter with a layer of the target's sizes, in the way of Qwen or of DeepSeek."""
    size, generator = own.hidden_size, torch.Generator().manual_seed(3)
    sizes: dict[str, Any] = {f"{name}_norm.weight": (size,) for name in ("embedding", "hidden", "final")}
    config, prefix = replace(own.config, num_layers=1), "model.layers.0."
    sizes |= {"fc.weight": (size, 2 * size)} | {
        name.removeprefix(prefix): shape for name, shape in expected_shapes(config).items() if name.startswith(prefix)
    }
    tensors = {name: loud(name, torch.empty(shape), generator) for name, shape in sizes.items()}
    return MtpDrafter(MtpLayer(config, tensors, tells_normed), num_drafted=4)

"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): drafts with the MTP layer that a model was
trained with.

    z_t = fc([norm(embedding of x_{t+1}), norm(h_t)])     h_t: the target's hidden state of position t, after its
                                                          final norm
    u   = layer(z), a decoder layer of the target's type that attends to earlier z, at position t
    logits of x_{t+2} = the target's head of norm(u); for the next draft, norm(u) (Qwen) or u (DeepSeek) replaces h

The layer (read by `checkpoint.py`) was trained to predict one more token. Chained, it drafts any number, with
decreasing accuracy unless it was trained on chains (`train/methods/mtp.py`). Embedding and LM head are the target's.
`paths.py` computes it, in PyTorch or in native calls.
Positions, norms and states are those of vLLM; nothing was measured with pretrained weights. `tests/draft/test_mtp.py`
compares drafts with Transformers' layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import hub
from paceline.draft.base import checked_num_drafted
from paceline.draft.chained import ChainedDrafter
from paceline.draft.mtp.checkpoint import MtpLayer, is_mtp, read_mtp, write_mtp
from paceline.draft.mtp.paths import MtpNativePath, MtpPath
from paceline.draft.tapped import cache_shape_of
from paceline.errors import ConfigError, DrafterMismatchError, refuse
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target

DEFAULT_DRAFTED = 3


class MtpDrafter(ChainedDrafter):
    """Drafts with a multi-token-prediction layer: the target's own, or one that was trained for it."""

    name = "mtp"

    def __init__(self, layer: MtpLayer, *, num_drafted: int | None = None) -> None:
        """`num_drafted`: maximum drafts per round [default: as many as the layer was trained for, or 3]. Raises
        ConfigError if it is not between 0 and 1024."""
        self.layer = layer
        self.num_drafted = checked_num_drafted((layer.steps or DEFAULT_DRAFTED) if num_drafted is None else num_drafted)

    @classmethod
    def of_target(cls, target_name: str, *, num_drafted: int | None = None) -> MtpDrafter:
        """Creates a drafter with the layer in the target's own folder. `num_drafted`: maximum drafts per round; None:
        3. Raises ConfigError if `target_name` is empty, ModelNotFoundError if there is no such model, and the errors of
        `checkpoint.read_mtp`."""
        refuse(
            ConfigError, (not target_name, "mtp reads the target's own files: say with target_name which model it is")
        )
        return cls(read_mtp(hub.resolve(target_name)), num_drafted=num_drafted)

    @classmethod
    def from_folder(cls, folder: Path | str, *, num_drafted: int | None = None) -> MtpDrafter:
        """Creates a drafter from a folder that `save` wrote. `num_drafted`: maximum drafts per round; None: as many as
        the layer was trained for. Raises the errors of `checkpoint.read_mtp`."""
        return cls(read_mtp(Path(folder)), num_drafted=num_drafted)

    def save(self, folder: Path | str) -> None:
        """Writes a folder that holds only the MTP layer and its config.json. Raises CacheError if writing fails."""
        layer = self.layer
        write_mtp(folder, layer if is_mtp(layer.raw) else replace(layer, raw=layer.marked(self.num_drafted or 1)))

    @torch.no_grad()
    def bind(self, target: Target) -> None:
        """Check that the layer fits the target (else raises DrafterMismatchError), and prepare weights and cache.
        Binding again to the same cache only resets all rows."""
        own = self.layer.config
        remedy = "it drafts for the model whose file it is in alone"
        sizes = ("hidden size", own.hidden_size, target.hidden_size), ("vocabulary", own.vocab_size, target.vocab_size)
        for what, mine, theirs in sizes:
            if mine != theirs:
                raise DrafterMismatchError(f"{what}: the mtp layer has {mine}, the target {theirs}: {remedy}")
        make_path: Any = MtpNativePath if isinstance(target, NativeDecoder) else MtpPath
        self._bind_path(target, lambda: make_path(self.layer, target, slack=self._slack))
        self.tap_layers = (target.num_layers - 1,)
        self._begin(target, own.hidden_size)

    def _use_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.layer = replace(self.layer, tensors=dict(tensors))

    def _own_tensors(self) -> Mapping[str, Tensor]:
        return self.layer.tensors

    def cache_shape(self, target: Target) -> tuple[int, ...]:
        return cache_shape_of(self.layer.config, target, self._slack, is_native=isinstance(target, NativeDecoder))

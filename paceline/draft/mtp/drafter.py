"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): drafts with the MTP layer that a model was
trained with.

    z_t = fc([norm(embedding of x_{t+1}), norm(h_t)])     h_t: the target's hidden state of position t, after its
                                                          final norm
    u   = layer(z), a decoder layer of the target's type that attends to earlier z, at position t
    logits of x_{t+2} = the target's head of norm(u); for the next draft, norm(u) (Qwen) or u (DeepSeek) replaces h

The layer (read by `checkpoint.py`) was trained to predict one more token. Chained, it drafts any number, with
decreasing accuracy unless it was trained on chains (`train/methods/mtp.py`). Embedding and LM head are the target's.
Positions, norms and states are those of vLLM; nothing was measured with pretrained weights. `tests/draft/test_mtp.py`
compares drafts with Transformers' layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from paceline import hub
from paceline.draft.chained import ChainedDrafter
from paceline.draft.level import Level
from paceline.draft.mtp.checkpoint import MtpLayer, is_mtp, read_mtp, write_mtp
from paceline.errors import ConfigError, DrafterMismatchError, refuse
from paceline.model.kv_cache import StaticKVCache
from paceline.model.target import Target
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope, positions_of
from paceline.model.torch.decoder import Layer, LayerAttention
from paceline.model.torch.parts import PackedLinear, Residual, RMSNorm

DEFAULT_DRAFTED = 3


class MtpPath:
    """The MTP layer in PyTorch operations on any device, with weights prepared for one target. Cache entry e combines
    the target's hidden state of position e with the embedding of the token after it."""

    def __init__(self, layer: MtpLayer, target: Target, slack: int) -> None:
        """`slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        shape, dtype, device = layer.config, target.dtype, target.device
        num_rows, max_len = target.cache.num_rows, target.cache.max_len
        self._shape, self._target, self._tells_normed = shape, target, layer.tells_normed
        self._dtype, self._device = dtype, device
        self.residual_dtype = torch.float32 if device.type == "cpu" else dtype
        parts = {name: tensor.to(device, dtype, copy=True) for name, tensor in layer.tensors.items()}
        self._embedding_norm, self._hidden_norm, self._final_norm = (
            RMSNorm(parts.pop(f"{name}_norm.weight"), shape.rms_norm_eps, shape.norm_offset)
            for name in ("embedding", "hidden", "final")
        )
        self._fc = PackedLinear(parts.pop("fc.weight"))
        self._layer, self._group = Layer.of(shape, 0, parts), shape.num_heads // shape.num_kv_heads
        self.weight_bytes = self._fc.num_bytes + self._layer.num_bytes
        self._rope = Rope.of(shape, max_len, dtype, device, slack=slack)
        sizes = (1, num_rows, shape.num_kv_heads, max_len, shape.head_dim)
        self.cache = StaticKVCache(*sizes, dtype, device, slack=slack)

    @torch.inference_mode()
    def extend(
        self, rows: list[int], starts: list[int], counts: list[int], tokens: list[int], taps_TF: Tensor
    ) -> Tensor:
        plan = AttentionPlan(rows, starts, counts, group=self._group, dtype=self._dtype, device=self._device)
        writer = CacheWriter(rows, starts, counts, self._device)
        state_TD = self._layer_of(plan, writer, positions_of(starts, counts), tokens, taps_TF[: len(tokens)])
        self.cache.append(rows, counts)
        return state_TD[torch.tensor([end - 1 for end in accumulate(counts)], device=self._device)]

    @torch.inference_mode()
    def step(self, level: Level, tokens: list[int], state_TD: Tensor) -> Tensor:
        plan = level.plan(self._group, self._dtype, self._device, None)
        return self._layer_of(plan, level.writer(self._device), level.positions, tokens, state_TD)

    @torch.inference_mode()
    def logits(self, state_TD: Tensor) -> Tensor:
        """Returns the logits [T, V] of T drafting states, over the target's vocabulary."""
        return self._target.head(state_TD.to(self._dtype) if self._tells_normed else self._final_norm(state_TD))

    def _layer_of(
        self, plan: AttentionPlan, writer: CacheWriter, positions: list[int], tokens: list[int], hidden_TD: Tensor
    ) -> Tensor:
        embedded_TD = self._target.embed(torch.tensor(tokens, device=self._device))
        both_TX = torch.cat([self._embedding_norm(embedded_TD), self._hidden_norm(hidden_TD)], dim=-1)
        hidden_TD = self._fc(both_TX).to(self.residual_dtype, copy=True)
        tables = self._rope.tables(positions)
        residual = Residual(hidden_TD)
        attention = LayerAttention(self.cache.keys[0], self.cache.values[0], plan, writer, self._rope, tables)
        self._layer.run(residual, attention)
        if self._tells_normed:
            return residual.normed(self._final_norm).to(self.residual_dtype)
        return residual.hidden_TD


class MtpDrafter(ChainedDrafter):
    """Drafts with a multi-token-prediction layer: the target's own, or one that was trained for it."""

    name = "mtp"

    def __init__(self, layer: MtpLayer, *, num_drafted: int | None = None) -> None:
        """`num_drafted`: maximum drafts per round [default: the number that the layer was trained for, or 3]. Raises
        ConfigError if it is negative."""
        self._stored = layer
        self.num_drafted = (layer.steps or DEFAULT_DRAFTED) if num_drafted is None else num_drafted
        refuse(ConfigError, (self.num_drafted < 0, f"num_drafted must be 0 or more, not {num_drafted}"))

    @classmethod
    def of_target(cls, target_name: str, *, num_drafted: int | None = None) -> MtpDrafter:
        """Creates a drafter with the layer in the target's own folder. `num_drafted`: maximum drafts per round; None:
        3. Raises ConfigError without a name, ModelNotFoundError, and the errors of `read_mtp`."""
        refuse(
            ConfigError, (not target_name, "mtp reads the target's own files: say with target_name which model it is")
        )
        return cls(read_mtp(hub.resolve(target_name)), num_drafted=num_drafted)

    @classmethod
    def from_folder(cls, folder: Path | str, *, num_drafted: int | None = None) -> MtpDrafter:
        """Creates a drafter from a folder that `save` wrote. `num_drafted`: maximum drafts per round; None: the number
        that the layer was trained for. Raises the errors of `read_mtp`."""
        return cls(read_mtp(Path(folder)), num_drafted=num_drafted)

    @property
    def layer(self) -> MtpLayer:
        return self._stored

    def save(self, folder: Path | str) -> None:
        """Writes a folder that holds only the layer; it can be used as a drafter. Raises CacheError if writing
        fails."""
        layer = self._stored
        write_mtp(folder, layer if is_mtp(layer.raw) else replace(layer, raw=layer.marked(self.num_drafted or 1)))

    @torch.no_grad()
    def bind(self, target: Target) -> None:
        """Check that the layer fits the target, and prepare weights and cache for it. Binding again to the same cache
        keeps the prepared weights and resets all rows. Raises DrafterMismatchError."""
        own = self._stored.config
        for what, mine, theirs in (
            ("hidden size", own.hidden_size, target.hidden_size),
            ("vocabulary", own.vocab_size, target.vocab_size),
        ):
            if mine != theirs:
                raise DrafterMismatchError(
                    f"{what}: the mtp layer has {mine}, the target {theirs}: it drafts for the model whose file it is "
                    "in alone"
                )
        self._bind_path(target, lambda: MtpPath(self._stored, target, slack=self._slack))
        self.tap_layers = (target.num_layers - 1,)
        self._begin(target, own.hidden_size)

    def keep_weights(self) -> None:
        own = {name: tensor.clone() for name, tensor in self._stored.tensors.items()}
        self._stored = replace(self._stored, tensors=own)

    def _own_tensors(self) -> Mapping[str, Tensor]:
        return self._stored.tensors

    def cache_bytes(self, target: Target) -> int:
        shape, positions = self._stored.config, target.cache.num_rows * (target.cache.max_len + self._slack)
        return 2 * shape.num_kv_heads * shape.head_dim * positions * target.dtype.itemsize

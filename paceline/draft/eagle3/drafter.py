"""EAGLE-3 (arXiv 2503.01840) and 3.1 (2605.09992): one small layer drafts token by token from the target's features.

    g_t = fc(features of position t)                 three concatenated tapped layers; 3.1 norms each of them first
    z   = [norm(embedding of x_{t+1}), norm(g_t)]    input of attention, at the position of x_{t+1}; its residual is g_t
    h   = g_t + attention(z), + MLP                  logits of x_{t+2} = head(norm(h)), over the draft vocabulary
    next draft: h (3.1: norm(h)) replaces g

`chained.py` has the part shared with other autoregressive drafters: cache entries and sampling.

`Eagle3Network` holds the weights and is trained; `Eagle3Path` (path.py) is the same computation for decoding, in
PyTorch, with any target. `tests/draft/test_eagle3.py` compares both with the formulas, `experiments/eagle3_interop.py`
with the PyPI package `speculators` 0.9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.draft.base import checked_num_drafted
from paceline.draft.chained import ChainedDrafter
from paceline.draft.dflash.drafter import MLP, Norm, Projections, shapes_of, with_tensors
from paceline.draft.eagle3.checkpoint import (
    DEFAULT_DRAFTED,
    Eagle3Checkpoint,
    Eagle3Config,
    check_eagle3_fit,
    default_taps,
    new_config,
    read_eagle3,
    write_eagle3,
)
from paceline.draft.eagle3.native import Eagle3NativePath
from paceline.draft.eagle3.path import Eagle3Path
from paceline.draft.tapped import cache_shape_of
from paceline.model.checkpoint import random_weights
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention function in training, which applies RoPE and masks. Arguments: index of the draft layer; queries [T,
heads, head_dim], keys and values [T, kv_heads, head_dim], without RoPE. Returns [T, heads * head_dim]."""


class _Attention(Projections):
    def forward(self, layer: int, inputs_TX: Tensor, attend: Attend) -> Tensor:
        query, key, value = (
            project(inputs_TX).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.has_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return self.o_proj(attend(layer, query, key, value))


class Eagle3Layer(nn.Module):
    """A decoder layer of EAGLE-3. The first layer's attention reads the token's embedding and the hidden state,
    concatenated."""

    def __init__(self, config: Eagle3Config, is_first: bool) -> None:
        super().__init__()
        shape = config.shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape, 2 * size if is_first else size)
        self.mlp = MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        if is_first:
            self.hidden_norm = Norm(size, eps)
        self.is_first, self.adds_to_normed = is_first, config.norm_before_residual

    def forward(self, layer: int, embedded_TD: Tensor, hidden_TD: Tensor, attend: Attend) -> Tensor:
        if self.is_first:
            normed_TD = self.hidden_norm(hidden_TD)
            inputs_TX = torch.cat([self.input_layernorm(embedded_TD), normed_TD], dim=-1)
            hidden_TD = normed_TD if self.adds_to_normed else hidden_TD
        else:
            inputs_TX = self.input_layernorm(hidden_TD)
        hidden_TD = hidden_TD + self.self_attn(layer, inputs_TX, attend)
        return hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))


class Eagle3Network(nn.Module):
    """The trainable EAGLE-3 network, with the parameter names of `speculators`. It uses the target's token embedding,
    unless the drafter's file contains one."""

    def __init__(self, config: Eagle3Config, has_embedding: bool = False) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        size, eps, num_features = shape.hidden_size, shape.rms_norm_eps, config.num_taps * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = Norm(num_features, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(config.num_taps))
        self.fc = nn.Linear(num_features, size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config, index == 0) for index in range(shape.num_layers))
        self.norm = Norm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if has_embedding:
            # Made of a tensor: initialising one on the device "meta" imports TorchDynamo, which takes seconds.
            self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(shape.vocab_size, size), freeze=False)

    @classmethod
    def of(cls, config: Eagle3Config, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> Self:
        """Creates a network whose parameters are `tensors`, without a copy. `source`, errors: as in
        `dflash.drafter.with_tensors`."""
        return with_tensors(lambda: cls(config, "embed_tokens.weight" in tensors), config.shape, tensors, source)

    @classmethod
    def random(
        cls, config: Eagle3Config, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Creates a network with random weights: normal with standard deviation 0.02; norm weights are 1."""
        with torch.device("meta"):
            shapes = shapes_of(cls(config).state_dict())
        tensors = dict(random_weights(shapes, seed, device, dtype))
        for name in tensors:
            if name.startswith("fc_norm."):  # named like a matrix, so it was drawn at random
                tensors[name] = torch.ones_like(tensors[name])
        return cls.of(config, tensors)

    def features(self, taps_NF: Tensor) -> Tensor:
        """Returns the hidden states [N, D] that the first drafting step reads. `taps_NF`: the target's hidden states, F
        = tapped layers * hidden size."""
        if self.config.norm_before_fc:
            taps_NF = self.input_norm(taps_NF)
        if self.config.fc_norm:
            parts = taps_NF.chunk(self.config.num_taps, dim=-1)
            taps_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps_NF)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Returns (state for the next drafting step, input of the LM head), [T, D] each. `embedded_TD`: embeddings of T
        tokens. `hidden_TD`: hidden states of the positions before these tokens: from `features` in the first drafting
        step, later the state that the previous step returned.

        Differentiable, for training. The decode paths must compute the same values.
        """
        for index, layer in enumerate(self.layers):
            hidden_TD = layer(index, embedded_TD, hidden_TD, attend)
        normed_TD = self.norm(hidden_TD)
        return normed_TD if self.config.norm_output else hidden_TD, normed_TD


class Eagle3Drafter(ChainedDrafter):
    """An EAGLE-3 or 3.1 drafter: its network drafts token by token, over its draft vocabulary."""

    name = "eagle3"
    network: Eagle3Network

    def __init__(
        self,
        network: Eagle3Network,
        *,
        ids: Tensor | None = None,
        num_drafted: int | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`ids`: token id of each row of the LM head [default: 0, 1, 2, ...]. Raises ConfigError if `num_drafted` is
        not between 0 and 1024."""
        self.network, self.config = network, network.config
        self.ids = torch.arange(self.config.draft_vocab_size) if ids is None else ids
        self.num_drafted = checked_num_drafted(DEFAULT_DRAFTED if num_drafted is None else num_drafted)
        self.tap_layers = self.config.tap_layers
        self._others = dict(others or {})

    @classmethod
    def from_folder(cls, folder: Path | str, *, num_drafted: int | None = None) -> Eagle3Drafter:
        """Reads an EAGLE-3 drafter from its folder. `num_drafted`: maximum drafts per round; None: 5. Raises the errors
        of `read_eagle3` and `Eagle3Network.of`, ConfigError if `num_drafted` is not between 0 and
        1024."""
        stored = read_eagle3(folder)
        network = Eagle3Network.of(stored.config, stored.tensors, folder)
        return cls(network, ids=stored.ids, num_drafted=num_drafted, others=stored.others)

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> Eagle3Drafter:
        """Creates a drafter with random weights, for benchmarks: drafting takes real time, but the drafts are useless.
        `num_drafted`: maximum drafts per round; None: 5. `keys`: arguments of `checkpoint.new_config`."""
        raw = new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys)
        network = Eagle3Network.random(Eagle3Config.from_json(raw), seed, target.device, target.dtype)
        return cls(network, num_drafted=num_drafted)

    @property
    def stored(self) -> Eagle3Checkpoint:
        """The contents of the drafter's folder, for `write_eagle3`."""
        return Eagle3Checkpoint(self.config, self.network.state_dict(), self.ids, self._others)

    def save(self, folder: Path | str) -> None:
        """Writes the drafter into a folder, always in SpecForge's format. Raises CacheError if writing fails."""
        write_eagle3(folder, self.stored)

    @torch.no_grad()
    def bind(self, target: Target) -> None:
        """Check that the drafter fits the target (else raises DrafterMismatchError), and prepare weights and cache.
        Binding again to the same cache only resets all rows."""
        taps = self.config.tap_layers or default_taps(target.num_layers)
        check_eagle3_fit(self.config, target, taps, hasattr(self.network, "embed_tokens"))
        make_path: Any = Eagle3NativePath if isinstance(target, NativeDecoder) else Eagle3Path
        self._bind_path(target, lambda: make_path(self.config, self.network.state_dict(), target, slack=self._slack))
        self.tap_layers = taps
        self._begin(target, self.config.shape.hidden_size, self.ids)

    def cache_shape(self, target: Target) -> tuple[int, ...]:
        return cache_shape_of(self.config.shape, target, self._slack, is_native=isinstance(target, NativeDecoder))

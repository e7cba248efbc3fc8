"""DFlash 2: the DFlash block with convolutions around its sublayers and a selector that walks through its candidates.

Two things are added to `draft/dflash/drafter.py`, whose context, cache and round these drafters share:

- Grouped dynamic causal convolution: what goes into attention and MLP, and what comes out, is mixed with the slot before it,
  by taps of which a part is learned (`base_kernel`) and a part is told from the slot itself (`kernel_projection`).
- Candidate selector: of each slot the `top_k` most likely tokens b are scored behind the token a that was chosen before them,
  S(a, b) = logit(b) + <A[a] * W h, B[b]>, and a walk from the anchor takes one a slot. Greedy and seeded requests take the
  largest; for sampled ones softmax(S / T) over the candidates is the proposal itself, so that it is judged exactly. A tree's
  branches get the scores of their own parent.

Formulas, names and order of the PyPI package `dflash` 0.1.0 (MIT), with which `tests/draft/test_dflash2_reference.py` compares.
`selector.py` is the selector and what is read off it, `paths.py` how a pass runs, in PyTorch and native.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.draft.dflash.checkpoint import StoredDrafter, read_stored
from paceline.draft.dflash.config import DFlashConfig, as_dflash2, new_config
from paceline.draft.dflash.drafter import Attend, DFlashDrafter, DFlashNetwork, DraftLayer
from paceline.draft.dflash2.paths import SELECTOR, DFlash2NativePath, DFlash2Path, can_mix, convolve
from paceline.draft.dflash2.selector import BOOKS, Selector, WalkedReading
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import ModelFileError
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target
from paceline.types import Sequence

DEVIATION = 0.02
"""Of what a new selector's weights begin with."""


class Convolution(nn.Module):
    """Both sides of a sublayer; one projection of what goes in gives what is added to the taps of both."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        sizes, hidden_size = config.second, config.shape.hidden_size
        assert sizes is not None
        self.num_taps, self.groups = sizes.conv_kernel_size, hidden_size // sizes.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.num_taps * self.groups, bias=False)

    def prepare(self, inputs_TD: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and what `finish` takes."""
        added = self.kernel_projection(inputs_TD).view(-1, 2, self.num_taps, self.groups)
        return convolve(inputs_TD, added[:, 0], self.base_kernel[0], size), added[:, 1]

    def finish(self, outputs_TD: Tensor, added_TKG: Tensor, size: int) -> Tensor:
        """The sublayer's output, before it is added to the hidden states."""
        return convolve(outputs_TD, added_TKG, self.base_kernel[1], size)


class ConvolvedLayer(DraftLayer):
    """A draft layer with both convolutions, of blocks of `size` slots."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config.shape)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)
        self.size = config.block_size

    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        size = self.size
        inputs_TD, kernel = self.attention_conv.prepare(self.input_layernorm(block_TD), size)
        block_TD = block_TD + self.attention_conv.finish(self.self_attn(layer, inputs_TD, context_ND, attend), kernel, size)
        inputs_TD, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(block_TD), size)
        return block_TD + self.mlp_conv.finish(self.mlp(inputs_TD), kernel, size)


class DFlash2Network(DFlashNetwork):
    """DFlashNetwork with convolved layers and a selector; `codebook_suffix` is what the file it was read from calls codebooks
    beyond their names: nothing, or .weight."""

    codebook_suffix = ""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__(config)
        self.candidate_selector = Selector(config, factored)

    @staticmethod
    def make_layer(config: DFlashConfig) -> nn.Module:
        return ConvolvedLayer(config)

    @classmethod
    def of(cls, config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> Self:
        """As DFlashNetwork.of, with either naming of the codebooks."""
        suffixed = {f"{SELECTOR}{book}.weight": f"{SELECTOR}{book}" for book in BOOKS}
        network = super().of(config, {suffixed.get(name, name): tensor for name, tensor in tensors.items()}, source)
        network.codebook_suffix = ".weight" if suffixed.keys() & tensors.keys() else ""
        return network

    @classmethod
    def random(
        cls,
        config: DFlashConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """A random DFlash v1 body, and convolution and selector that change nothing yet."""
        body = DFlashNetwork.random(replace(config, second=None), seed, device, dtype).state_dict()
        like = next(iter(body.values()))
        return cls.of(config, body | {name: tensor.to(like) for name, tensor in beginnings(config, seed).items()})

    def of_file(self) -> dict[str, Tensor]:
        names = {f"{SELECTOR}{book}": f"{SELECTOR}{book}{self.codebook_suffix}" for book in BOOKS}
        return {names.get(name, name): tensor for name, tensor in self.state_dict().items()}

    def forward(self, block_TD: Tensor, taps_NF: Tensor, attend: Attend, size: int | None = None) -> Tensor:
        """As DFlashNetwork.forward, of blocks of `size` slots [default: the config's]."""
        for layer in self.layers:
            assert isinstance(layer, ConvolvedLayer)
            layer.size = size or self.config.block_size
        return super().forward(block_TD, taps_NF, attend)


def beginnings(config: DFlashConfig, seed: int = 0, *, factored: bool = False) -> dict[str, Tensor]:
    """What a DFlash v1 body needs to become a DFlash 2 network that says the same: taps that pass a slot on as it is, and a
    selector whose successors are zero. Float32."""
    with torch.device("meta"):
        network = DFlash2Network(config, factored)
        body = DFlashNetwork(config).state_dict()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, like in network.state_dict().items():
        if name in body:
            continue
        tensor = torch.zeros(like.shape)
        if name.endswith("base_kernel"):
            tensor[:, 0] = 1.0
        elif name.startswith(SELECTOR) and "successor" not in name:
            tensor.normal_(0.0, DEVIATION, generator=generator)
        tensors[name] = tensor
    return tensors


def materialised(tensors: Mapping[str, Tensor], embedding_VD: Tensor) -> dict[str, Tensor]:
    """A checkpoint's tensors of a network's, factored codebooks multiplied out with the target's embedding [V, D]."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(SELECTOR) and name.endswith("_factor"):
            made[name.replace("_factor", "_codebook")] = embedding_VD.to(tensor.device, tensor.dtype) @ tensor.T
        else:
            made[name] = tensor
    return made


class DFlash2Drafter(DFlashDrafter):
    """A DFlash 2 drafter."""

    name = "dflash2"
    network: DFlash2Network

    @property
    def has_native_path(self) -> bool:
        return can_mix(self.config)

    @classmethod
    def from_folder(cls, folder: Path | str, *, num_drafted: int | None = None) -> DFlashDrafter:
        """As DFlashDrafter.from_folder."""
        return read_drafter(folder, num_drafted=num_drafted)

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> DFlash2Drafter:
        """As DFlashDrafter.random; `selector_rank` is 64 unless it is given."""
        rank = keys.pop("selector_rank", 64)
        raw = as_dflash2(new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys), rank=rank)
        network = DFlash2Network.random(DFlashConfig.from_json(raw), seed, target.device, target.dtype)
        return cls(network, num_drafted=num_drafted)

    def _make_path(self, target: Target) -> DFlash2Path | DFlash2NativePath:
        own = Vocabulary(self.draft_ids, self.head_VD)
        if isinstance(target, NativeDecoder) and self.has_native_path:
            return DFlash2NativePath(self.config, self.network.state_dict(), target, own)
        return DFlash2Path(self.config, self.network.state_dict(), target, own)

    def chances_of(self, seq: Sequence, said: list[int], probs_KV: Tensor) -> list[float]:
        """As DFlashDrafter.chances_of, by one more pass: what is drafted depends on what was drafted before."""
        reading = self._read([seq.row], [seq.tokens[-1]], len(said), self.block_size, True) if said else None
        return reading.along(0, said, seq) if reading else []

    @torch.inference_mode()
    def _read(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> WalkedReading:
        assert isinstance(self._path, DFlash2Path | DFlash2NativePath)
        return WalkedReading(self._path.pick(rows, anchors, width, size), self._vocab_size)


def network_of(config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> DFlashNetwork:
    """A network of the kind that the config says, which holds `tensors` themselves. Raises ModelFileError."""
    if any(name.endswith("_factor") for name in tensors):
        raise ModelFileError(
            f"{source} is a checkpoint of a training, whose codebooks are factors: give the run's folder drafter"
        )
    return (DFlash2Network if config.second else DFlashNetwork).of(config, tensors, source)


def drafter_of(network: DFlashNetwork, **options: Any) -> DFlashDrafter:
    """The drafter of a network, by its kind."""
    return (DFlash2Drafter if isinstance(network, DFlash2Network) else DFlashDrafter)(network, **options)


def read_drafter(folder: Path | str, *, num_drafted: int | None = None) -> DFlashDrafter:
    """A DFlash or DFlash 2 drafter from a folder. Raises ModelNotFoundError, ModelFileError or UnsupportedModelError."""
    return drafter_from(read_stored(folder), folder, num_drafted=num_drafted)


def drafter_from(stored: StoredDrafter, source: Path | str = "checkpoint", *, num_drafted: int | None = None) -> DFlashDrafter:
    """The drafter that a folder holds. Raises ModelFileError when config and weights do not fit each other."""
    network = network_of(stored.config, stored.tensors, source)
    return drafter_of(network, num_drafted=num_drafted, draft_ids=stored.vocabulary.ids, head_VD=stored.vocabulary.head_VD)

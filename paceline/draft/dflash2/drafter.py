"""DFlash 2: the DFlash block with convolutions around its sublayers, and a selector that picks drafts one after
another.

It adds two things to `draft/dflash/drafter.py`, and shares its context, cache and round:

- Grouped dynamic causal convolution: inputs and outputs of attention and MLP are mixed with the previous block
  position; the weights have a learned part (`base_kernel`) and an input-dependent part (`kernel_projection`).
- Candidate selector: the `top_k` most probable tokens b of each position are scored given the previously chosen token
  a, S(a, b) = logit(b) + <A[a] * W h, B[b]>, and a walk from the last verified token picks one per position. Greedy and
  seeded requests take the largest; sampled ones use softmax(S / T) over the candidates as the exact proposal
  distribution. In a tree, each branch is scored after its own parent.

Formulas and names are those of the PyPI package `dflash` 0.1.0 (MIT); `tests/draft/test_dflash2_reference.py` compares
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.draft.dflash.config import DFlashConfig, as_dflash2
from paceline.draft.dflash.drafter import Attend, DFlashDrafter, DFlashNetwork, DraftLayer, shapes_of, with_tensors
from paceline.draft.dflash2.codebooks import BOOKS
from paceline.draft.dflash2.paths import SELECTOR, DFlash2NativePath, DFlash2Path, convolve
from paceline.draft.dflash2.selector import Selector, WalkedReading
from paceline.model.native.library import GROUP
from paceline.types import Sequence

DEVIATION = 0.02
"""Standard deviation of random initial weights of new codebooks."""


class Convolution(nn.Module):
    """The two convolutions around one sublayer (attention or MLP): `prepare` convolves its inputs, `finish` its
    outputs, over neighbouring block positions. Each kernel is the sum of a fixed part and a part that a projection
    computes from the sublayer's inputs."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        sizes, hidden_size = config.second, config.shape.hidden_size
        assert sizes is not None
        self.num_taps, self.groups = sizes.conv_kernel_size, hidden_size // sizes.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.num_taps * self.groups, bias=False)

    def prepare(self, inputs_TD: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Convolves the sublayer's inputs [T, D] before the sublayer runs. Returns (convolved inputs [T, D], kernel
        part [T, K, G] to pass to `finish`). K: positions that the convolution combines; G: groups of channels. `size`:
        block size."""
        added = self.kernel_projection(inputs_TD).view(-1, 2, self.num_taps, self.groups)
        return convolve(inputs_TD, added[:, 0], self.base_kernel[0], size), added[:, 1]

    def finish(self, outputs_TD: Tensor, added_TKG: Tensor, size: int) -> Tensor:
        """Convolves the sublayer's outputs [T, D]; returns them, to be added to the residual. `added_TKG`: the kernel
        part that `prepare` returned. `size`: block size."""
        return convolve(outputs_TD, added_TKG, self.base_kernel[1], size)


class ConvolvedLayer(DraftLayer):
    """A draft layer with convolutions around attention and MLP, for blocks of `size` positions."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config.shape)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)
        self.size = config.block_size

    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        size = self.size
        inputs_TD, kernel = self.attention_conv.prepare(self.input_layernorm(block_TD), size)
        block_TD = block_TD + self.attention_conv.finish(
            self.self_attn(layer, inputs_TD, context_ND, attend), kernel, size
        )
        inputs_TD, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(block_TD), size)
        return block_TD + self.mlp_conv.finish(self.mlp(inputs_TD), kernel, size)


class ExtendedNetwork(DFlashNetwork):
    """Base class of the DFlash 2 and DSpark networks: a DFlash v1 network with further modules, among them two
    codebooks (tables with a row per token). `factored`: train smaller factors of the codebooks, as described in
    `Codebooks`."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__(config)
        self.codebooks = "factored" if factored else "free"

    @classmethod
    def extending(cls, body: DFlashNetwork, config: DFlashConfig, seed: int = 0, *, factored: bool = False) -> Self:
        """Creates a network for training that extends the DFlash v1 network `body`. It shares the tensors of `body`,
        and drafts the same tokens until it is trained.

        The new modules are initialised without effect: convolutions change nothing, selector and Markov head add zero
        to the logits, and a confidence head always predicts one half. `seed`: seed of random initial weights.
        """
        with torch.device("meta"):
            shapes = shapes_of(cls(config, factored).state_dict())
        generator, tensors = torch.Generator().manual_seed(seed), body.state_dict()
        like = next(iter(tensors.values()))
        for name, shape in shapes.items():
            if name in tensors:
                continue
            tensor = torch.zeros(shape)
            if name.endswith("base_kernel"):
                tensor[:, 0] = 1.0
            elif "predecessor" in name or name.endswith("hidden_projection.weight"):
                tensor.normal_(0.0, DEVIATION, generator=generator)
            tensors[name] = tensor.to(like)
        return with_tensors(lambda: cls(config, factored), config.shape, tensors, "checkpoint")

    @classmethod
    def random(
        cls, config: DFlashConfig, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Creates a network whose DFlash v1 part has random weights; the other modules do not change its drafts."""
        body = DFlashNetwork.random(replace(config, second=None, markov=None), seed, device, dtype)
        return cls.extending(body, config, seed)


class DFlash2Network(ExtendedNetwork):
    """The trainable DFlash 2 network: DFlash with convolutions and a candidate selector. `codebook_suffix`: suffix of
    the codebooks' names in the checkpoint file, empty or `.weight`."""

    codebook_suffix = ""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__(config, factored)
        self.candidate_selector = Selector(config, factored)

    @staticmethod
    def make_layer(config: DFlashConfig) -> nn.Module:
        return ConvolvedLayer(config)

    @classmethod
    def of(cls, config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> Self:
        """Creates a network whose parameters are `tensors`, without a copy; codebook names may have the suffix
        `.weight`. `source`, errors: as in `dflash.drafter.with_tensors`."""
        suffixed = {f"{SELECTOR}{book}.weight": f"{SELECTOR}{book}" for book in BOOKS}
        network = super().of(config, {suffixed.get(name, name): tensor for name, tensor in tensors.items()}, source)
        network.codebook_suffix = ".weight" if suffixed.keys() & tensors.keys() else ""
        return network

    def of_file(self) -> dict[str, Tensor]:
        names = {f"{SELECTOR}{book}": f"{SELECTOR}{book}{self.codebook_suffix}" for book in BOOKS}
        return {names.get(name, name): tensor for name, tensor in self.state_dict().items()}

    def forward(self, block_TD: Tensor, taps_NF: Tensor, attend: Attend, size: int | None = None) -> Tensor:
        """Returns the final normed hidden states [T, D] of blocks of `size` positions [default: the config's block
        size]. Other arguments: see `DFlashNetwork.forward`."""
        for layer in self.layers:
            assert isinstance(layer, ConvolvedLayer)
            layer.size = size or self.config.block_size
        return super().forward(block_TD, taps_NF, attend)


class WalkingDrafter(DFlashDrafter):
    """Base class of the DFlash 2 and DSpark drafters, which pick drafts one after another, each given the one before
    it."""

    def chances_of(self, seq: Sequence, tokens: list[int], probs_KV: Tensor) -> list[float]:
        """Returns the probabilities with which this drafter would sample `tokens` as its next drafts: for each token
        the probability after the tokens before it. Runs one more drafting pass.

        `probs_KV` is ignored: those distributions depend on the drafts that were sampled, which may differ from
        `tokens`. The parameter exists because `DFlashDrafter.chances_of` needs it.
        """
        reading = self._read([seq.row], [seq.tokens[-1]], len(tokens), self.block_size, True) if tokens else None
        return reading.along(0, tokens, seq) if reading else []

    @torch.inference_mode()
    def _read(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> WalkedReading:
        return WalkedReading(self._path.pick(rows, anchors, width, size), self._vocab_size)


class DFlash2Drafter(WalkingDrafter):
    """A DFlash 2 drafter: its candidate selector picks each draft given the draft before it."""

    name = "dflash2"
    torch_path, native_path = DFlash2Path, DFlash2NativePath
    network: DFlash2Network

    @property
    def has_native_path(self) -> bool:
        """True if native (C++) calls can compute the drafter's convolutions, which need groups of sixteen channels."""
        return self.config.second is not None and self.config.second.conv_group_size == GROUP

    @staticmethod
    def _random_network(raw: dict[str, Any], *options: Any) -> DFlashNetwork:
        return DFlash2Network.random(DFlashConfig.from_json(as_dflash2(raw, rank=64)), *options)

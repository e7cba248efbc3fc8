"""DSpark: a DFlash drafter with a Markov head, by which each draft depends on the one before it, and a confidence head.

It shares context, cache and layers with `draft/dflash/drafter.py`; `draft/dspark/heads.py` has the formulas. In a tree,
each branch is scored after its own parent, among the candidates after the greedy draft. Sampled requests draw drafts
from softmax(score / T) over the candidates, which is exactly the distribution that the verification gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.draft.dflash.config import DFlashConfig, as_dspark, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash.paths import NativePath, TorchPath, rows_of
from paceline.draft.dflash2.drafter import DEVIATION, WalkingDrafter
from paceline.draft.dflash2.selector import Picks
from paceline.draft.dspark.heads import CONFIDENCE, MARKOV, ConfidenceHead, MarkovHead, pick
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target


class DSparkNetwork(DFlashNetwork):
    """The trainable DSpark network: DFlash with a Markov head and, unless the config leaves it out, a confidence
    head."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__(config)
        assert config.markov is not None
        self.markov_head = MarkovHead(config, factored)
        self.confidence_head = ConfidenceHead(config) if config.markov.has_confidence else None

    @classmethod
    def random(
        cls,
        config: DFlashConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Creates a network with the random weights of a DFlash v1 network, and heads without an effect: a correction
        of zero, and a chance of one half."""
        body = DFlashNetwork.random(replace(config, markov=None), seed, device, dtype).state_dict()
        like = next(iter(body.values()))
        return cls.of(config, body | {name: tensor.to(like) for name, tensor in beginnings(config, seed).items()})


def beginnings(config: DFlashConfig, seed: int = 0, *, factored: bool = False) -> dict[str, Tensor]:
    """Returns the tensors (float32) that extend a DFlash v1 network to a DSpark network with the same drafts: those of
    heads whose correction is zero, and whose chance is one half. `factored`: the codebooks [V, rank] are
    replaced by factors [rank, D], which are multiplied by the target's embedding."""
    with torch.device("meta"):
        heads = {name: like for name, like in DSparkNetwork(config, factored).state_dict().items() if _is_head(name)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.zeros(like.shape) for name, like in heads.items()}
    for name, tensor in tensors.items():
        if "predecessor" in name:
            tensor.normal_(0.0, DEVIATION, generator=generator)
    return tensors


def _is_head(name: str) -> bool:
    return name.startswith((MARKOV, CONFIDENCE))


class Heads(nn.Module):
    """The two heads of one drafter, prepared for drafting with one target."""

    def __init__(self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: Target, ids: Tensor | None) -> None:
        super().__init__()
        assert config.markov is not None
        with torch.device("meta"):
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config) if config.markov.has_confidence else None
        kind = {"device": target.device, "dtype": target.dtype}
        own = {name: tensor.detach().to(**kind) for name, tensor in tensors.items() if _is_head(name)}
        self.load_state_dict(own, assign=True)
        self.ids = None if ids is None else ids.to(target.device)
        self.columns_VR = self.markov_head.columns(self.ids).detach()
        self.weight_bytes = sum(tensor.nbytes for tensor in own.values())

    @torch.inference_mode()
    def pick(self, hidden_BKD: Tensor, logits_BKV: Tensor, anchors_B: Tensor) -> Picks:
        """Returns the scored candidates of blocks with these final normed hidden states and logits."""
        heads = self.markov_head, self.confidence_head
        return pick(*heads, hidden_BKD, logits_BKV, anchors_B, self.ids, self.columns_VR)


def _body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not _is_head(name)}


class DSparkPath(TorchPath):
    """DSpark in PyTorch operations on any device, with weights prepared for one target."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: Target, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, _body(tensors), target, *own)
        self._heads = Heads(config, tensors, target, own.ids)
        self.weight_bytes += self._heads.weight_bytes

    def pick(self, rows: list[int], anchors: list[int], width: int, size: int) -> Picks:
        """Drafts a block of `size` tokens for each cache row of `rows`; returns the scored candidates of its first
        `width` draft positions. `anchors`: the rows' last committed tokens. The next call may overwrite the result."""
        if outputs := self._replayed(rows, anchors, size):
            return Picks(*(rows_of(tensor, rows)[:, :width] for tensor in outputs))
        return self._heads.pick(*self.read(rows, anchors, width, size), torch.tensor(anchors, device=self.device))

    def conclude(self, hidden_TD: Tensor, num_rows: int, width: int, anchors_B: Tensor) -> tuple[Tensor, ...]:
        """Computes M candidate tokens at each of the first `width` draft positions of B = `num_rows` blocks, from the
        blocks' hidden states [T, D] before the final norm. Returns the tensors of `Picks`, whose last one is left
        out without a confidence head. `anchors_B`: the last committed tokens."""
        blocks = self._logits_of(self._drafting_slots(hidden_TD, num_rows, width), num_rows)
        return tuple(tensor for tensor in self._heads.pick(*blocks, anchors_B) if tensor is not None)


class DSparkNativePath(NativePath):
    """DSpark whose layers run in native (C++) calls; the walk over the draft positions is in PyTorch."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: NativeDecoder, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, _body(tensors), target, *own)
        self._heads = Heads(config, tensors, target, own.ids)
        self.weight_bytes += self._heads.weight_bytes

    def pick(self, rows: list[int], anchors: list[int], width: int, size: int) -> Picks:
        """Drafts a block of `size` tokens for each cache row of `rows`; returns the scored candidates of its first
        `width` draft positions. `anchors`: the rows' last committed tokens."""
        return self._heads.pick(*self.read(rows, anchors, width, size), torch.tensor(anchors))


class DSparkDrafter(WalkingDrafter):
    """A DSpark drafter: its Markov head corrects each position's logits for the draft before it."""

    name = "dspark"
    network: DSparkNetwork

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> DSparkDrafter:
        """Creates a drafter with random weights, for benchmarks. `keys` go to `config.new_config`; `markov_rank`
        (codebook width) defaults to 64."""
        rank = keys.pop("markov_rank", 64)
        raw = as_dspark(new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys), rank=rank)
        network = DSparkNetwork.random(DFlashConfig.from_json(raw), seed, target.device, target.dtype)
        return cls(network, num_drafted=num_drafted)

    def _make_path(self, target: Target) -> DSparkPath | DSparkNativePath:
        own, tensors = Vocabulary(self.draft_ids, self.head_VD), self.network.state_dict()
        if isinstance(target, NativeDecoder):
            return DSparkNativePath(self.config, tensors, target, own)
        return DSparkPath(self.config, tensors, target, own)

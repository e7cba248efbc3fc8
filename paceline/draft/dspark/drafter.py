"""DSpark: a DFlash drafter with a Markov head, by which each draft depends on the one before it, and a confidence head.

It shares context, cache and layers with `draft/dflash/drafter.py`; `draft/dspark/heads.py` has the formulas. In a tree,
each branch is scored after its own parent, among the candidates after the greedy draft. Sampled requests draw drafts
from softmax(score / T) over the candidates, which is exactly the distribution that the verification gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.draft.dflash.config import DFlashConfig, as_dspark
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash.paths import NativePath
from paceline.draft.dflash2.drafter import ExtendedNetwork, WalkingDrafter
from paceline.draft.dflash2.paths import CandidatePath
from paceline.draft.dflash2.selector import Picks
from paceline.draft.dspark.heads import CONFIDENCE, MARKOV, ConfidenceHead, MarkovHead, pick
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target


class DSparkNetwork(ExtendedNetwork):
    """The trainable DSpark network: DFlash with a Markov head and, unless the config omits it, a confidence head."""

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__(config, factored)
        assert config.markov is not None
        self.markov_head = MarkovHead(config, factored)
        self.confidence_head = ConfidenceHead(config) if config.markov.has_confidence else None


class Heads(nn.Module):
    """The Markov head and the confidence head of one DSpark drafter, with weights prepared for one target."""

    def __init__(self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: Target, ids: Tensor | None) -> None:
        super().__init__()
        assert config.markov is not None
        with torch.device("meta"):
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config) if config.markov.has_confidence else None
        kind = {"device": target.device, "dtype": target.dtype}
        heads = {name: tensor for name, tensor in tensors.items() if name.startswith((MARKOV, CONFIDENCE))}
        own = {name: tensor.detach().to(**kind) for name, tensor in heads.items()}
        self.load_state_dict(own, assign=True)
        self.ids = None if ids is None else ids.to(target.device)
        self.columns_VR = self.markov_head.columns(self.ids).detach()
        self.weight_bytes = sum(tensor.nbytes for tensor in own.values())

    @torch.inference_mode()
    def pick(self, hidden_BKD: Tensor, logits_BKV: Tensor, anchors_B: Tensor) -> Picks:
        """Returns the scored candidates of blocks (see `heads.pick`), given their final normed hidden states and
        logits. `anchors_B`: the last committed token before each block."""
        heads = self.markov_head, self.confidence_head
        return pick(*heads, hidden_BKD, logits_BKV, anchors_B, self.ids, self.columns_VR)


class DSparkPath(CandidatePath):
    """DSpark in PyTorch operations on any device, with weights prepared for one target."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: Target, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, tensors, target, own)
        self._heads = Heads(config, tensors, target, own.ids)
        self.weight_bytes += self._heads.weight_bytes

    def scored(self, hidden_BKD: Tensor, logits_BKV: Tensor, anchors_B: Tensor) -> Picks:
        return self._heads.pick(hidden_BKD, logits_BKV, anchors_B)


class DSparkNativePath(NativePath):
    """DSpark whose layers run in native (C++) calls. Its heads, which choose drafts one after another, run in PyTorch
    operations."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: NativeDecoder, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, tensors, target, own)
        self._heads = Heads(config, tensors, target, own.ids)
        self.weight_bytes += self._heads.weight_bytes

    def pick(self, rows: list[int], anchors: list[int], width: int, size: int) -> Picks:
        return self._heads.pick(*self.read(rows, anchors, width, size), torch.tensor(anchors))


class DSparkDrafter(WalkingDrafter):
    """A DSpark drafter: its Markov head corrects each position's logits for the draft before it."""

    name = "dspark"
    torch_path, native_path = DSparkPath, DSparkNativePath
    network: DSparkNetwork

    @staticmethod
    def _random_network(raw: dict[str, Any], *options: Any) -> DFlashNetwork:
        return DSparkNetwork.random(DFlashConfig.from_json(as_dspark(raw, rank=64)), *options)

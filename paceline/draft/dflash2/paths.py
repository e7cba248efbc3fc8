"""DFlash 2's decode paths: those of DFlash with convolutions and the candidate selector's scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.paths import NativePath, TorchPath
from paceline.draft.dflash2.codebooks import BOOKS
from paceline.draft.dflash2.selector import Picks, Selector, choose, score
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary
from paceline.model.native.decoder import NativeDecoder
from paceline.model.native.library import FORMATS, Picker
from paceline.model.native.packing import pack
from paceline.model.sampling.device_race import Draws
from paceline.model.target import Target
from paceline.model.torch.decoder import LayerAttention
from paceline.model.torch.parts import PackedLinear, Residual
from paceline.model.torch.recorded_pass import rows_at

SELECTOR, CONVS = "candidate_selector.", ("attention_conv", "mlp_conv")


def convolve(hidden_TD: Tensor, added_TKG: Tensor, base_KD: Tensor, size: int) -> Tensor:
    """Returns the causal convolution [T, D] of packed blocks of `size` positions:

        out[i, c] = sum over t < K of (base[t, c] + added[i, t, group of c]) * hidden[i - t, c]

    `hidden_TD` [T, D]: the blocks, one after another; values before a block's first position count as zero. K: number
    of positions that the convolution combines. `added_TKG`: one weight for each of G groups of adjacent channels.
    """
    num_taps, groups = added_TKG.shape[1:]
    blocks, dtype = hidden_TD.unflatten(0, (-1, size)), hidden_TD.dtype
    # A matrix product with zeros and ones expands groups to channels: four times faster in bfloat16, forward and
    # backward, than broadcasting.
    ones_GD = torch.eye(groups, dtype=dtype, device=hidden_TD.device).repeat_interleave(
        hidden_TD.shape[1] // groups, dim=1
    )
    out: Tensor | None = None
    for tap in range(num_taps):
        taps = torch.addmm(base_KD[tap].to(dtype), added_TKG[:, tap].to(dtype), ones_GD).unflatten(0, (-1, size))
        values = F.pad(blocks, (0, 0, tap, 0))[:, :size] if tap else blocks
        out = taps * values if out is None else torch.addcmul(out, taps, values)
    assert out is not None
    return out.flatten(0, 1)


class CandidatePath(TorchPath):
    """Base class of DFlash 2's and DSpark's decode paths in PyTorch operations. They return several scored candidates
    for each draft position, from which the drafter then chooses drafts."""

    @abstractmethod
    def scored(self, hidden_BKD: Tensor, logits_BKV: Tensor, anchors_B: Tensor) -> Picks:
        """Returns the scored candidates of blocks, given their final normed hidden states and logits. `anchors_B`: the
        last committed token before each block."""

    def pick(self, rows: list[int], anchors: list[int], width: int, size: int) -> Picks:
        """Drafts a block of `size` positions for each cache row of `rows`. Returns the scored candidates of each
        block's first `width` draft positions; the next call may overwrite them. `anchors`: the rows' last committed
        tokens."""
        if outputs := self._replayed(rows, anchors, size):
            return Picks(*(rows_at(tensor, rows)[:, :width] for tensor in outputs))
        return self.scored(*self.read(rows, anchors, width, size), torch.tensor(anchors, device=self.device))

    def conclude(self, hidden_TD: Tensor, num_rows: int, width: int, anchors_B: Tensor) -> tuple[Tensor, ...]:
        """Computes scored candidates, as the fields of a `Picks`, at the first `width` draft positions of B =
        `num_rows` blocks. `hidden_TD`: the draft layers' output at all T positions of these blocks, before the final
        norm. `anchors_B`: the last committed token before each block."""
        blocks = self._logits_of(self._drafting_slots(hidden_TD, num_rows, width), num_rows)
        return tuple(tensor for tensor in self.scored(*blocks, anchors_B) if tensor is not None)

    def choose(self, outputs: Sequence[Tensor], drawn: tuple[Draws, Tensor] | None) -> tuple[Tensor, Tensor]:
        return choose(Picks(*outputs), drawn, self.config.foresight)


class DFlash2Path(CandidatePath):
    """DFlash 2 in PyTorch operations on any device, with weights prepared for one target."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: Target, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, tensors, target, own)
        self._convs = [
            [self._conv(tensors, f"layers.{index}.{conv}") for conv in CONVS]
            for index in range(config.shape.num_layers)
        ]
        self.selector = selector_of(config, tensors, self.device)

    def _conv(self, tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, PackedLinear]:
        projection = PackedLinear(tensors[f"{name}.kernel_projection.weight"].detach().to(self.device, self.dtype))
        base = tensors[f"{name}.base_kernel"].detach().to(self.device, self.dtype)
        self.weight_bytes += projection.num_bytes + base.nbytes
        return base, projection

    def run_layer(self, index: int, residual: Residual, size: int, attention: LayerAttention) -> None:
        layer = self._layers[index]
        sublayers = ((layer.input_norm, lambda inputs: layer.attend(inputs, attention)), (layer.mlp_norm, layer.mlp))
        for (norm, run), (base, project) in zip(sublayers, self._convs[index], strict=True):
            inputs_TD = residual.normed(norm)
            added = project(inputs_TD).view(len(inputs_TD), 2, base.shape[1], -1)
            outputs_TD = run(convolve(inputs_TD, added[:, 0], base[0], size))
            residual.add(convolve(outputs_TD, added[:, 1], base[1], size))

    def scored(self, hidden_BKD: Tensor, logits_BKV: Tensor, anchors_B: Tensor) -> Picks:
        return score(self.selector, hidden_BKD, logits_BKV, anchors_B, self.ids)


class DFlash2NativePath(NativePath):
    """DFlash 2 in native (C++) calls: convolutions in the layers, and one more call that scores the candidates."""

    def __init__(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], target: NativeDecoder, own: Vocabulary = ALL_TOKENS
    ) -> None:
        super().__init__(config, tensors, target, own, partial(_mixes, config, tensors, target))
        ids_V = None if own.ids is None else own.ids.to(torch.int32).contiguous()
        self.selector = selector_of(config, tensors, torch.device("cpu"))
        before, after = (self.selector.get_parameter(book).detach().contiguous() for book in BOOKS)
        is_known = before.dtype == after.dtype and before.dtype in FORMATS
        books = (before, after) if is_known else (before.float(), after.float())
        gate = pack([self.selector.hidden_projection.weight.detach().to(target.dtype)], target.dtype)
        self.weight_bytes += gate.num_bytes
        self._picker = Picker(self.selector.top_k, books, gate, target.dtype, ids_V)

    def pick(self, rows: list[int], anchors: list[int], width: int, size: int) -> Picks:
        """Drafts blocks and returns their scored candidates, as `CandidatePath.pick` does. Scores differ from those of
        `DFlash2Path` by a constant per position, which changes neither drafts nor probabilities."""
        hidden_BKD, logits_BKV = self.read(rows, anchors, width, size)
        return Picks(*self._picker.pick(anchors, logits_BKV, hidden_BKD))


def selector_of(config: DFlashConfig, tensors: Mapping[str, Tensor], device: torch.device) -> Selector:
    """Creates the candidate selector on `device` from a network's tensors; those already on that device are shared."""
    with torch.device("meta"):
        selector = Selector(config)
    weights = {
        name.removeprefix(SELECTOR): tensor.to(device) for name, tensor in tensors.items() if name.startswith(SELECTOR)
    }
    selector.load_state_dict(weights, assign=True)
    return selector


def _mixes(config: DFlashConfig, tensors: Mapping[str, Tensor], target: NativeDecoder, index: int) -> dict[str, Any]:
    """CLayer fields of a layer's convolutions."""
    assert config.second is not None
    fields: dict[str, Any] = {"mix_taps": config.second.conv_kernel_size}
    for name, conv in zip(("attention", "mlp"), CONVS, strict=True):
        projection, base = (
            tensors[f"layers.{index}.{conv}.{part}"] for part in ("kernel_projection.weight", "base_kernel")
        )
        fields[f"{name}_mix"] = pack([target.as_weight(projection)], target.dtype)
        fields[f"{name}_base"] = base.detach().to("cpu", target.dtype).float().contiguous()
    return fields

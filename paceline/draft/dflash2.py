"""DFlash 2: the DFlash block with convolutions around its sublayers and a selector that walks through its candidates.

Two things are added to `dflash.py`, whose context, cache and round these drafters share:

- Grouped dynamic causal convolution: what goes into attention and MLP, and what comes out, is mixed with the slot before it,
  by taps of which a part is learned (`base_kernel`) and a part is told from the slot itself (`kernel_projection`).
- Candidate selector: of each slot the `top_k` most likely tokens b are scored behind the token a that was chosen before them,
  S(a, b) = logit(b) + <A[a] * W h, B[b]>, and a walk from the anchor takes one a slot. Greedy and seeded requests take the
  largest; for sampled ones softmax(S / T) over the candidates is the proposal itself, so that it is judged exactly. A tree's
  branches get the scores of their own parent.

Formulas, names and order of the PyPI package `dflash` 0.1.0 (MIT), with which `tests/draft/test_dflash2.py` compares. Runs in
PyTorch, whatever the target runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import rng
from paceline.draft.checkpoint import DFlashConfig, StoredDrafter, as_dflash2, new_config, read_stored
from paceline.draft.dflash import Attend, DFlashDrafter, DFlashNetwork, DraftLayer
from paceline.draft.dflash_paths import LayerAttention, TorchPath
from paceline.draft.dflash_reading import Reading, inverse_temperature, num_finite, scale_logits
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary
from paceline.errors import ModelFileError
from paceline.model.decoder import PackedLinear
from paceline.model.logits import sample
from paceline.model.target import Target
from paceline.trees import Candidates
from paceline.types import Sequence

BOOKS = ("predecessor_codebook", "successor_codebook")
SELECTOR, CONVS = "candidate_selector.", ("attention_conv", "mlp_conv")
DEVIATION = 0.02
"""Of what a new selector's weights begin with."""


def convolve(hidden_TD: Tensor, added_TKG: Tensor, base_KD: Tensor, size: int) -> Tensor:
    """out[i, c] = sum over t < K of (base[t, c] + added[i, t, group of c]) * hidden[i - t, c], within blocks of `size` slots.

    hidden_TD [T, D]: blocks one behind another; nothing comes from before a block's first slot. Returns [T, D].
    """
    num_taps, groups = added_TKG.shape[1:]
    blocks = hidden_TD.unflatten(0, (-1, size)).unflatten(-1, (groups, -1))  # [A, size, G, D / G]
    added = added_TKG.unflatten(0, (-1, size))[..., None]
    out = torch.zeros_like(blocks)
    for tap in range(num_taps):
        values = F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, :size] if tap else blocks
        out = out + base_KD[tap].view(groups, -1).to(blocks.dtype) * values
        out = torch.addcmul(out, added[:, :, tap], values)
    return out.flatten(2).flatten(0, 1)


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


class Selector(nn.Module):
    """Codebooks A and B [V, rank] of tokens that come before and after each other, and W [rank, D].

    While it learns, codebooks may be factored: A = E P, with E the target's embedding, frozen, and P [rank, D] learned in place
    of V * rank numbers (`factored`); `materialised` makes a checkpoint's codebooks of them.
    """

    def __init__(self, config: DFlashConfig, factored: bool = False) -> None:
        super().__init__()
        assert config.second is not None and config.vocab_size is not None
        rank, hidden_size = config.second.selector_rank, config.shape.hidden_size
        self.top_k, self.is_factored = config.second.selector_top_k, factored
        rows = (rank, hidden_size) if factored else (config.vocab_size, rank)
        for name in BOOKS:
            self.register_parameter(name.replace("codebook", "factor") if factored else name, nn.Parameter(torch.empty(rows)))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def rows(self, book: str, tokens: Tensor, embedding_VD: Tensor | None = None) -> Tensor:
        """Rows of a codebook, [*tokens.shape, rank]; of factored ones with the target's embedding."""
        if not self.is_factored:
            return F.embedding(tokens, self.get_parameter(book))
        assert embedding_VD is not None, "factored codebooks are made of the target's embedding"
        factor = self.get_parameter(book.replace("codebook", "factor"))
        return F.linear(F.embedding(tokens, embedding_VD).to(factor.dtype), factor)


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
    def random(cls, config: DFlashConfig, seed: int = 0) -> Self:
        """A random DFlash v1 body, and convolution and selector that change nothing yet."""
        body = DFlashNetwork.random(replace(config, second=None), seed).state_dict()
        return cls.of(config, body | beginnings(config, seed))

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


class Picks(NamedTuple):
    """Candidates of slots and their scores."""

    chosen_BKM: Tensor
    """Columns of the head, the most likely first."""
    scores_BKPM: Tensor
    """Of each behind the P tokens that could stand before it, float32."""


def score(
    selector: Selector,
    hidden_BKD: Tensor,
    logits_BKV: Tensor,
    anchors_B: Tensor,
    ids: Tensor | None = None,
    before_BK: Tensor | None = None,
    embedding_VD: Tensor | None = None,
) -> Picks:
    """Scores S of the `top_k` most likely tokens of each slot, behind each candidate of the slot before, or behind `before_BK`
    alone (P = 1). The first slot follows the anchor, whatever P is.

    hidden_BKD: final normed. logits_BKV: scaled and capped. ids [V]: tokens of the head's rows; None: all of the vocabulary.
    """
    unary_BKM, chosen_BKM = logits_BKV.float().topk(min(selector.top_k, logits_BKV.shape[-1]), dim=-1)
    tokens_BKM = chosen_BKM if ids is None else ids[chosen_BKM]
    if before_BK is None:
        first_BP = anchors_B[:, None, None].expand(-1, 1, tokens_BKM.shape[-1])
        before_BKP = torch.cat([first_BP, tokens_BKM[:, :-1]], dim=1)
    else:
        before_BKP = before_BK[:, :, None]
    projection = selector.hidden_projection.weight
    gate_BKR = F.linear(hidden_BKD.to(projection.dtype), projection).float()
    predecessors = selector.rows(BOOKS[0], before_BKP, embedding_VD).float() * gate_BKR[:, :, None]
    successors = selector.rows(BOOKS[1], tokens_BKM, embedding_VD).float()
    return Picks(chosen_BKM, unary_BKM[:, :, None] + predecessors @ successors.transpose(-1, -2))


class DFlash2Path(TorchPath):
    """TorchPath with the convolutions, and hidden states beside the logits for the selector."""

    def __init__(self, config: DFlashConfig, network: DFlash2Network, target: Target, own: Vocabulary = ALL_TOKENS) -> None:
        tensors = network.state_dict()
        added = {name for name in tensors if name.startswith(SELECTOR) or any(f".{conv}." in name for conv in CONVS)}
        super().__init__(config, {name: tensors[name] for name in tensors.keys() - added}, target, *own)
        self._convs = [
            [self._conv(tensors, f"layers.{index}.{conv}") for conv in CONVS] for index in range(config.shape.num_layers)
        ]
        with torch.device("meta"):
            self.selector = Selector(config)
        selecting = {name.removeprefix(SELECTOR): tensors[name] for name in added if name.startswith(SELECTOR)}
        # Where the weights lie on the device already, these are the network's own.
        self.selector.load_state_dict({name: tensor.to(self._device) for name, tensor in selecting.items()}, assign=True)
        self.ids = None if own.ids is None else own.ids.to(self._device)

    def _conv(self, tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, PackedLinear]:
        projection = PackedLinear(tensors[f"{name}.kernel_projection.weight"].detach().to(self._device, self._dtype))
        base = tensors[f"{name}.base_kernel"].detach().to(self._device, self._dtype)
        self.weight_bytes += projection.num_bytes + base.nbytes
        return base, projection

    def run_layer(self, index: int, hidden_TD: Tensor, size: int, attention: LayerAttention) -> None:
        layer = self._layers[index]
        sublayers = ((layer.input_norm, lambda inputs: layer.attend(inputs, *attention)), (layer.mlp_norm, layer.mlp))
        for (norm, run), (base, project) in zip(sublayers, self._convs[index], strict=True):
            inputs_TD = norm(hidden_TD)
            added = project(inputs_TD).view(len(inputs_TD), 2, base.shape[1], -1)
            outputs_TD = run(convolve(inputs_TD, added[:, 0], base[0], size))
            hidden_TD.add_(convolve(outputs_TD, added[:, 1], base[1], size))

    @torch.inference_mode()
    def read(self, rows: list[int], anchors: list[int], width: int, size: int) -> tuple[Tensor, Tensor]:
        """Hidden states [B, width, D] and scaled logits [B, width, V] of each row's first `width` drafts."""
        slots_TD = self.slots(rows, anchors, width, size)
        logits_TV = scale_logits(self._head(slots_TD), self.config)
        return slots_TD.unflatten(0, (len(rows), width)), logits_TV.unflatten(0, (len(rows), width))


class WalkedReading(Reading):
    """What the selector makes of a pass: every slot's drafts depend on those before them."""

    def __init__(self, picks: Picks, ids: Tensor | None, vocab_size: int) -> None:
        self._scores_BKPM, self._vocab_size = picks.scores_BKPM, vocab_size
        self._tokens_BKM: list[list[list[int]]] = (picks.chosen_BKM if ids is None else ids[picks.chosen_BKM]).tolist()
        best = picks.scores_BKPM.max(-1)
        finite = best.values.isfinite()
        self._best_BKP: list[list[list[int]]] = best.indices.masked_fill(~finite, -1).tolist()

    def certain(self, slot: int, limit: int, says_sure: bool) -> tuple[list[int], list[float] | None]:
        places = self._walk(slot, limit)
        tokens = [candidates[place] for candidates, place in zip(self._tokens_BKM[slot], places, strict=False)]
        return tokens, self._sure(slot, places, 1.0) if says_sure else None

    def drawn(self, slot: int, limit: int, seq: Sequence) -> tuple[list[int], Tensor | None, list[float]]:
        """As Reading.drawn, from softmax(S / T) over the candidates behind what was drawn before. How sure the slots are is
        told along the walk of the largest scores: it may not depend on what is drawn."""
        inverse = inverse_temperature(seq)
        probs_KPM = torch.softmax(self._scores_BKPM[slot, :limit] * inverse, dim=-1)
        tokens, places, rows = list[int](), list[int](), list[Tensor]()
        before = 0
        for place, candidates in enumerate(self._tokens_BKM[slot][:limit]):
            if self._best_BKP[slot][place][before] < 0:
                break
            rows.append(probs_KPM[place, before])
            places.append(sample(rows[-1], rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place)))
            before = places[-1]
            tokens.append(candidates[before])
        sure = self._sure(slot, self._walk(slot, limit), inverse)
        if not tokens:
            return tokens, None, sure
        probs_KV = rows[0].new_zeros(len(tokens), self._vocab_size)
        ids_KM = torch.tensor(self._tokens_BKM[slot][: len(tokens)], device=probs_KV.device)
        return tokens, probs_KV.scatter_(1, ids_KM, torch.stack(rows)), sure

    def candidates(self, slot: int, limit: int, seq: Sequence, count: int, most: int) -> Candidates:
        """As Reading.candidates, along the walk of the largest scores; `behind` says them behind any other candidate."""
        logprobs_KPM = torch.log_softmax(self._scores_BKPM[slot, :limit] * inverse_temperature(seq), dim=-1)
        order = logprobs_KPM.sort(dim=-1, descending=True)
        ranked, ranks = order.values[..., :count].tolist(), order.indices[..., :count].tolist()
        tokens_KM = self._tokens_BKM[slot]

        def at(place: int, before: int) -> tuple[list[int], list[float]]:
            return [tokens_KM[place][each] for each in ranks[place][before]], ranked[place][before]

        def behind(place: int, token: int) -> tuple[list[int], list[float]]:
            return at(place, tokens_KM[place - 1].index(token))

        places = self._walk(slot, limit)
        told = [at(place, before) for place, before in enumerate([0, *places][: len(places)])]
        return Candidates([tokens for tokens, _ in told], [logprobs for _, logprobs in told], most, behind)

    def _walk(self, slot: int, limit: int) -> list[int]:
        """Places of the drafts with the largest scores among the candidates; a score that is not finite ends them."""
        places, before = list[int](), 0
        for best_P in self._best_BKP[slot][:limit]:
            if (before := best_P[before]) < 0:
                break
            places.append(before)
        return places

    def _sure(self, slot: int, places: list[int], inverse: float) -> list[float]:
        """Log-probability of the largest score along the walk."""
        if not places:
            return []
        before = torch.tensor([0, *places[:-1]], device=self._scores_BKPM.device)
        along_KM = self._scores_BKPM[slot, torch.arange(len(places), device=before.device), before] * inverse
        sure = (along_KM.amax(-1) - along_KM.logsumexp(-1)).tolist()
        return sure[: num_finite(sure)]


class DFlash2Drafter(DFlashDrafter):
    """A DFlash 2 drafter."""

    name = "dflash2"
    has_native_path = False
    is_parallel = False
    network: DFlash2Network

    @classmethod
    def from_folder(cls, folder: Path | str, *, num_drafted: int | None = None) -> DFlashDrafter:
        """As DFlashDrafter.from_folder."""
        return read_drafter(folder, num_drafted=num_drafted)

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> DFlash2Drafter:
        """As DFlashDrafter.random; `selector_rank` is 64 unless it is given."""
        rank = keys.pop("selector_rank", 64)
        raw = as_dflash2(new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys), rank=rank)
        return cls(DFlash2Network.random(DFlashConfig.from_json(raw), seed), num_drafted=num_drafted)

    def _make_path(self, target: Target) -> DFlash2Path:
        return DFlash2Path(self.config, self.network, target, Vocabulary(self.draft_ids, self.head_VD))

    @torch.inference_mode()
    def _read(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Reading:
        assert isinstance(self._path, DFlash2Path)
        hidden_BKD, logits_BKV = self._path.read(rows, anchors, width, size)
        anchors_B = torch.tensor(anchors, device=logits_BKV.device)
        picks = score(self._path.selector, hidden_BKD, logits_BKV, anchors_B, self._path.ids)
        return WalkedReading(picks, self._path.ids, self._vocab_size)


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

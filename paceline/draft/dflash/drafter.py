"""DFlash (arXiv 2602.06036): a small block-diffusion network drafts a whole block in one pass.

The target's tapped hidden states become keys and values of all draft layers, once per verified position, in one matrix
product (`observe`). A round embeds [anchor, MASK, MASK, ...] with the target's embedding, where the anchor is the last
verified token; a drafter of another width has a matrix of its own for that and for its logits. Every block position
attends to the context and to the block, and the target's LM head yields all drafts at once (`propose`). Position k of
the block predicts the token at its own position; position 0, the anchor, is discarded.

`DFlashNetwork` holds the weights and is trained; `paths.py` has two decode paths with KV caches, in PyTorch and in
native calls. `reading.py` turns logits into drafts. `tests/draft/test_dflash.py` compares them with the authors'
`dflash` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from paceline.draft.base import Observed
from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.config import DFlashConfig, check_fit, new_config
from paceline.draft.dflash.paths import Drafts, NativePath, TorchPath
from paceline.draft.dflash.reading import Reading, num_finite
from paceline.draft.dflash.static import BlockDrafting
from paceline.draft.tapped import StaticDrafting, TappedDrafter, cache_shape_of, features_of
from paceline.draft.vocabulary import HEAD, Vocabulary
from paceline.errors import ConfigError, ModelFileError, reraised, shown
from paceline.model.checkpoint import random_weights
from paceline.model.config.decoder import DecoderConfig
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import Target
from paceline.model.torch.fused import rms_norm, swiglu
from paceline.plan.trees import MOST_NODES, Candidates
from paceline.types import Batch, DraftBlock, Sequence

Attend = Callable[[int, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]
"""The attention function that training passes to `DFlashNetwork.forward`. It applies RoPE and masks; blocks of several
sequences are packed one after another. Arguments: index of the draft layer; queries [T, heads, head_dim] of the blocks'
T positions; (keys, values) of these positions, [T, kv_heads, head_dim]; (keys, values) of N context positions. Queries
and keys are normed, without RoPE. Returns [T, heads * head_dim]."""


class Norm(nn.Module):
    """RMSNorm with a trainable weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, self.weight, self.eps)


class Projections(nn.Module):
    """Projections for queries, keys, values and output of an attention layer, and norms of query and key heads if the
    config has them."""

    def __init__(self, shape: DecoderConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim, self.has_norm = shape.head_dim, shape.qk_norm
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)


class _Attention(Projections):
    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        query = self.q_norm(self._heads(self.q_proj(block_TD)))
        return self.o_proj(attend(layer, query, self._key_value(block_TD), self._key_value(context_ND)))

    def _key_value(self, inputs_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_norm(self._heads(self.k_proj(inputs_TD))), self._heads(self.v_proj(inputs_TD))

    def _heads(self, projected_TX: Tensor) -> Tensor:
        return projected_TX.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """Feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(inputs), self.up_proj(inputs)))


class DraftLayer(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, shape.hidden_size)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        block_TD = block_TD + self.self_attn(layer, self.input_layernorm(block_TD), context_ND, attend)
        return block_TD + self.mlp(self.post_attention_layernorm(block_TD))


class DFlashNetwork(nn.Module):
    """The trainable DFlash network, with parameter names and dtypes of the checkpoint. It contains neither embedding
    nor LM head: the drafter uses the target's, or an LM head of its own (`DFlashDrafter.head_VD`). If the drafter's
    hidden size differs from the target's, the rows of its own head are also its token embeddings."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(config) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    @staticmethod
    def make_layer(config: DFlashConfig) -> nn.Module:
        return DraftLayer(config.shape)

    @classmethod
    def of(cls, config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> Self:
        """Creates a network whose parameters are `tensors`, without a copy. `source`, errors: as in `with_tensors`."""
        return with_tensors(lambda: cls(config), config.shape, tensors, source)

    def of_file(self) -> dict[str, Tensor]:
        """Returns the network's tensors under the names of the checkpoint file."""
        return dict(self.state_dict())

    @classmethod
    def random(
        cls, config: DFlashConfig, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Creates a network with random weights: normal with standard deviation 0.02; norm weights are 1."""
        with torch.device("meta"):
            shapes = shapes_of(cls(config).state_dict())
        return cls.of(config, dict(random_weights(shapes, seed, device, dtype)))

    def forward(self, block_TD: Tensor, taps_NF: Tensor, attend: Attend) -> Tensor:
        """Returns the final normed hidden states [T, D] of T block positions. `block_TD`: input embeddings. `taps_NF`:
        the target's hidden states at N context positions, F = tapped layers * hidden size.

        Blocks and contexts of several sequences are packed one after another; the attention function `attend` (see
        `Attend`) must mask the positions of other sequences. Differentiable, for training. The decode paths
        (`paths.py`) must compute the same values.
        """
        context_ND = self.hidden_norm(self.fc(taps_NF))
        for index, layer in enumerate(self.layers):
            block_TD = layer(index, block_TD, context_ND, attend)
        return self.norm(block_TD)


AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


def with_tensors(
    make: Callable[[], AnyNetwork], shape: DecoderConfig, tensors: Mapping[str, Tensor], source: Path | str
) -> AnyNetwork:
    """Returns the network that `make` creates, with `tensors` as its parameters, without a copy. `shape`: sizes of its
    layers. `source`: origin of the tensors, for error messages. Raises ModelFileError, which names the tensor, if one
    is missing, unknown or of the wrong shape."""
    remedy = "config and weights are of different drafters"
    if shape.num_layers > len(tensors):
        raise ModelFileError(f"{source}: {len(tensors)} tensors, for {shape.num_layers} layers: {remedy}")
    what = f"{source}: no network of the config's sizes can be made"
    with reraised(ModelFileError, what, remedy, RuntimeError), torch.device("meta"):
        network = make()
    expected, given = shapes_of(network.state_dict()), shapes_of(tensors)
    if expected != given:
        name = min(key for key in expected | given if expected.get(key) != given.get(key))
        raise ModelFileError(
            f"{source}: tensor {name!r} has shape {given.get(name)}, the config asks for {expected.get(name)}: {remedy}"
        )
    network.load_state_dict(dict(tensors), assign=True)
    return network


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def visible(query_T: Tensor, key_S: Tensor, window: int | None, is_causal: bool) -> Tensor:
    """Returns the attention mask [T, S] of one block: True where a query (at position `query_T`) attends to a key (at
    position `key_S`).

    `window`: a query attends only to keys less than this many positions before or after it; None: no limit.
    `is_causal`: a query does not attend to later positions of its block.
    """
    distance = query_T[:, None] - key_S
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


class DFlashDrafter(TappedDrafter):
    """A DFlash v1 drafter. Greedy and seeded requests get deterministic drafts. Other requests get sampled drafts, with
    the distributions that they were sampled from. Two settings of a batch change this:

    - `num_candidates` above 0: requests without a grammar get the most probable tokens as drafts, and further
      candidates for a draft tree.
    - `noise_aware`: drafts are predictions of the tokens that the target will sample, made from the random numbers that
      it will use. Greedy requests and requests with a lossy rule are excepted.
    """

    name = "dflash"
    has_native_path = True
    """True if the drafter can run in native (C++) calls, with a target that does."""
    torch_path: ClassVar[type[TorchPath]] = TorchPath
    native_path: ClassVar[type[NativePath]] = NativePath
    """Classes of the drafter's decode paths."""

    def __init__(
        self,
        network: DFlashNetwork,
        *,
        num_drafted: int | None = None,
        draft_ids: Tensor | None = None,
        head_VD: Tensor | None = None,
    ) -> None:
        """`num_drafted`: maximum drafts per round; a small value uses fewer positions of the block, and a value above
        the block's drafts raises ConfigError. `draft_ids`: draft vocabulary. `head_VD`: the drafter's own LM head, one
        row per drafted id."""
        self.network, self.config = network, network.config
        self.block_size = self.config.block_size
        most = self.config.num_slots
        self.num_drafted = most if num_drafted is None else num_drafted
        if not 0 <= self.num_drafted <= most:
            raise ConfigError(f"this drafter's block of {self.block_size} drafts 0 to {most}, not {shown(num_drafted)}")
        self.draft_ids, self.head_VD = draft_ids, head_VD
        self.tap_layers = self.config.target_layer_ids

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> Self:
        """Creates a drafter with random weights, for benchmarks: drafting takes real time, but the drafts are useless.
        `num_drafted`: maximum drafts per round; None: a full block. `keys`: arguments of `config.new_config`."""
        raw = new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys)
        return cls(cls._random_network(raw, seed, target.device, target.dtype), num_drafted=num_drafted)

    @staticmethod
    def _random_network(raw: dict[str, Any], *options: Any) -> DFlashNetwork:
        """Creates a network of this drafter's method, which extends a DFlash v1 network with config.json `raw`.
        `options` go to its `random`."""
        return DFlashNetwork.random(DFlashConfig.from_json(raw), *options)

    def save(self, folder: Path | str, *, in_8_bits: bool = False) -> None:
        """Writes the drafter into a folder, in z-lab's format. `in_8_bits`: round the matrices to 8 bits, in a file
        that only paceline reads. Raises CacheError if writing fails."""
        tensors = self.network.of_file()
        write_checkpoint(folder, self.config.raw, tensors, self.draft_ids, head_VD=self.head_VD, in_8_bits=in_8_bits)

    @torch.no_grad()
    def bind(self, target: Target) -> None:
        """Check that the drafter fits the target (else raises DrafterMismatchError), and prepare weights and cache.
        Binding again to the same cache only resets all rows."""
        check_fit(self.config, target, self.draft_ids, self.head_VD)
        self._bind_path(target, lambda: self._make_path(target))
        self._vocab_size, self.has_own_threads = target.vocab_size, isinstance(self._path, NativePath)

    def _make_path(self, target: Target) -> TorchPath | NativePath:
        tensors, own = self.network.state_dict(), Vocabulary(self.draft_ids, self.head_VD)
        if self.has_native_path and isinstance(target, NativeDecoder):
            return self.native_path(self.config, tensors, target, own)
        return self.torch_path(self.config, tensors, target, own)

    def record(self) -> None:
        self._path.record()

    @property
    def recorded_rounds(self) -> dict[Any, Any] | None:
        """Decode rounds captured as CUDA graphs that contain this drafter, as in `TappedDrafter.recorded_rounds`. None
        unless its decode path uses PyTorch operations, because native calls cannot be captured."""
        return self._rounds if isinstance(self._path, TorchPath) else None

    def static_drafting(self, num_rows: int, count: int) -> StaticDrafting:
        return BlockDrafting(self._path, num_rows, count)

    def cache_shape(self, target: Target) -> tuple[int, ...]:
        is_native = self.has_native_path and isinstance(target, NativeDecoder)
        slack = self.block_size if is_native else 1 + self.config.num_slots
        layers, rows, heads, *sizes = cache_shape_of(self.config.shape, target, slack, is_native=is_native)
        return (layers, rows, heads, *sizes) if is_native else (1, rows, layers * heads, *sizes)

    def _own_tensors(self) -> Mapping[str, Tensor]:
        own = super()._own_tensors()
        return own if self.head_VD is None else {**own, HEAD: self.head_VD}

    def _use_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.head_VD = tensors.get(HEAD, self.head_VD)
        super()._use_tensors({name: tensor for name, tensor in tensors.items() if name != HEAD})

    def _take_in(self, rows: list[int], starts: list[int], counts: list[int], observed: list[Observed]) -> None:
        self._path.inject(rows, starts, counts, features_of(observed))

    def propose(self, batch: Batch) -> DraftBlock:
        """Draft one block for each sequence, at most `num_drafted` tokens; returns the drafts of all rows. A row's
        drafts end before the first position with non-finite logits."""
        limits = batch.draft_limits_B(self.num_drafted)
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        block = DraftBlock.certain([[] for _ in limits])
        if not drafting:
            return block
        self._sort()
        sequences = [batch.sequences[index] for index in drafting]
        rows, anchors = [seq.row for seq in sequences], [seq.tokens[-1] for seq in sequences]
        self._inject(rows)
        has_tree = [bool(batch.num_candidates) and seq.constraint is None for seq in sequences]
        predicts = [batch.noise_aware and seq.kind != "greedy" and seq.params.lossy is None for seq in sequences]
        has_candidates = [tree or guess for tree, guess in zip(has_tree, predicts, strict=True)]
        drawn = [seq.kind == "sampled" and not each for seq, each in zip(sequences, has_candidates, strict=True)]
        width = max(limits)
        needed = width if self.config.from_anchor else 1 + width  # position 0, the anchor, drafts nothing
        # Recorded passes have one size; eager ones compute only the positions that are read.
        size = self.block_size if batch.whole_blocks or self._path.is_fixed else needed
        with_confidence = not batch.whole_blocks or any(has_candidates)  # fixed planners ignore it
        reading = self._read(rows, anchors, width, size, with_confidence or any(drawn))
        candidates_B: list[Candidates | None] = [None] * len(limits)
        block.candidates_B = candidates_B if any(has_tree) else None
        confidence_B: list[list[float] | None] = [None] * len(limits)
        block.confidence_B = confidence_B if with_confidence else None
        for place, (seq, index) in enumerate(zip(sequences, drafting, strict=True)):
            if drawn[place]:
                block.tokens_B[index], block.probs_B[index], sure = reading.drawn(place, limits[index], seq)
            elif has_candidates[place]:
                # The pass also writes the anchor: one position less for the tree.
                most, count = min(self._cache.max_len - seq.cached_len - 1, MOST_NODES), max(batch.num_candidates, 1)
                foresight = self.config.foresight if predicts[place] else None
                candidates = reading.candidates(place, limits[index], seq, count, most, foresight)
                candidates_B[index] = candidates if has_tree[place] else None
                block.tokens_B[index] = [tokens[0] for tokens in candidates.tokens_KM]
                sure = [logprobs[0] for logprobs in candidates.logprobs_KM]
            else:
                block.tokens_B[index], sure = reading.certain(place, limits[index], with_confidence)
            confidence_B[index] = sure[: num_finite(sure)] if sure and with_confidence else None
        return block

    def chances_of(self, seq: Sequence, tokens: list[int], probs_KV: Tensor) -> list[float]:
        """Returns for each of `tokens` the probability with which the latest round could have sampled it as the draft
        at its position. Used to estimate how many sampled drafts the target would accept.

        `tokens`: one token for each of the first draft positions. `probs_KV`: the distributions from which the latest
        round's drafts were sampled, one per draft position; at least as many as `tokens`.
        """
        return probs_KV[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)].tolist()

    def _read(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Reading:
        best_BK, logits_BKV, sure_BK = self._draft(rows, anchors, width, size, with_logits)
        return Reading(best_BK, logits_BKV, self.config, self.draft_ids, self._vocab_size, sure_BK)

    def _draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        return self._path.draft(rows, anchors, width, size, with_logits)

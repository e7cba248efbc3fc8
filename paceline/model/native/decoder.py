"""The decoder in C++, one native call per pass, with the interface and formulas of `model/torch/decoder.py`.

Weights are packed once, in the file's format: blocks of a GGUF file stay quantised and are expanded in registers. A
row's result is batch-invariant, so speculation does not change it, in bfloat16 either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.model.checkpoint import check_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import Weight, quantise
from paceline.model.kv_cache import StaticKVCache
from paceline.model.layout import NORMS, delta_apart, gate_apart
from paceline.model.native import library as native
from paceline.model.native.library import (
    Buffers,
    CCache,
    CConfig,
    CExpert,
    CLayer,
    CMemory,
    Matrix,
    Model,
    filled,
    pointer,
)
from paceline.model.native.packing import pack, pack_vectors
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.model.torch.attention import rope_tables
from paceline.model.torch.decoder import build_layers, end_scales
from paceline.model.torch.delta_cache import DeltaCache


class NativeDecoder(Target):
    """A target on the CPU whose passes run in the native library; not for models whose layers differ in size (Gemma
    4)."""

    kv: StaticKVCache
    """The same object as `cache`, with its concrete type. Heads are padded to the library's head size."""
    has_own_threads = takes_trees = True
    overwrites_taps = False

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Iterable[tuple[str, Weight]],
        *,
        num_rows: int = 1,
        max_len: int = 2048,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tensors`: (Hugging Face name, weight). Uses as many threads as PyTorch. Raises NativeError without the
        library."""
        native.follow_torch()
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_position = config.num_layers, config.max_position
        self.ends = end_scales(config, dtype)
        # Committing pending positions to a recurrent state changes the order of summation, and so the last bits.
        self.is_width_invariant = config.delta is None
        self._logits = torch.empty(0, self.vocab_size)
        self._buffers = Buffers()
        self._take(tensors)
        self.allocate_cache(num_rows, max_len)

    def _take(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        config, dtype = self.config, self.dtype

        def make_other(name: str, weight: Weight) -> Any:
            return _vector(weight, dtype, config.norm_offset) if name == "model.norm.weight" else pack([weight], dtype)

        self._layers, rest = build_layers(config, tensors, partial(layer_parts, config, dtype=dtype), make_other)
        self._final_norm = rest["model.norm.weight"]
        self.embedding_matrix: Matrix = rest["model.embed_tokens.weight"]
        """The packed embedding, shared with drafters."""
        self.head_matrix: Matrix = self.embedding_matrix if config.tie_embeddings else rest["lm_head.weight"]
        """The packed LM head, shared with drafters."""
        matrices = [part for layer in self._layers for part in layer.values() if isinstance(part, Matrix)]
        matrices.append(self.head_matrix)  # together with the layers: everything that a pass reads in full
        experts = [[(each["gate_up"], each["down"]) for each in layer.get("experts", ())] for layer in self._layers]
        self._num_expert_layers = max(1, sum(map(bool, experts)))
        self.weight_bytes = sum(matrix.num_bytes for matrix in matrices)
        self.weight_bytes += sum(_read_by_a_token(config, own) for own in experts)
        matrices += [matrix for own in experts for pair in own for matrix in pair]
        self.weight_format = "+".join(sorted({name for matrix in matrices for name in matrix.formats}))
        self.has_blocks = self.weight_format not in ("float32", "bfloat16")
        """True if some weights stay quantised, in blocks."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, also quantised ones, by dense `tensors`: (Hugging Face name, tensor). Raises
        ModelFileError for a wrong or missing tensor."""
        self._take(check_tensors(self.config, tensors, "the new weights"))
        self.allocate_cache(self.cache.num_rows, self.cache.max_len)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        config = self.config
        self.check_len(max_len)
        rest = {"embedding": self.embedding_matrix, "head": self.head_matrix, "final_norm": self._final_norm}
        rest |= {"embedding_scale": self.ends.embedding, "logit_scale": self.ends.logits, "logit_cap": self.ends.cap}
        self._model = native_model(config, self.dtype, max_len, self._layers, **rest)
        self.kv = self.cache = cache = native_cache(config, num_rows, max_len, self.dtype)
        self._native_cache = cache_view(cache)
        cache.mover = partial(self._model.keep, self._native_cache)

    def as_weight(self, tensor: Tensor) -> Weight:
        """Convert a drafter's weight to the format of this target's weights. If the target is quantised, returns a
        matrix as Q8_0 blocks, provided that its rows divide into blocks of 32. Anything else becomes a CPU tensor of
        the target's dtype."""
        rounded = tensor.detach().to("cpu", self.dtype)
        return quantise(rounded, "Q8_0") if self.has_blocks else rounded

    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return self.embedding_matrix.rows_of(tokens_T.tolist(), self.dtype)

    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return self.head_matrix.multiply(hidden_TD, self.dtype)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if isinstance(self.kv, NativeDeltaCache):
            for again in self.kv.lost(batch.rows):  # uses the same buffers, so it comes before they are filled
                self.forward(again)
        logit_rows = batch.logit_rows
        taps_TF = None
        if self.tap_layers:
            taps_TF = torch.empty(batch.num_tokens, len(self.tap_layers) * self.hidden_size, dtype=self.dtype)
        if len(self._logits) < len(logit_rows) and not batch.only_argmax:
            self._logits = torch.empty(len(logit_rows), self.vocab_size)
        logits_TV = None if batch.only_argmax or not logit_rows else self._logits[: len(logit_rows)]
        work = self._buffers.work
        work.num_rows, work.num_taps, work.num_logit_rows = len(batch.rows), len(self.tap_layers), len(logit_rows)
        work.taps, work.logits, work.logits_stride = pointer(taps_TF), pointer(logits_TV), self.vocab_size
        self._buffers.fill(rows=batch.rows, starts=batch.starts, counts=batch.counts, tokens=batch.tokens)
        self._buffers.fill(tap_layers=list(self.tap_layers), logit_rows=logit_rows)
        self._buffers.fill_parents(batch.parents)
        self._fill_pending(batch)
        argmax = self._buffers.room("argmax", len(logit_rows))
        if self.config.num_experts:
            self._buffers.fill(experts_read=[0])
        self._model.forward(self._native_cache, work)
        self.cache.append(batch.rows, batch.counts)
        if self.config.num_experts:
            self.experts_read = self._buffers.room("experts_read", 1)[0] / self._num_expert_layers
        return ForwardOutput(logits_TV, taps_TF, argmax[: len(logit_rows)] if logit_rows else None)

    def _fill_pending(self, batch: ForwardBatch) -> None:
        """Pass the pending windows of gated delta nets to the library."""
        cache = self.kv
        if not isinstance(cache, NativeDeltaCache):
            return
        held, commits = cache.held(batch.rows), cache.commits(batch)
        if self._native_cache.room != cache.room:
            cache.show(self._native_cache)
        rows, before, counts = (list(numbers) for numbers in zip(*commits, strict=True)) if commits else ([], [], [])
        self._buffers.work.num_settles = len(commits)
        self._buffers.fill(held=held, settle_rows=rows, settle_before=before, settle_counts=counts)

    def time_stages(self, seconds: Tensor) -> None:
        """Time the stages of all later passes, for profiling. Stage i is library.STAGES[i], such as "qkv". Each pass
        adds the seconds that thread 0 spends in stage i to seconds[i]; `seconds` is a float32 tensor of the caller."""
        self._stage_s = seconds
        self._buffers.work.stage_s = pointer(seconds)


class NativeKVCache(StaticKVCache):
    """A StaticKVCache in the native library's layout: the keys of 16 adjacent positions are interleaved
    (`native/kernels.h`)."""

    mover: Callable[[int, int, list[int]], None] | None = None
    """The model's function that moves kept positions: (row, start, slots); None for a drafter's cache."""

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        assert self.mover is not None, "this cache does not move positions"
        self.mover(row, start, slots)


class NativeDeltaCache(DeltaCache, NativeKVCache):
    """A NativeKVCache with the recurrent data (float32) of gated delta net layers."""

    def show(self, view: CCache) -> None:
        """Write the memory addresses of recurrent states and pending windows (updates not yet in a state) into the C
        struct `view`. The cache must not be freed while the struct is in use. Call this again after a pass has enlarged
        the cache's windows."""
        memories = [CMemory(*map(pointer, memory.tensors())) for memory in self.memories]
        view.memories, view.room = (CMemory * len(memories))(*memories), self.room


def native_cache(
    config: DecoderConfig, num_rows: int, max_len: int, dtype: torch.dtype, slack: int = 0
) -> NativeKVCache:
    """Allocate a KV cache for all layers, padded as the native library requires. `slack`: scratch positions per row."""
    head_dim, slack = padded(config, max_len, slack)
    if config.delta is not None:
        more: dict[str, Any] = {"head_dim": head_dim, "slack": slack, "inputs": torch.float32}
        return NativeDeltaCache(config, num_rows, max_len, dtype, **more)
    return NativeKVCache(config.num_layers, num_rows, config.num_kv_heads, max_len, head_dim, dtype, slack=slack)


def padded(config: DecoderConfig, max_len: int, slack: int) -> tuple[int, int]:
    """Return the (head_dim, slack) with which the native library stores a cache. head_dim is the config's, rounded up
    as the library requires. `slack`, the number of scratch positions after `max_len`, is increased until each row has a
    multiple of 16 positions."""
    return native.require().pn_padded_head_dim(config.head_dim), slack + -(max_len + slack) % native.KEYS


def cache_view(cache: StaticKVCache) -> CCache:
    """Describe the cache by a C struct with addresses of its tensors, which must outlive the struct."""
    layer, row, head, _, _ = cache.keys.stride()
    view = CCache(cache.keys.data_ptr(), cache.values.data_ptr(), layer, row, head, cache.keys.shape[3], cache.num_rows)
    if isinstance(cache, NativeDeltaCache):
        cache.show(view)
    return view


def native_model(
    config: DecoderConfig,
    dtype: torch.dtype,
    max_len: int,
    layers: list[dict[str, Any]],
    first_position: int = 0,
    **parts: Any,
) -> Model:
    """Create a model of the native library.

    `layers`: for each layer, the fields of the C struct CLayer: name -> matrix, float32 vector or number. `parts`:
    fields of the C struct CConfig that are not derived from `config`, such as the LM head. `max_len`: positions per row
    of the cache. `first_position`: the position, for RoPE, of the first token in each row.
    """
    tables = {"": rope_tables(config, first_position + max_len)}
    if "local" in config.ropes:
        tables["local_"] = rope_tables(config, first_position + max_len, "local")
    rotary = {
        f"{kind}{name}": table[first_position:].float().contiguous()
        for kind, pair in tables.items()
        for name, table in zip(("cos", "sin"), pair, strict=True)
    }
    experts = [_expert_structs(layer.get("experts", ())) for layer in layers]
    structs = (CLayer * config.num_layers)(
        *(filled(CLayer(is_causal=1), layer | {"experts": own}) for layer, own in zip(layers, experts, strict=True))
    )
    struct = CConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=native.FORMATS[dtype],
        eps=config.rms_norm_eps,
        layers=structs,
        embedding_scale=1.0,
        rotary_dim=config.rotary_dim or config.head_dim,
        is_norm_whole=config.is_qk_norm_whole,
        attention_scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        attention_cap=config.attention_cap,
        residual_scale=config.residual_scale,
        logit_scale=1.0,
        activation=native.ACTIVATIONS.index(config.activation),
        swiglu_alpha=config.swiglu_alpha,
        swiglu_limit=config.swiglu_limit,
        experts_per_token=config.experts_per_token,
        are_experts_normed=config.normed_experts,
        has_output_gate=config.output_gate,
        **_delta_sizes(config),
    )
    return Model(filled(struct, rotary | parts), [layers, structs, experts, parts, rotary])


def _delta_sizes(config: DecoderConfig) -> dict[str, int]:
    delta = config.delta
    if delta is None:
        return {}
    heads = {"delta_key_heads": delta.num_key_heads, "delta_value_heads": delta.num_value_heads}
    return heads | {"delta_key_dim": delta.key_dim, "delta_value_dim": delta.value_dim, "delta_taps": delta.kernel}


def _expert_structs(experts: Sequence[dict[str, Any]]) -> Any:
    return (CExpert * len(experts))(*(filled(CExpert(), expert) for expert in experts)) if experts else None


def _read_by_a_token(config: DecoderConfig, experts: list[tuple[Matrix, Matrix]]) -> int:
    """Bytes of a layer's experts that one token reads, including the shared expert, which is last."""
    sizes = [gate_up.num_bytes + down.num_bytes for gate_up, down in experts]
    selected = sum(sizes[: config.num_experts]) * config.experts_per_token // max(config.num_experts, 1)
    return selected + sum(sizes[config.num_experts :])


def _vector(vector: Weight, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    assert isinstance(vector, Tensor)
    # Always a copy: the tensor's owner may modify it.
    return vector.to(dtype).float().add(offset).contiguous()


def layer_parts(config: DecoderConfig, index: int, parts: dict[str, Weight], dtype: torch.dtype) -> dict[str, Any]:
    """Convert the weights `parts` of layer `index`, by name within the layer, to fields of the C struct CLayer: name ->
    matrix, float32 vector or number. Removes weight matrices from `parts`, to free their memory."""
    offset = config.norm_offset
    norms = {field: _vector(parts[f"{name}.weight"], dtype, offset) for field, name in NORMS[config.norms].items()}
    is_linear = config.is_linear(index)
    layer = norms | (_delta(config, parts, dtype) if is_linear else _attention(config, index, parts, dtype))
    if config.has_experts(index):
        names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
        shared = ["mlp.shared_expert"] if config.shared_expert_size else []
        layer["experts"] = [_mlp(parts, dtype, name) for name in [*names, *shared]]
        layer |= _stacked(parts, dtype, "router", "mlp.gate", *(f"{name}_gate" for name in shared))
        layer |= {"num_experts": config.num_experts, "has_shared": len(shared)}
    else:
        layer |= _mlp(parts, dtype, "mlp")
    return layer


def _attention(config: DecoderConfig, index: int, parts: dict[str, Weight], dtype: torch.dtype) -> dict[str, Any]:
    gate = ["self_attn.gate"] if config.output_gate else []
    if gate:
        gate_apart(config, parts)
    layer: dict[str, Any] = {"window": config.window(index) or 0, "rope": native.ROPES.index(config.rope(index))}
    layer |= _stacked(parts, dtype, "qkv", *(f"self_attn.{which}_proj" for which in "qkv"), *gate)
    layer |= _stacked(parts, dtype, "output", "self_attn.o_proj")
    if config.qk_norm:
        norms = {which: parts[f"self_attn.{which}_norm.weight"] for which in "qk"}
        layer |= {f"{which}_norm": _vector(norm, dtype, config.norm_offset) for which, norm in norms.items()}
    if config.has_sinks:
        layer["sinks"] = _vector(parts["self_attn.sinks"], dtype)
    return layer


def _delta(config: DecoderConfig, parts: dict[str, Weight], dtype: torch.dtype) -> dict[str, Any]:
    assert config.delta is not None
    if config.has_mixed_delta:
        delta_apart(config.delta, parts)
    layer = _stacked(parts, dtype, "qkv", *(f"linear_attn.in_proj_{which}" for which in ("qkv", "z", "b", "a")))
    layer |= _stacked(parts, dtype, "output", "linear_attn.out_proj")
    names = {"kernel": "conv1d.weight", "rate": "A_log", "step": "dt_bias", "norm": "norm.weight"}
    vectors = {name: _vector(parts[f"linear_attn.{theirs}"], dtype) for name, theirs in names.items()}
    vectors["kernel"], vectors["rate"] = vectors["kernel"].squeeze(1).T.contiguous(), -vectors["rate"].exp()
    return layer | {f"delta_{name}": vector for name, vector in vectors.items()}


def _mlp(parts: dict[str, Weight], dtype: torch.dtype, name: str) -> dict[str, Any]:
    """Fields of a CExpert, or of a CLayer with one MLP; `inner_size` is the MLP's inner width."""
    inner_size = parts[f"{name}.down_proj.weight"].shape[1]
    gate_up = _stacked(parts, dtype, "gate_up", f"{name}.gate_proj", f"{name}.up_proj")
    return gate_up | _stacked(parts, dtype, "down", f"{name}.down_proj") | {"inner_size": inner_size}


def _stacked(parts: dict[str, Weight], dtype: torch.dtype, name: str, *projections: str) -> dict[str, Any]:
    """Fields for projections of the same input, stacked into one matrix, and their biases."""
    biases = [_vector(parts[f"{each}.bias"], dtype) if f"{each}.bias" in parts else None for each in projections]
    matrix = pack([parts.pop(f"{each}.weight") for each in projections], dtype)
    return {name: matrix, f"{name}_bias": pack_vectors(biases)}

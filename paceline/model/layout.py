"""Names and shapes of the tensors of a decoder layer, and functions that split fused tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.model.config.decoder import TABLES, DecoderConfig, DeltaShape
from paceline.model.gguf.blocks import AnyWeight, select_rows, split_rows
from paceline.model.stored_experts import taken_apart

NORMS: dict[str, dict[str, str]] = TABLES["norms"]
"""Norm position (`DecoderConfig.norms`) -> field of a layer -> name of the norm's weight in checkpoints."""
DELTA_NORM = "linear_attn.norm.weight"
"""Name of the output norm of a gated delta net; `DecoderConfig.norm_offset` is not added to this norm."""
LAYER_FACTOR = "layer_scalar"
"""Name of the factor on a layer's output, in models with `DecoderConfig.layer_sizes`."""
FUSED: dict[str, list[str]] = TABLES["fused"]
"""Name of a fused matrix in some checkpoints -> names of the matrices whose rows it contains, in order."""


def layer_shapes(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of layer `index`, by its Hugging Face name within the layer."""
    hidden = config.hidden_size
    linears = _delta_linears(config) if config.is_linear(index) else _attention_linears(config, index)
    for owner, inner, biased in _mlps(config, index):
        linears[f"{owner}.gate_proj"] = linears[f"{owner}.up_proj"] = (inner, hidden, biased)
        linears[f"{owner}.down_proj"] = (hidden, inner, biased)
    if config.has_experts(index):
        linears["mlp.gate"] = (config.num_experts, hidden, config.has_expert_biases)
    if config.has_experts(index) and config.shared_expert_size:
        linears["mlp.shared_expert_gate"] = (1, hidden, False)
    vectors = {f"{name}.weight": (hidden,) for name in NORMS[config.norms].values()}
    shapes: dict[str, tuple[int, ...]] = vectors | _input_shapes(config)
    for name, (rows, columns, biased) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.delta is not None and config.is_linear(index):
        return shapes | _delta_vectors(config.delta)
    if config.qk_norm:
        kv_heads, head_dim = config.head_sizes(index)
        whole = (config.num_heads * head_dim, kv_heads * head_dim) if config.is_qk_norm_whole else (head_dim, head_dim)
        normed = dict(zip("qk", whole, strict=True)) if config.source(index) == index else {"q": head_dim}
        shapes |= {f"self_attn.{which}_norm.weight": (size,) for which, size in normed.items()}
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    return shapes


def _attention_linears(config: DecoderConfig, index: int) -> dict[str, tuple[int, int, bool]]:
    """Linear layers of attention: name -> (rows, columns, whether there is a bias)."""
    hidden, (kv_heads, head_dim) = config.hidden_size, config.head_sizes(index)
    queries, keys = config.num_heads * head_dim, kv_heads * head_dim
    own = {"self_attn.k_proj": (keys, hidden, config.qkv_bias), "self_attn.v_proj": (keys, hidden, config.qkv_bias)}
    if config.source(index) != index:
        own = {}
    elif config.layer_sizes is not None and config.layer_sizes.has_key_values and config.is_full(index):
        del own["self_attn.v_proj"]
    return {
        "self_attn.q_proj": (2 * queries if config.output_gate else queries, hidden, config.qkv_bias),
        **own,
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }


def _input_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's update from per-layer embeddings, and of the factor on its output."""
    if config.layer_sizes is None:
        return {}
    hidden, size = config.hidden_size, config.layer_sizes.input_size
    inputs = {
        "per_layer_input_gate.weight": (size, hidden),
        "per_layer_projection.weight": (hidden, size),
        "post_per_layer_input_norm.weight": (hidden,),
    }
    return {LAYER_FACTOR: (1,), **(inputs if size else {})}


def input_table_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors outside layers that compute per-layer embeddings (Gemma 4); {} without
    per-layer embeddings."""
    if config.layer_sizes is None or not config.layer_sizes.input_size:
        return {}
    size = config.layer_sizes.input_size
    return {
        "model.embed_tokens_per_layer.weight": (config.layer_sizes.input_vocab, config.num_layers * size),
        "model.per_layer_model_projection.weight": (config.num_layers * size, config.hidden_size),
        "model.per_layer_projection_norm.weight": (size,),
    }


def _delta_linears(config: DecoderConfig) -> dict[str, tuple[int, int, bool]]:
    """Linear layers of a gated delta net; see `_attention_linears`."""
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    if config.has_mixed_delta:
        rows = {"qkvz": delta.channels + delta.values, "ba": 2 * delta.num_value_heads}
    else:
        rows = {"qkv": delta.channels, "z": delta.values, "b": delta.num_value_heads, "a": delta.num_value_heads}
    linears = {f"linear_attn.in_proj_{which}": (count, hidden, False) for which, count in rows.items()}
    return linears | {"linear_attn.out_proj": (hidden, delta.values, False)}


def _delta_vectors(delta: DeltaShape) -> dict[str, tuple[int, ...]]:
    return {
        "linear_attn.conv1d.weight": (delta.channels, 1, delta.kernel),
        "linear_attn.A_log": (delta.num_value_heads,),
        "linear_attn.dt_bias": (delta.num_value_heads,),
        DELTA_NORM: (delta.value_dim,),
    }


def _mlps(config: DecoderConfig, index: int) -> list[tuple[str, int, bool]]:
    """A layer's MLPs: (name, inner width, whether there are biases)."""
    if not config.has_experts(index):
        is_wide = config.layer_sizes is not None and config.layer_sizes.has_wide_mlps and config.source(index) != index
        return [("mlp", config.intermediate_size * (2 if is_wide else 1), config.mlp_bias)]
    mlps = [
        (f"mlp.experts.{expert}", config.expert_size, config.has_expert_biases) for expert in range(config.num_experts)
    ]
    return [*mlps, ("mlp.shared_expert", config.shared_expert_size, False)] if config.shared_expert_size else mlps


def as_ours(
    config: DecoderConfig,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, AnyWeight]],
    source: object,
) -> Iterator[tuple[str, AnyWeight]]:
    """Convert a checkpoint's `tensors` to the decoder's layout; yields (name, tensor). `expected`: the decoder's names
    -> shapes.

    Tensors get the decoder's names, and tensors that the decoder does not use are dropped. Fused tensors, and stacks of
    all experts, are split. Tensors with unknown names are yielded unchanged. Raises ModelFileError, naming `source`, if
    a fused tensor does not have as many rows as its parts together.
    """
    for name, tensor in taken_apart(config, _renamed(config, tensors), source):
        if name in expected:
            yield name, tensor
        elif names := _rows_of(name):
            sizes = [expected.get(part, (0,))[0] for part in names]
            if tuple(tensor.shape[:1]) != (sum(sizes),):
                raise ModelFileError(
                    f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {sum(sizes)} "
                    "rows: config and weights are of different models, fetch the model again"
                )
            yield from zip(names, cast(Any, split_rows(tensor, sizes)), strict=True)
        else:
            yield name, tensor


def _renamed(config: DecoderConfig, tensors: Iterable[tuple[str, AnyWeight]]) -> Iterator[tuple[str, AnyWeight]]:
    for name, tensor in tensors:
        if (renamed := own_name(config, name)) is not None:
            yield renamed, tensor


def own_name(config: DecoderConfig, name: str) -> str | None:
    """Return the decoder's name for the tensor `name` of a checkpoint; None if the decoder does not use this tensor."""
    if name.startswith(tuple(TABLES["left_out"].get(config.family, []))) or _is_mtp(config, name):
        return None
    for theirs, ours in TABLES["renames"].get(config.family, []):
        name = name.replace(theirs, ours)
    return None if _is_unread(config, name) else name


def _is_mtp(config: DecoderConfig, name: str) -> bool:
    number = name.removeprefix("model.layers.").partition(".")[0]
    return number.isdecimal() and 0 <= int(number) - config.num_layers < config.num_mtp_layers


def _is_unread(config: DecoderConfig, name: str) -> bool:
    """True for weights of keys and values in a layer that reads another's: some files have them."""
    number, _, own_name = name.removeprefix("model.layers.").partition(".")
    if not number.isdecimal() or int(number) >= config.num_layers or config.source(int(number)) == int(number):
        return False
    return own_name.startswith(("self_attn.k_", "self_attn.v_"))


def _rows_of(name: str) -> list[str]:
    """Names of the parts of a fused tensor; empty for other tensors."""
    owner, _, kind = name.rpartition(".")
    fused_owners = ((owner.removesuffix(fused), parts) for fused, parts in FUSED.items() if owner.endswith(f".{fused}"))
    return next(([f"{layer}{part}.{kind}" for part in parts] for layer, parts in fused_owners), [])


def gate_apart(config: DecoderConfig, parts: dict[str, AnyWeight]) -> None:
    """Split a fused projection of queries and output gate, in which each head's query rows are followed by its gate
    rows. Replaces `self_attn.q_proj` in `parts`, one layer's tensors by name, and adds `self_attn.gate`."""
    numbers = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, config.head_dim)
    for kind in [kind for kind in ("weight", "bias") if f"self_attn.q_proj.{kind}" in parts]:
        rows = parts[f"self_attn.q_proj.{kind}"]
        parts[f"self_attn.q_proj.{kind}"] = select_rows(rows, numbers[:, 0].flatten())
        parts[f"self_attn.gate.{kind}"] = select_rows(rows, numbers[:, 1].flatten())


def delta_apart(shape: DeltaShape, parts: dict[str, AnyWeight]) -> None:
    """Convert a gated delta net's input projections from Qwen3-Next's format (two matrices, rows grouped by key head)
    to Qwen3.5's (four matrices). Replaces them in `parts`, one layer's tensors by name."""
    groups, share = shape.num_key_heads, shape.num_value_heads // shape.num_key_heads

    def rows(*sizes: int) -> list[Tensor]:
        numbers = torch.arange(groups * sum(sizes)).view(groups, -1)
        return [part.flatten() for part in numbers.split(list(sizes), dim=1)]

    mixed, pair = (parts.pop(f"linear_attn.in_proj_{which}.weight") for which in ("qkvz", "ba"))
    query, key, value, gate = rows(shape.key_dim, shape.key_dim, share * shape.value_dim, share * shape.value_dim)
    beta, step = rows(share, share)
    named = {
        "qkv": select_rows(mixed, torch.cat([query, key, value])),
        "z": select_rows(mixed, gate),
        "b": select_rows(pair, beta),
        "a": select_rows(pair, step),
    }
    parts |= {f"linear_attn.in_proj_{which}.weight": weight for which, weight in named.items()}

"""Small decoders of awkward shapes for tests of the native pass, in PyTorch and natively, from the same random
weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.gguf.blocks import BlockKind, Blocks, quantise
from paceline.model.kv_cache import StaticKVCache
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.model.torch.decoder import Decoder

needs_library = pytest.mark.skipif(
    native_lib.load() is None, reason="the native library is not built: run make native, or unset PACELINE_NATIVE=0"
)
ISAS = [] if native_lib.load() is None else native_lib.require().pn_available().decode().split(",")

BASE = DecoderConfig(
    "llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    rms_norm_eps=1e-5,
)
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "llama": replace(BASE, hidden_size=50, intermediate_size=70, num_heads=4, head_dim=16),
    "llama-all-biases": replace(
        BASE,
        hidden_size=36,
        intermediate_size=45,
        num_kv_heads=3,
        head_dim=6,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    ),
    "llama3-rope-tied": replace(
        BASE, vocab_size=130, hidden_size=33, num_heads=3, num_kv_heads=1, rope_scaling=LLAMA3_ROPE, tie_embeddings=True
    ),
    "mistral-window": replace(
        BASE, family="mistral", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=40, windows=(7,) * 3
    ),
    "qwen2-biases": replace(
        BASE,
        family="qwen2",
        hidden_size=72,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        qkv_bias=True,
        tie_embeddings=True,
    ),
    "qwen2-some-windows": replace(
        BASE, family="qwen2", num_heads=2, head_dim=32, qkv_bias=True, windows=(None, 5, None)
    ),
    "qwen3-norms": replace(BASE, family="qwen3", hidden_size=40, num_heads=2, head_dim=80, qk_norm=True),
    "gemma-around": replace(
        BASE,
        family="gemma2",
        hidden_size=44,
        norms="around",
        norm_offset=1.0,
        activation="gelu_tanh",
        windows=(5, None, 5),
        ropes=("local", "main", "local"),
        local_rope_theta=500.0,
        embedding_scale=3.0,
        attention_scale=0.4,
        attention_cap=3.0,
        logit_cap=30.0,
        qk_norm=True,
        tie_embeddings=True,
    ),
    "olmo-after": replace(
        BASE,
        family="olmo2",
        hidden_size=54,
        num_heads=4,
        norms="after",
        qk_norm=True,
        is_qk_norm_whole=True,
        head_dim=10,
    ),
    "granite-scales": replace(
        BASE,
        family="granite",
        embedding_scale=2.0,
        residual_scale=0.4,
        attention_scale=0.2,
        logit_scale=0.5,
        mlp_bias=True,
    ),
    "part-rotated": replace(BASE, family="phi3", head_dim=16, rotary_dim=12, ropes=("main", "none", "main")),
    "oss-experts": replace(
        BASE,
        family="gpt-oss",
        hidden_size=64,
        num_experts=5,
        experts_per_token=2,
        expert_size=34,
        has_expert_biases=True,
        has_sinks=True,
        activation="clamped_swiglu",
        swiglu_limit=1.5,
        qkv_bias=True,
        output_bias=True,
        windows=(7, None, 7),
    ),
    "shared-expert": replace(
        BASE,
        family="qwen3-next",
        num_experts=6,
        experts_per_token=3,
        expert_size=20,
        normed_experts=False,
        shared_expert_size=28,
        dense_layers=(1,),
    ),
    "delta-nets": replace(
        BASE,
        family="qwen3-next",
        delta=DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=20, value_dim=12, kernel=4),
        linear_layers=(0, 2),
        has_mixed_delta=True,
        norm_offset=1.0,
        qk_norm=True,
        output_gate=True,
        rotary_dim=4,
    ),
}


def in_turns(shapes: Iterable[str]) -> list[tuple[str, str]]:
    """Each shape with one instruction set, by turns. Products of every set have tests of their own in
    test_native_lib.py."""
    return list(zip(shapes, cycle(ISAS), strict=False))


def use(isa: str, num_threads: int = 1) -> None:
    """Choose what the library runs on from here on."""
    native_lib.check(native_lib.require().pn_use(isa.encode()))
    native_lib.set_threads(num_threads)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Afterwards the library runs on what it ran on before."""
    library = native_lib.require()
    isa, num_threads = library.pn_in_use().decode(), library.pn_num_threads()
    yield
    use(isa, num_threads)


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """Matrices that keep their inputs' size, norms and biases away from 1 and 0, so that a lost one shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.3 * values
        elif name.endswith("bias"):
            weights[name] = 0.3 * values
        else:
            weights[name] = values if "embed" in name else values * shape[-1] ** -0.5
    return weights


def blocks_of(weights: dict[str, Tensor], kinds: tuple[BlockKind | None, ...]) -> dict[str, Tensor | Blocks]:
    """The matrices in these formats by turns; None stays dense."""
    blocks: dict[str, Tensor | Blocks] = {}
    for index, (name, tensor) in enumerate(weights.items()):
        kind = kinds[index % len(kinds)] if tensor.ndim == 2 else None
        blocks[name] = tensor if kind is None else quantised(tensor, kind)
    return blocks


def quantised(tensor: Tensor, kind: BlockKind) -> Blocks:
    """Rounded to the format; of IQ4_NL and IQ4_XS, which nothing here rounds to, random codes and factors at the same
    scale."""
    if kind not in ("IQ4_NL", "IQ4_XS"):
        blocks = quantise(tensor, kind)
        assert isinstance(blocks, Blocks)
        return blocks
    import gguf

    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng, count = np.random.default_rng(tensor.numel()), tensor.numel() // size
    data = rng.integers(0, 256 if tensor.std() else 1, (count, num_bytes), dtype=np.uint8)
    largest = tensor.reshape(count, size).abs().amax(1, keepdim=True).numpy()
    data[:, :2] = (largest / (127 if kind == "IQ4_NL" else 127 * 32)).astype(np.float16).view(np.uint8)
    return Blocks(torch.from_numpy(data.reshape(len(tensor), -1)), tuple(tensor.shape), kind)


def native_decoder(
    config: DecoderConfig, weights: dict[str, Any], dtype: torch.dtype, num_rows: int = 4
) -> NativeDecoder:
    decoder = NativeDecoder(config, weights.items(), num_rows=num_rows, max_len=128, dtype=dtype)
    native_lib.set_threads(1)
    return decoder


def twins(config: DecoderConfig, dtype: torch.dtype, num_rows: int = 4) -> tuple[Decoder, NativeDecoder]:
    """The PyTorch decoder and the native one."""
    weights = random_weights(config)
    reference = Decoder(config, weights.items(), num_rows=num_rows, max_len=128, dtype=dtype)
    return reference, native_decoder(config, weights, dtype, num_rows)


def tokens_of(config: DecoderConfig, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(config.vocab_size), k=length)


def story(config: DecoderConfig, seed: int = 0) -> Iterator[ForwardBatch | tuple[int, int]]:
    """Passes, and rollbacks (row, length), over the four rows of a cache: chunks, rows out of order, refused drafts."""
    rng, length = random.Random(seed), [0] * 4

    def batch(rows: list[int], counts: list[int], logits: Literal["all", "last", "none"] = "all") -> ForwardBatch:
        starts = [length[row] for row in rows]
        for row, count in zip(rows, counts, strict=True):
            length[row] += count
        return ForwardBatch(rows, starts, counts, rng.choices(range(config.vocab_size), k=sum(counts)), logits)

    yield batch([2], [40], "none")
    yield batch([0], [11], "last")
    yield batch([3, 0, 2], [1, 4, 9])
    for row, refused in ((0, 3), (2, 8)):
        length[row] -= refused
        yield row, length[row]
    yield batch([2, 1, 3], [1, 17, 3], "last")
    yield batch([0, 3, 1, 2], [5, 1, 2, 8])
    length[3] = 2
    yield 3, 2
    yield batch([3, 2], [19, 1])
    yield batch([1], [1])


def tell(target: Decoder | NativeDecoder, seed: int = 0, only_argmax: bool = False) -> list[ForwardOutput]:
    """Run a story on an empty cache; outputs are copies."""
    while target.cache.allocate() is not None:
        pass
    target.cache.rollback(list(range(4)), [0] * 4)
    outputs = []
    for step in story(target.config, seed):
        if isinstance(step, tuple):
            target.cache.rollback([step[0]], [step[1]])
        else:
            out = target.forward(replace(step, only_argmax=only_argmax))
            outputs.append(ForwardOutput(_copy(out.logits_TV), _copy(out.taps_TF), out.argmax_T))
    return outputs


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def in_order(cache: StaticKVCache) -> tuple[Tensor, Tensor]:
    """Views of the native cache's keys and values whose elements stand as [layers, rows, kv_heads, positions,
    head_dim].

    The order of paceline/model/native/kernels.h: sixteen positions' keys side by side, element by element; bfloat16 in
    pairs, of a key's elements and of a value's positions.
    """
    *outer, positions, head_dim = cache.keys.shape
    pair = 2 if cache.keys.dtype == torch.bfloat16 else 1
    keys = cache.keys.view(*outer, positions // 16, head_dim // pair, 16, pair).movedim(-2, -3)
    return keys, cache.values.view(*outer, positions // pair, head_dim, pair).movedim(-1, -2)


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Equal as numbers are too little: -0 is not 0, and a NaN is itself."""
    if left is None or right is None:
        return left is right
    kind = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    return left.dtype == right.dtype and left.shape == right.shape and bool((left.view(kind) == right.view(kind)).all())

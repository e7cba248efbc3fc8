"""GGUF files (llama.cpp's format): metadata to DecoderConfig, quantised blocks to float32, vocabulary to a tokenizer.

Parsing and dequantising are the `gguf` package's; ours are the names, the row order of Llama's rope, and the tokenizer.
Called by `checkpoint.py` and `tokenizer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.blocks import BlockKind, Blocks, Weight
from paceline.model.config import DecoderConfig
from paceline.model.rope import check_rope

if TYPE_CHECKING:
    import tokenizers

ARCHITECTURES = ("llama", "qwen2", "qwen3")
BLOCK_KINDS: dict[Quant, BlockKind] = {Quant.Q8_0: "Q8_0", Quant.Q4_1: "Q4_1"}
QUANTS = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q4_K, Quant.Q6_K)

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_SPLITS = {"qwen2": f"{_CONTRACTIONS}|{_WORDS % ''}", "llama-bpe": f"{_CONTRACTIONS}|{_WORDS % '{1,3}'}"}
"""Word-splitting patterns of the pre-tokenizers that have one of their own, as in their tokenizer.json."""


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The parsed file, its tensors memory-mapped. Raises ModelFileError when it is truncated or no GGUF."""
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, MemoryError) as error:
        raise ModelFileError(f"{path} is no whole GGUF file ({error}): delete it and fetch it again") from error


def read_metadata(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """One metadata value, or the default when the file has no such key or it cannot be read."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def load_config(path: Path) -> DecoderConfig:
    """The model's shape from GGUF metadata. Raises UnsupportedModelError or ModelFileError, naming the key."""
    reader = open_gguf(path)
    arch = read_metadata(reader, "general.architecture")
    if arch not in ARCHITECTURES or read_metadata(reader, f"{arch}.expert_count", 0):
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {arch!r}{'' if arch not in ARCHITECTURES else ' with experts'} is not implemented "
            f"(known: {', '.join(ARCHITECTURES)}): the Transformers fallback runs the model from its safetensors folder"
        )
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    if "token_embd.weight" not in shapes or "blk.0.attn_q.weight" not in shapes:
        raise ModelFileError(
            f"{path} holds no token_embd.weight or no layers: fetch the model's own file, not its vocabulary or a part of it"
        )

    def number(key: str, default: Any = None) -> Any:
        value = read_metadata(reader, f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelFileError(
                f"{path}: GGUF key {arch}.{key} must be a positive number (got {value!r}): fetch the model again"
            )
        return value

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    num_layers, max_position = number("block_count"), number("context_length")
    head_dim = number("attention.key_length", number("rope.dimension_count", hidden_size // num_heads))
    window = read_metadata(reader, f"{arch}.attention.sliding_window")
    return DecoderConfig(
        family=arch,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_shortest(number("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(number("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(reader, arch, max_position),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        windows=(window,) * num_layers if window else (),
        eos_token_ids=eos_token_ids(reader),
        bos_token_id=read_metadata(reader, "tokenizer.ggml.bos_token_id"),
    )


@overload
def load_tensors(path: Path) -> Iterator[tuple[str, Tensor]]: ...
@overload
def load_tensors(path: Path, keep_blocks: bool) -> Iterator[tuple[str, Weight]]: ...
def load_tensors(path: Path, keep_blocks: bool = False) -> Iterator[tuple[str, Weight]]:
    """(Hugging Face name, float32 tensor), one at a time, in the file's order.

    With `keep_blocks` matrices in Q8_0 and Q4_1 stay as they are; other quantisations are expanded all the same.
    """
    reader = open_gguf(path)
    arch = read_metadata(reader, "general.architecture")
    num_heads = read_metadata(reader, f"{arch}.attention.head_count")
    num_kv_heads = read_metadata(reader, f"{arch}.attention.head_count_kv", num_heads)
    for stored in reader.tensors:
        if stored.name == ROPE_FACTORS:
            continue
        is_kept = keep_blocks and len(stored.shape) == 2 and stored.tensor_type in BLOCK_KINDS
        tensor = _blocks(stored) if is_kept else _dequantise(stored, path)
        name = _hf_name(stored.name, path)
        if arch == "llama" and ".self_attn.q_proj." in name:
            tensor = half_split_rows(tensor, num_heads)
        elif arch == "llama" and ".self_attn.k_proj." in name:
            tensor = half_split_rows(tensor, num_kv_heads)
        yield name, tensor


def half_split_rows(tensor: Weight, num_heads: int) -> Weight:
    """Undo convert_hf_to_gguf's `permute`: in a head, ggml's rope pairs neighbouring rows, Hugging Face's the two halves."""
    if isinstance(tensor, Blocks):
        return replace(tensor, data=_half_split(tensor.data, num_heads))
    return _half_split(tensor, num_heads)


def _half_split(tensor: Tensor, num_heads: int) -> Tensor:
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def eos_token_ids(reader: gguf.GGUFReader) -> tuple[int, ...]:
    """End of text, of turn and of message, where the file names them."""
    ids = (read_metadata(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def build_tokenizer(reader: gguf.GGUFReader, path: Path) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer equal to the one the GGUF file was made from.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer we do not know, ModelFileError when a table is missing.
    """
    model = read_metadata(reader, "tokenizer.ggml.model")
    tokens = read_metadata(reader, "tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(f"{path} holds no tokenizer.ggml.tokens: fetch a GGUF file with its vocabulary")
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(reader, tokens, path)
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(reader, tokens, path), True
    else:
        raise UnsupportedModelError(
            f"{path}: GGUF tokenizer {model!r} is not implemented (known: gpt2, llama): use the model's folder instead"
        )
    _add_special_tokens(backend, tokens, read_metadata(reader, "tokenizer.ggml.token_type", []))
    _add_post_processor(backend, reader, tokens, adds_bos)
    return backend


def _byte_level_bpe(reader: gguf.GGUFReader, tokens: list[str], path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE with the file's word splitting, and whether such models start with a bos token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = read_metadata(reader, "tokenizer.ggml.pre", "default")
    merges = read_metadata(reader, "tokenizer.ggml.merges")
    if not merges:
        raise ModelFileError(f"{path} holds no tokenizer.ggml.merges: fetch a GGUF file with its vocabulary")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    backend.decoder = decoders.ByteLevel()
    if pre in PRE_SPLITS:
        split = pre_tokenizers.Split(Regex(PRE_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise UnsupportedModelError(
            f"{path}: GGUF pre-tokenizer {pre!r} is not implemented (known: smollm, qwen2, llama-bpe, gpt-2): "
            "use the model's folder instead"
        )
    return backend, pre == "llama-bpe"


def _sentencepiece_bpe(reader: gguf.GGUFReader, tokens: list[str], path: Path) -> tokenizers.Tokenizer:
    """Llama 1/2's SentencePiece BPE: GGUF keeps no merges, so every split of a piece into two pieces becomes one, by score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = read_metadata(reader, "tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelFileError(f"{path} holds no tokenizer.ggml.scores for its tokens: fetch a GGUF file with its vocabulary")
    types = read_metadata(reader, "tokenizer.ggml.token_type", [])
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token: index for token, index in vocab.items() if index >= len(types) or types[index] == NORMAL}
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges_by_score(pieces, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if read_metadata(reader, "tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        after.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(after)
    return backend


def _merges_by_score(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All (left, right) whose union is a piece, best score first; Transformers' `generate_merges` orders ties this way too."""
    ranked = []
    for piece, index in pieces.items():
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in pieces and piece[at:] in pieces]
        ranked += [(-scores[index], index, pieces[left], pieces[right], left, right) for left, right in splits]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )


def _add_post_processor(backend: tokenizers.Tokenizer, reader: gguf.GGUFReader, tokens: list[str], adds_bos: bool) -> None:
    """Wrap encoded text in bos and eos where the file asks for it."""
    from tokenizers import processors

    wrap = {}
    for kind, default in (("bos", adds_bos), ("eos", False)):
        index = read_metadata(reader, f"tokenizer.ggml.{kind}_token_id")
        if index is not None and read_metadata(reader, f"tokenizer.ggml.add_{kind}_token", default):
            wrap[kind] = (tokens[index], index)
    if wrap:
        single = [wrap[kind][0] if kind in wrap else None for kind in ("bos", "eos")]
        template = [piece for piece in (single[0], "$A", single[1]) if piece]
        backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=list(wrap.values()))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _hf_name(name: str, path: Path) -> str:
    base, _, kind = name.rpartition(".")
    if base in NAMES:
        return f"{NAMES[base]}.{kind}"
    parts = base.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{kind}"
    raise UnsupportedModelError(
        f"{path}: tensor {name!r} belongs to no model we know: use the model's safetensors folder instead"
    )


def _dequantise(stored: gguf.ReaderTensor, path: Path) -> Tensor:
    if stored.tensor_type not in QUANTS:
        raise UnsupportedModelError(
            f"{path}: quantisation {stored.tensor_type.name} of {stored.name!r} is not implemented "
            f"(known: {', '.join(quant.name for quant in QUANTS)}): fetch the model in one of these"
        )
    shape = tuple(int(size) for size in reversed(stored.shape))
    values = gguf.dequantize(stored.data, stored.tensor_type).reshape(shape)
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped read-only


def _blocks(stored: gguf.ReaderTensor) -> Blocks:
    shape = tuple(int(size) for size in reversed(stored.shape))
    data = torch.from_numpy(np.array(stored.data, dtype=np.uint8)).reshape(shape[0], -1)
    return Blocks(data, shape, BLOCK_KINDS[stored.tensor_type])


def _rope_scaling(reader: gguf.GGUFReader, arch: str, max_position: int) -> dict[str, Any] | None:
    factors = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is not None:
        scaling: dict[str, Any] = {"rope_type": "factors", "factors": [float(value) for value in factors.data]}
    else:
        scaling = {"rope_type": read_metadata(reader, f"{arch}.rope.scaling.type", "none")}
        if scaling["rope_type"] in ("none", "default"):
            return None
        scaling["factor"] = read_metadata(reader, f"{arch}.rope.scaling.factor")
        if scaling["rope_type"] == "yarn":
            scaling["original_max_position_embeddings"] = read_metadata(
                reader, f"{arch}.rope.scaling.original_context_length", max_position
            )
            for key in ("beta_fast", "beta_slow"):
                scaling[key] = read_metadata(reader, f"{arch}.rope.scaling.yarn_{key}")
    check_rope(scaling)
    return scaling


def _shortest(value: float) -> float:
    """The decimal a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(np.format_float_scientific(np.float32(value))) if math.isfinite(value) else value

"""Reads GGUF files as models. Metadata become config.json, quantised blocks become float32 tensors under Hugging Face
names, and the vocabulary becomes a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError, reraised
from paceline.model.config.values import MAX_SIZE, TABLES
from paceline.model.gguf.blocks import BLOCK_KINDS, BlockKind, Blocks, Weight
from paceline.model.gguf.by_layer import first_of_lists, keys_by_layer, window_keys
from paceline.model.gguf.container import GGUFFile, StoredTensor, open_gguf
from paceline.model.gguf.limits import refuse_unread
from paceline.model.gguf.package import gguf_package

GGUF: dict[str, dict[str, Any]] = TABLES["gguf"]
ARCHITECTURES = GGUF["architectures"]
"""llama.cpp's name of a model family -> its properties, such as the class name in config.json."""
NAMES, LAYER_NAMES = GGUF["model"], GGUF["layer"]
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
KINDS_BY_NAME: dict[str, BlockKind] = {kind: kind for kind in BLOCK_KINDS}
HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def config_json(path: Path) -> dict[str, Any]:
    """Build a config.json, as a dict, from the GGUF file's metadata. Raises UnsupportedModelError or ModelFileError,
    naming the metadata key."""
    listed = open_gguf(path)
    arch, name = _architecture(listed)
    known, has_experts = ARCHITECTURES[arch], bool(listed.get(f"{arch}.expert_count", int))
    refuse_unread(listed, arch)
    file = first_of_lists(listed, arch, may_differ=known.get("by_layer", False))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or "blk.0.attn_output.weight" not in file.tensors:
        raise ModelFileError(
            f"{path} holds no token_embd.weight or no layers: fetch the model's own file, not its vocabulary or a "
            "part of it"
        )
    num_layers = _count(file, f"{arch}.block_count")
    if f"blk.{num_layers - 1}.attn_output.weight" not in file.tensors:
        raise ModelFileError(
            f"{path} has not the {num_layers} layers of its {arch}.block_count: fetch the whole model again"
        )
    counts = GGUF["counts"] | (known.get("counts", {}) if has_experts else {})
    fractions = GGUF["fractions"] | known.get("fractions", {})
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": TABLES["families"][name]["family"],
        "vocab_size": embedding.shape[0],
        "num_hidden_layers": num_layers,
        "num_key_value_heads": _count(file, f"{arch}.attention.head_count_kv", f"{arch}.attention.head_count"),
        "hidden_act": "silu",
        **{field: _count(file, f"{arch}.{key}") for field, key in counts.items()},
        **{field: decimal(file.get(f"{arch}.{key}", float)) for field, key in fractions.items()},
        **{field: tensor in file.tensors for field, tensor in GGUF["biases"].items()},
        "rope_scaling": _rope_scaling(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **window_keys(file, arch, TABLES["families"][name]["traits"].get("windows")),
        **known.get("values", {}),
    }
    values |= _heads(file, arch, values)
    if known.get("by_layer"):
        values |= keys_by_layer(listed, arch, ROPE_FACTORS)
    return {field: value for field, value in values.items() if value is not None}


def _architecture(file: GGUFFile) -> tuple[str, str]:
    """(llama.cpp's name of the family, class name for config.json)."""
    arch = file.get("general.architecture", str) or ""
    known, has_experts = ARCHITECTURES.get(arch), bool(file.get(f"{arch}.expert_count", int))
    if known is None or (has_experts and "with_experts" not in known):
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {arch!r:.80}{' with experts' if known else ''} is not implemented "
            f"(known: {', '.join(ARCHITECTURES)}): the Transformers fallback runs the model from its safetensors folder"
        )
    has_window = bool(file.get(f"{arch}.attention.sliding_window", int)) and "with_window" in known
    return arch, known["with_experts"] if has_experts else known["with_window"] if has_window else known["class"]


def _heads(file: GGUFFile, arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """Size of heads, the rotated share of them, and the attention scale if it differs from the default."""
    whole = values["hidden_size"] // values["num_attention_heads"]
    given, rotated = file.get(f"{arch}.attention.key_length", int), file.get(f"{arch}.rope.dimension_count", int)
    if arch == "phi3":
        head_dim = given or whole
        return {"head_dim": head_dim, "partial_rotary_factor": rotated / head_dim if rotated else None}
    head_dim = given or rotated
    if "largest" not in ARCHITECTURES[arch]:
        return {"head_dim": head_dim}
    is_largest = values["num_hidden_layers"] == ARCHITECTURES[arch]["largest"]
    return {"head_dim": head_dim, "query_pre_attn_scalar": whole if is_largest else head_dim}


def _count(file: GGUFFile, *keys: str) -> int:
    """Value of the first of these keys that the file has. Raises ModelFileError unless it is positive."""
    value = next((value for key in keys if (value := file.get(key, int)) is not None), None)
    if value is None or not 0 < value <= MAX_SIZE:
        raise ModelFileError(
            f"{file.path}: GGUF key {keys[0]} must be a positive number (got {value!r}): fetch the model again"
        )
    return value


def decimal(value: float | None) -> float | None:
    """Return the shortest decimal that rounds to the same float32 as `value`: 1e-05, not 9.999999747378752e-06."""
    return None if value is None else float(np.format_float_scientific(np.float32(value)))


def load_tensors(path: Path, keep_blocks: bool = False) -> Iterator[tuple[str, Weight]]:
    """Yield (Hugging Face name, tensor) for the tensors of the GGUF file `path`, in file order, as float32. A stack of
    all experts is split into one matrix per expert. RoPE factors are left out, because `config_json` returns them.

    With `keep_blocks`, matrices keep their format: quantised ones are yielded as Blocks, float16 and bfloat16 ones in
    their dtype. Exception: quantised matrices that the native library cannot multiply become float32, with a warning.
    """
    file = open_gguf(path)
    arch = _architecture(file)[0]
    heads_key, known, permuted = f"{arch}.attention.head_count", ARCHITECTURES[arch], dict[str, int]()
    if known.get("is_permuted"):
        single = first_of_lists(file, arch, may_differ=False)
        permuted = {"q_proj": _count(single, heads_key), "k_proj": _count(single, f"{heads_key}_kv", heads_key)}
    expanded: set[str] = set()
    for stored in file.tensors.values():
        if stored.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            continue
        name = _hf_name(stored.name, path, known.get("layer", {}))
        kind = KINDS_BY_NAME.get(stored.kind.name)
        is_kept = keep_blocks and len(stored.shape) > 1
        if is_kept and kind:
            tensor = Blocks(torch.from_numpy(file.read(stored)), stored.shape, kind)
        elif is_kept and stored.kind.name in HALVES:
            tensor = torch.from_numpy(file.read(stored)).view(HALVES[stored.kind.name])
        else:
            tensor = _dequantise(file, stored)
            expanded |= {stored.kind.name} - {"F32", "F16", "BF16"} if keep_blocks else set()
        heads = permuted.get(name.split(".")[-2])
        if heads is not None:
            if tensor.shape[0] % (2 * heads):
                raise ModelFileError(f"{path}: the rows of {stored.name!r} are no {heads} heads: fetch the model again")
            tensor = half_split_rows(tensor, heads)
        if name.endswith("norm.weight") and isinstance(tensor, Tensor):
            tensor = tensor - known.get("norm_offset", 0.0)
        yield from _each(name, tensor, path)
    if expanded:
        warnings.warn(
            f"{path}: weights in {', '.join(sorted(expanded))} are expanded, which takes several times the memory and "
            f"time; as they are go {', '.join(BLOCK_KINDS)}",
            stacklevel=2,
        )


def _each(name: str, tensor: Weight, path: Path) -> Iterator[tuple[str, Weight]]:
    """Yield the tensor, or one matrix per expert if it stacks those of all experts."""
    before, is_stack, behind = name.partition("*")
    if not is_stack:
        yield name, tensor
        return
    if len(tensor.shape) != 3:
        raise ModelFileError(f"{path}: tensor {name!r} is no stack of experts' matrices: fetch the model again")
    parts = tensor.data if isinstance(tensor, Blocks) else tensor
    for expert, rows in enumerate(parts):
        yield (
            f"{before}{expert}{behind}",
            replace(tensor, data=rows, shape=tensor.shape[1:]) if isinstance(tensor, Blocks) else rows,
        )


def half_split_rows(tensor: Weight, num_heads: int) -> Weight:
    """Reorder the rows of a query or key projection from ggml's order to Hugging Face's (undoes `permute` of
    llama.cpp's convert_hf_to_gguf.py).

    RoPE rotates pairs of rows within a head. In ggml a pair is two adjacent rows; in Hugging Face's order the first
    half of the head pairs with the second half.
    """
    if isinstance(tensor, Blocks):
        return replace(tensor, data=half_split_rows(tensor.data, num_heads))
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _hf_name(name: str, path: Path, others: dict[str, str]) -> str:
    """Hugging Face name of a tensor. `others`: layer tensors that have other names in this family."""
    base, _, kind = name.rpartition(".")
    if base in NAMES:
        return f"{NAMES[base]}.{kind}"
    parts = base.split(".")
    own = LAYER_NAMES | GGUF["experts"] | others
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in own:
        return f"model.layers.{parts[1]}.{own[parts[2]]}.{kind}"
    raise UnsupportedModelError(
        f"{path}: tensor {name!r} belongs to no model we know: use the model's safetensors folder instead"
    )


def tensor_of(file: GGUFFile, stored: StoredTensor) -> Tensor:
    """Read one tensor: float16, bfloat16 and int64 keep their type, others are dequantised to float32."""
    dtype = (HALVES | {"I64": torch.int64}).get(stored.kind.name)
    return _dequantise(file, stored) if dtype is None else torch.from_numpy(file.read(stored)).view(dtype)


def _dequantise(file: GGUFFile, stored: StoredTensor) -> Tensor:
    unknown = f"{file.path}: quantisation {stored.kind.name} of {stored.name!r} is not implemented"
    remedy = f"fetch the model in one of {', '.join(BLOCK_KINDS)}"
    with reraised(UnsupportedModelError, unknown, remedy, NotImplementedError):
        values = gguf_package().dequantize(file.read(stored), stored.kind)
    return torch.from_numpy(values).reshape(stored.shape)


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    factors, prefix = file.tensors.get(ROPE_FACTORS), f"{arch}.rope.scaling"
    if factors is not None:
        return {"rope_type": "factors", "factors": _dequantise(file, factors).flatten().tolist()}
    rope_type = file.get(f"{prefix}.type", str)
    long, short = file.tensors.get(LONG_FACTORS), file.tensors.get(SHORT_FACTORS)
    scaling: dict[str, Any] = {name: file.get(f"{prefix}.{key}", float) for name, key in GGUF["rope_scaling"].items()}
    scaling["original_max_position_embeddings"] = file.get(f"{prefix}.original_context_length", int)
    if long is not None and short is not None:
        rope_type = "longrope"
        scaling |= {"long_factor": _dequantise(file, long).flatten().tolist()}
        scaling |= {"short_factor": _dequantise(file, short).flatten().tolist()}
        scaling["attention_factor"] = file.get(f"{prefix}.attn_factor", float)
    if scaling["factor"] is None:  # the key of old files without rope types
        scaling["factor"] = file.get(f"{arch}.rope.scale_linear", float)
    if rope_type is None and scaling["factor"] not in (None, 0.0, 1.0):
        rope_type = "linear"  # llama.cpp's default for a factor without a type
    if rope_type in (None, "none"):
        return None
    return {"rope_type": rope_type} | {key: value for key, value in scaling.items() if value is not None}


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
PRE_SPLITS = GGUF["pre_splits"]
"""Pre-tokenizer (`tokenizer.ggml.pre`) -> its patterns for splitting text into words, as in tokenizer.json."""
AS_LLAMA: dict[str, str] = dict.fromkeys(("dbrx", "smaug-bpe"), "llama-bpe")
"""Pre-tokenizers (of OLMo 2, Phi-4 and SmolLM3) that split words as Llama 3's does. Unlike Llama 3, these models apply
merges even to a word that is itself a token."""

MAX_TOKEN_LENGTH = 512
"""Maximum characters of a token; the longest known have some two hundred."""
END_KINDS = ("eos", "eot", "eom")
"""Metadata names of the tokens that end an answer: end of text, of turn and of message."""
TURN_ENDS: dict[str, list[str]] = GGUF["ends_of_turns"]
"""Prefix of a family's name -> tokens that end an answer of its chat models; a file may name only the end of text."""


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, tuple[int, ...]]:
    """Build a tokenizer from GGUF metadata; returns (tokenizer of the `tokenizers` library, token ids that end an
    answer).

    Raises UnsupportedModelError for an unknown tokenizer model or pre-tokenizer, ModelFileError if a table is missing
    or an id is out of range.
    """
    model = file.get("tokenizer.ggml.model", str)
    tokens, types = file.array("tokenizer.ggml.tokens", str), file.array("tokenizer.ggml.token_type", int)
    if not tokens:
        raise ModelFileError(f"{file.path} holds no tokenizer.ggml.tokens: fetch a GGUF file with its vocabulary")
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"{file.path}: GGUF tokenizer {model!r:.80} is not implemented (known: gpt2, llama, gemma4): use the "
            "model's folder instead"
        )
    if len(types) not in (0, len(tokens)) or max(map(len, tokens)) > MAX_TOKEN_LENGTH:
        raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens and their types are damaged: fetch the model again")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    # The library raises plain Exception on inconsistent tables.
    with reraised(ModelFileError, f"{file.path}: its tokenizer is damaged", "fetch the model again", Exception):
        if model == "gpt2":
            backend, adds_bos = _byte_level_bpe(file, vocab)
        else:
            backend, adds_bos = _sentencepiece_bpe(file, vocab, tokens, types), True
        special = [pair for pair in zip(tokens, types, strict=False) if pair[1] in (CONTROL, USER_DEFINED, UNKNOWN)]
        arch, add = file.get("general.architecture", str), partial(AddedToken, normalized=False)
        kept = GGUF["unstripped"].get(f"{model} {arch}", vocab)
        backend.add_tokens([add(text, special=kind != USER_DEFINED, rstrip=text not in kept) for text, kind in special])
        _add_post_processor(backend, file, tokens, adds_bos)
    return backend, _ends(file, vocab, types)


def special_token(file: GGUFFile, kind: str) -> int | None:
    """Return the id of the special token `kind`, such as bos, eos or unknown; None if the file's metadata has no id for
    it. Raises ModelFileError if the id is out of range."""
    key = f"tokenizer.ggml.{kind}_token_id"
    token, num_tokens = file.get(key, int), file.length("tokenizer.ggml.tokens")
    if token is not None and not 0 <= token < num_tokens:
        raise ModelFileError(f"{file.path}: {key} {token} is none of its {num_tokens} tokens: fetch the model again")
    return token


def _ends(file: GGUFFile, vocab: dict[str, int], types: list[int]) -> tuple[int, ...]:
    """Ids that the file names as an end and, for chat models, those that its family implies."""
    named = [special_token(file, kind) for kind in END_KINDS]
    ids = [token for token in named if token is not None]
    arch, chat = file.get("general.architecture", str) or "", file.get("tokenizer.chat_template", str) or ""
    ends = next((ends for family, ends in TURN_ENDS.items() if arch.startswith(family)), [])
    tokens = [vocab[text] for text in ends if text in vocab]
    if ends and ends[0] in chat and (set(ids) & set(tokens) or not arch.startswith("qwen")):
        ids += [token for token in tokens if token < len(types) and types[token] == CONTROL]
    return tuple(dict.fromkeys(ids))


def _byte_level_bpe(file: GGUFFile, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """(GPT-2's byte-level BPE with the file's word splitting, whether texts start with a bos token by default)."""
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    merges = _stored_merges(file)
    if not merges:
        raise ModelFileError(f"{file.path} holds no tokenizer.ggml.merges: fetch a GGUF file with its vocabulary")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    backend.decoder = decoders.ByteLevel()
    pattern = PRE_SPLITS.get(AS_LLAMA.get(pre, pre))
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif pre in ("smollm", "refact"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise UnsupportedModelError(
            f"{file.path}: GGUF pre-tokenizer {pre!r:.80} is not implemented (known: smollm, refact, gpt-2, "
            f"{', '.join([*PRE_SPLITS, *AS_LLAMA])}): use the model's folder instead"
        )
    return backend, pre == "llama-bpe"


def _stored_merges(file: GGUFFile) -> list[tuple[str, str]]:
    texts = file.array("tokenizer.ggml.merges", str)
    return [(left, right) for left, _, right in (text.partition(" ") for text in texts)]


def _sentencepiece_bpe(file: GGUFFile, vocab: dict[str, int], tokens: list[str], types: list[int]) -> Tokenizer:
    """Llama 1/2's SentencePiece BPE: GGUF stores no merges, so every split of a piece into two pieces becomes one, by
    score. Gemma 4's is the same with merges."""
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"{file.path} holds no tokenizer.ggml.scores for its tokens: fetch a GGUF file with its vocabulary"
        )
    is_merged = file.get("tokenizer.ggml.model", str) == "gemma4"
    pieces = {token: index for token, index in vocab.items() if index >= len(types) or types[index] == NORMAL}
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == UNKNOWN), None)
    merges = _stored_merges(file) if is_merged else _merges_by_score(pieces, scores)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    bars = normalizers.Replace(" ", "▁")
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool) is not False:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), bars])
        after.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = bars
    backend.decoder = decoders.Sequence(after)
    return backend


def _merges_by_score(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All (left, right) whose concatenation is a piece, best score first, ordered as Transformers'
    `generate_merges`."""
    scored = []
    for piece, index in pieces.items():
        splits = [
            (piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in pieces and piece[at:] in pieces
        ]
        scored += [(-scores[index], index, pieces[left], pieces[right], left, right) for left, right in splits]
    return [(left, right) for *_, left, right in sorted(scored)]


def _add_post_processor(backend: Tokenizer, file: GGUFFile, tokens: list[str], adds_bos: bool) -> None:
    """Wrap encoded text in bos and eos as the file specifies."""
    wrap = {}
    for kind, default in (("bos", adds_bos), ("eos", False)):
        index, is_added = special_token(file, kind), file.get(f"tokenizer.ggml.add_{kind}_token", bool)
        if index is not None and (default if is_added is None else is_added):
            wrap[kind] = (tokens[index], index)
    if wrap:
        single = [wrap[kind][0] if kind in wrap else None for kind in ("bos", "eos")]
        template = [piece for piece in (single[0], "$A", single[1]) if piece]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=list(wrap.values())
        )

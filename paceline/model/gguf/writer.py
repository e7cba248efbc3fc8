"""Converts a Transformers folder to a GGUF file with quantised blocks, by the `gguf` package.

    write_gguf(Path("student"), resolve("smollm2-135m"), Path("student-q4_1.gguf"), "q4_1")

Everything except weights and the number of layers (tokenizer, chat template, RoPE, head counts) is copied from a GGUF
file of the same family, such as the model a student was trained from. `to_folder.py` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model import checkpoint
from paceline.model.gguf.container import is_gguf
from paceline.model.gguf.metadata import LAYER_NAMES, NAMES
from paceline.model.gguf.package import copy_keys, finish, gguf_package
from paceline.runs.folder import whole_file

if TYPE_CHECKING:
    import gguf
    from gguf import GGMLQuantizationType as Quant

FORMATS = {"q8_0": "MOSTLY_Q8_0", "q4_1": "MOSTLY_Q4_1", "bf16": "MOSTLY_BF16", "f32": "ALL_F32"}
"""Weight format -> llama.cpp's name of the file type, stored in the file's metadata."""
Format = Annotated[str, tuple(FORMATS)]
WRITTEN = ("llama", "qwen2", "qwen3")
"""Model families that can be written, by llama.cpp's names."""
OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version", "general.name")
_TOP = {ours: theirs for theirs, ours in NAMES.items()}
_LAYER = {ours: theirs for theirs, ours in LAYER_NAMES.items()}


def write_gguf(folder: Path, like: Path, target: Path, form: str = "q8_0", embedding: str | None = None) -> Path:
    """Convert the model in `folder` to a GGUF file `target`; returns `target`. `like`: a GGUF file of the same model
    family, from which tokenizer and metadata are copied.

    - `form`: format of matrices: q8_0, q4_1, bf16 or f32. Vectors are always f32.
    - `embedding`: format of embedding and head; None: `form`.
    - A tensor whose values did not change, compared with `like` after rounding to bfloat16, is copied from `like` in
      the format that it has there.
    - Never copied: query and key projections of Llama models, and embedding and head if `embedding` is another format.

    Raises UnsupportedModelError if `like` is not a GGUF file or has another architecture or other sizes, if a format or
    the architecture cannot be written, or if a matrix's rows do not divide into blocks; CacheError if writing fails.
    """
    for each in (form, embedding or form):
        if each not in FORMATS:
            raise UnsupportedModelError(f"GGUF format {each!r} is not written: choose one of {', '.join(FORMATS)}")
    if not is_gguf(like):
        raise UnsupportedModelError(
            f"{like} is no GGUF file whose tokenizer could be copied: convert {folder} with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    config = _same_model(folder, like)
    ggml = gguf_package()
    reader = ggml.GGUFReader(like)
    arch = reader.fields["general.architecture"].contents()
    if arch not in WRITTEN:
        raise UnsupportedModelError(
            f"GGUF files of {arch} models are read, not written ({', '.join(WRITTEN)} are): "
            f"convert {folder} with llama.cpp's convert_hf_to_gguf.py"
        )
    with whole_file(target, "free space or choose another --out") as scratch:
        writer = ggml.GGUFWriter(scratch, arch)
        keys = [key for key in reader.fields if not key.startswith("GGUF.") and key not in OWN_KEYS]
        copy_keys(reader, writer, keys, {f"{arch}.block_count": config.num_layers})
        writer.add_name(target.stem)
        writer.add_file_type(ggml.LlamaFileType[FORMATS[form]])
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if arch == "llama" else {}
        of_ends = _quant(embedding) if embedding else None
        kinds = {"embed_tokens": of_ends, "lm_head": of_ends}
        for stored_name, values, kind in _stored(folder, reader, _quant(form), kinds, heads):
            writer.add_tensor(stored_name, values, raw_dtype=kind)
        finish(writer)
    return target


def _quant(form: str) -> Quant:
    return gguf_package().GGMLQuantizationType[form.upper()]


def _same_model(folder: Path, like: Path) -> Any:
    """The folder's config. Raises UnsupportedModelError if more than the number of layers differs from the file's."""
    ours, theirs = checkpoint.load_config(folder), checkpoint.load_config(like)
    for name in ("family", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        if getattr(ours, name) != getattr(theirs, name):
            raise UnsupportedModelError(
                f"{folder} has {name} {getattr(ours, name)}, {like} has {getattr(theirs, name)}: give a GGUF file of "
                "the same model, or convert the folder with llama.cpp's convert_hf_to_gguf.py"
            )
    return ours


def _stored(
    folder: Path, reader: gguf.GGUFReader, form: Quant, kinds: dict[str, Quant | None], heads: dict[str, int]
) -> Iterator[tuple[str, np.ndarray[Any, Any], Quant]]:
    """Yield (name, data, type) of every tensor of the file."""
    ggml, before = gguf_package(), {stored.name: stored for stored in reader.tensors}
    config = checkpoint.load_config(folder)
    for name, tensor in checkpoint.check_tensors(config, checkpoint.load_tensors(folder), folder):
        stored_name, own = gguf_name(name), name.split(".")[-2]
        rows = interleaved_rows(tensor, heads[own]) if own in heads else tensor
        values = np.ascontiguousarray(rows.float().numpy())
        old = before.get(stored_name)
        requested = kinds.get(own)
        if old is not None and own not in heads and requested in (None, old.tensor_type) and _is_same(old, values):
            yield stored_name, old.data, old.tensor_type
            continue
        own_kind = _quant("f32") if values.ndim == 1 else requested or form
        block = ggml.GGML_QUANT_SIZES[own_kind][0]
        if values.shape[-1] % block:
            raise UnsupportedModelError(
                f"rows of {name} hold {values.shape[-1]} numbers, no whole blocks of {block}: write this model as bf16"
            )
        yield stored_name, ggml.quantize(values, own_kind), own_kind
    factors = before.get("rope_freqs.weight")
    if factors is not None:
        yield factors.name, factors.data, factors.tensor_type


def _is_same(stored: Any, values: np.ndarray[Any, Any]) -> bool:
    """True if a stored tensor equals these numbers, exactly or after rounding to bfloat16."""
    shape = tuple(int(size) for size in reversed(stored.shape))
    if shape != values.shape:
        return False
    old = gguf_package().dequantize(stored.data, stored.tensor_type).reshape(shape)
    if np.array_equal(old, values):
        return True
    rounded = torch.from_numpy(np.array(old)).bfloat16().float().numpy()
    return bool(np.array_equal(rounded, values))


def gguf_name(name: str) -> str:
    """Convert a Hugging Face tensor name to llama.cpp's. Raises UnsupportedModelError if llama.cpp has no name for this
    tensor."""
    base, _, kind = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    parts = base.split(".")
    rest = ".".join(parts[3:])
    if parts[:2] == ["model", "layers"] and rest in _LAYER:
        return f"blk.{parts[2]}.{_LAYER[rest]}.{kind}"
    raise UnsupportedModelError(f"tensor {name!r} has no name in GGUF ({', '.join(WRITTEN)} models are written)")


def interleaved_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from Hugging Face's order to llama.cpp's; the inverse of
    `metadata.half_split_rows`. Raises ModelFileError if the rows do not divide evenly into heads."""
    if tensor.shape[0] % (2 * num_heads):
        raise ModelFileError(f"{tensor.shape[0]} rows are no {num_heads} heads: is config.json the right one?")
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()

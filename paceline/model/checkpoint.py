"""Reads checkpoints: a Hugging Face folder, a GGUF file or an adapter becomes a DecoderConfig and a stream of named
tensors.

Weights are safetensors or GGUF; pickles are never read. Tensors are memory-mapped and yielded one at a time, under
their Hugging Face names.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ModelFileError, ModelNotFoundError, reraised
from paceline.model import fp8
from paceline.model.adapter import WEIGHTS, added, base_of, is_adapter, read_pairs
from paceline.model.config.decoder import DecoderConfig, decoder_config
from paceline.model.config.values import MAX_SIZE, is_whole, short
from paceline.model.gguf import metadata as gguf
from paceline.model.gguf.blocks import AnyWeight, Blocks, Weight
from paceline.model.gguf.container import is_gguf
from paceline.model.layout import DELTA_NORM, LAYER_FACTOR, as_ours, input_table_shapes, layer_shapes, own_name


def load_config(path: Path | str) -> DecoderConfig:
    """Read a model's config from a Hugging Face folder or a GGUF file; for an adapter's folder, its base's config.

    Raises ModelNotFoundError, UnsupportedModelError (architecture or option not implemented) or ModelFileError (a key
    is missing or invalid).
    """
    return decoder_config(config_json(path), Path(os.path.expanduser(path)))


def config_json(path: Path | str) -> dict[str, Any]:
    """Read config.json of a folder, or build an equivalent dict from a GGUF file's metadata; for an adapter's folder,
    its base's. Raises ModelNotFoundError, UnsupportedModelError or ModelFileError."""
    path = base_of(existing(path))
    return gguf.config_json(path) if is_gguf(path) else read_json(path / "config.json")


@overload
def load_tensors(
    path: Path | str, *, is_wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]: ...
@overload
def load_tensors(path: Path | str, keep_blocks: bool) -> Iterator[tuple[str, Weight]]: ...
def load_tensors(
    path: Path | str, keep_blocks: bool = False, is_wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Weight]]:
    """Yield (Hugging Face name, tensor) for the weights of a Hugging Face folder or GGUF file. For an adapter's folder,
    these are the base's weights with the adapter added.

    Tensors of safetensors keep their dtype; those of GGUF and of FP8 checkpoints are dequantised to float32. Raises
    ModelFileError if a file is missing, truncated or pickled.

    `keep_blocks`: yield the quantised matrices of a GGUF file as Blocks, without dequantising them; no effect for an
    adapter's folder. `is_wanted`: called with each tensor's name; only tensors for which it returns True are yielded.
    None: all tensors.
    """
    path = existing(path)
    if is_adapter(path):
        yield from _with_adapter(path, load_tensors(base_of(path), is_wanted=is_wanted), is_whole=is_wanted is None)
    elif is_gguf(path):
        named = gguf.load_tensors(path, keep_blocks)
        yield from named if is_wanted is None else (each for each in named if is_wanted(each[0]))
    else:
        shards = shards_of(path).items()
        yield from fp8.dense(itertools.chain.from_iterable(_read_shard(*shard, is_wanted) for shard in shards), path)


def _with_adapter(folder: Path, tensors: Iterator[tuple[str, Tensor]], is_whole: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's tensors with the adapter in `folder` added; see `adapter.added`."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelFileError(
            f"{file} is missing: save the adapter as safetensors (pickled .bin files can run code and are never read)"
        )
    with reraised(ModelFileError, f"{file} is damaged", "copy the adapter again", SafetensorError, OSError):
        pairs = read_pairs(folder, read_tensors(file))
    config = load_config(folder)

    def of_decoder(name: str) -> str | None:
        return None if config.tie_embeddings and name == "lm_head.weight" else own_name(config, name)

    yield from added(tensors, pairs, of_decoder, folder, is_whole)


def random_tensors(
    config: DecoderConfig, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, random tensor) for every weight of a decoder with this config. The weights of norms are
    not random: they make each norm's factor 1. `seed`, `device` and `dtype`: see `random_weights`."""
    for name, tensor in random_weights(expected_shapes(config), seed, device, dtype):
        has_offset = name.endswith("norm.weight") and not name.endswith(DELTA_NORM)
        yield name, tensor - config.norm_offset if has_offset and config.norm_offset else tensor


def random_weights(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each name and shape in `shapes`, filled with normal random numbers of mean 0 and
    standard deviation 0.02. Weights of norms are 1, and also a layer's `layer_scalar`, the factor on its output.

    `device` and `dtype` describe the model that will use the weights; `drawn_as` derives the device and dtype of the
    tensors from them. Equal seeds give equal numbers; on a GPU, only if device and dtype are also equal.
    """
    draw_device, draw_dtype = drawn_as(torch.device(device), dtype)
    generator = torch.Generator(draw_device).manual_seed(seed)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, device=draw_device, dtype=draw_dtype)
        is_norm = name.endswith(("norm.weight", LAYER_FACTOR))
        yield name, tensor.fill_(1.0) if is_norm else tensor.normal_(0.0, 0.02, generator=generator)


def drawn_as(device: torch.device, dtype: torch.dtype) -> tuple[torch.device, torch.dtype]:
    """Return the (device, dtype) in which the random weights of a model are generated; the arguments are the model's
    own device and dtype.

    For a model on a GPU, weights are generated in the model's own device and dtype, because one CPU thread would take
    93 s for 8B parameters. For other models they are generated on the CPU in float32.
    """
    return (device, dtype) if device.type == "cuda" else (torch.device("cpu"), torch.float32)


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the decoder needs, by Hugging Face name; without `lm_head.weight` if the
    embedding is also the head."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(config, index).items()}
    shapes |= input_table_shapes(config)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_tensors(
    config: DecoderConfig, tensors: Iterable[tuple[str, AnyWeight]], source: Path | str
) -> Iterator[tuple[str, AnyWeight]]:
    """Yield a checkpoint's `tensors` under the decoder's names, after checking their names, shapes and values.

    Fused tensors are split. Redundant ones are dropped: the head if the embedding is also the head, and RoPE
    frequencies of old checkpoints. `source`: the checkpoint's path, for error messages. Raises ModelFileError for a
    tensor that is unknown, wrongly shaped or not finite and, at the end, if tensors are missing.
    """
    expected = expected_shapes(config)
    missing = dict.fromkeys(expected)
    for name, tensor in as_ours(config, expected, tensors, source):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings):
            continue
        if name not in expected:
            raise ModelFileError(
                f"{source}: tensor {name!r} is not part of a {config.family} model: is config.json the right one?"
            )
        if tuple(tensor.shape) != expected[name]:
            raise ModelFileError(
                f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {expected[name]}: "
                "config and weights are of different models, fetch the model again"
            )
        missing.pop(name, None)
        check_finite(name, tensor, source)
        yield name, tensor
    if missing:
        raise ModelFileError(
            f"{source}: {len(missing)} tensors are missing, first {next(iter(missing))!r}: fetch the model again"
        )


def check_finite(name: str, weight: Weight, source: Path | str) -> None:
    """Raise ModelFileError, naming the tensor and `source`, if a weight's dtype is not floating-point, or if a value is
    NaN or infinite. For a quantised weight, only the scales of its blocks are checked."""
    if isinstance(weight, Blocks):
        return check_finite(name, weight.scales(), source)
    if not weight.is_floating_point() or weight.is_complex():
        raise ModelFileError(f"{source}: tensor {name!r} holds {weight.dtype}, not fractions: fetch the model again")
    values = weight.float() if weight.element_size() == 1 else weight
    is_finite = (
        not values.numel() or math.isfinite(values.sum()) or bool(torch.stack(torch.aminmax(values)).isfinite().all())
    )
    if not is_finite:  # the sum of finite values may overflow; minimum and maximum cannot
        raise ModelFileError(
            f"{source}: tensor {name!r} holds NaN or an infinity: the training that made it failed, or the file is "
            "damaged; use another checkpoint"
        )
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelFileError if the file is missing, unreadable or not an object."""
    if not path.is_file():
        fault = "is no regular file" if path.exists() else "is missing"
        raise ModelFileError(f"{path} {fault}: give a Hugging Face model folder or a .gguf file")
    with reraised(
        ModelFileError, f"{path} cannot be read", "fetch the model again", OSError, ValueError, RecursionError
    ):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object: fetch the model again")
    return value


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids that end an answer: those of generation_config.json, followed by the further ones of
    config.json. Raises ModelFileError if one is not an id."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(not is_whole(token) or not 0 <= token <= MAX_SIZE for token in ids):
        raise ModelFileError(
            f"{folder}: eos_token_id must be an id or a list of ids (got {short(ids)}): correct the config"
        )
    return tuple(dict.fromkeys(ids))


def existing(path: Path | str) -> Path:
    path = Path(os.path.expanduser(path))
    if not os.path.exists(path):
        raise ModelNotFoundError(f"no folder or file {path}: give a Hugging Face model folder or a .gguf file")
    return path


def shards_of(folder: Path) -> dict[Path, list[str]]:
    """Return a dict: path of each safetensors file of the checkpoint -> names of the tensors to read from it; an empty
    list means all tensors.

    Raises ModelFileError if the folder has no safetensors checkpoint, or if its index is invalid or names a file that
    is missing.
    """
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": []}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelFileError(
                f"{folder} holds pickled weights only, which can run code and are never read: convert them to "
                "safetensors"
            )
        if ggufs := sorted(folder.glob("*.gguf")):
            raise ModelFileError(f"{folder} holds no model.safetensors: give the GGUF file itself, such as {ggufs[0]}")
        raise ModelFileError(
            f"{folder} holds no model.safetensors nor model.safetensors.index.json: fetch the model again"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} holds no weight_map: fetch the model again")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise ModelFileError(
                f"{index} points to {file!r}, which is no safetensors file of its folder: fetch the model again"
            )
        shards.setdefault(folder / file, []).append(name)
    for file in shards:
        if not file.is_file():
            raise ModelFileError(f"{file} is missing, one of {len(shards)} shards: fetch the model again")
    return shards


_TENSORS_PER_MAP, _MOST_MAPS = 16, 64
"""A file is memory-mapped anew after this many tensors, which frees the pages read before, but at most about _MOST_MAPS
times, since each time parses the whole header."""
MOST_TENSORS, MOST_HEADER_BYTES = 2**16, 2**24
"""Limits of a safetensors file. The largest known one has some 20,000 tensors and a header of 3 MB."""


def check_header(file: Path) -> None:
    """Check a safetensors file before it is opened: raises ModelFileError if the file cannot be read, or if its length
    field claims a header of more than 16 MiB (MOST_HEADER_BYTES). No model needs a larger one. A header that is larger
    than the file passes, because the safetensors library rejects it."""
    with (
        reraised(ModelFileError, f"{file} cannot be read", "fetch the model again", OSError),
        file.open("rb") as opened,
    ):
        num_bytes = int.from_bytes(opened.read(8), "little")
    if MOST_HEADER_BYTES < num_bytes <= file.stat().st_size:
        raise ModelFileError(
            f"{file} has a header of {num_bytes >> 20} MiB, no model needs that: fetch the model again"
        )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into memory; returns them by name.

    Raises ModelFileError if the file cannot be read or its header is larger than 16 MiB; SafetensorError or OSError if
    it is damaged.
    """
    check_header(file)
    return load_file(file)


def _read_shard(file: Path, names: list[str], is_wanted: Callable[[str], bool] | None) -> Iterator[tuple[str, Tensor]]:
    damaged = (SafetensorError, OSError, MemoryError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)
    with reraised(ModelFileError, f"{file} is truncated or damaged", "delete it and fetch the model again", *damaged):
        check_header(file)
        with safe_open(file, framework="pt") as shard:
            stored = shard.keys()
            selected = [name for name in names or stored if is_wanted is None or is_wanted(name)]
        if len(stored) > MOST_TENSORS:
            raise ModelFileError(f"{file} holds {len(stored):,} tensors, no model has so many: fetch the model again")
        per_map = max(_TENSORS_PER_MAP, -(-len(selected) // _MOST_MAPS))
        for first in range(0, len(selected), per_map):
            # Map anew every few tensors: pages that were read count as this process's memory until they are unmapped.
            with safe_open(file, framework="pt") as shard:
                for name in selected[first : first + per_map]:
                    yield name, shard.get_tensor(name)

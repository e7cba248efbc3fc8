"""From files to numbers: a Hugging Face folder or a GGUF file becomes a DecoderConfig and a stream of named tensors.

`load_config` reads config.json (or GGUF metadata), `load_tensors` yields one memory-mapped tensor at a time under its Hugging
Face name, `check_tensors` refuses what does not fit the config. Weights are safetensors or GGUF: nothing here unpickles.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.model import gguf
from paceline.model.blocks import Blocks, Weight
from paceline.model.config import LARGEST, MAX_LAYERS, MAX_SIZE, DecoderConfig
from paceline.model.gguf_file import is_gguf
from paceline.model.rope import check_rope

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"family": "llama", "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "family": "mistral",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "family": "qwen2",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "Qwen3ForCausalLM": {
        "family": "qwen3",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
"""What a config.json of each architecture means when it leaves a key out: the defaults of its Transformers class."""


def load_config(path: Path | str) -> DecoderConfig:
    """The shape of the model in a Hugging Face folder or GGUF file.

    Raises ModelNotFoundError (no such path), UnsupportedModelError (architecture or option not implemented),
    ModelFileError (a key missing or impossible).
    """
    path = _existing(path)
    if is_gguf(path):
        return gguf.load_config(path)
    raw = read_json(path / "config.json")
    architecture = _supported_architecture(raw, path)
    values = FAMILIES[architecture] | raw | {"family": FAMILIES[architecture]["family"]}
    return decoder_config(values, raw.get("tie_word_embeddings") is True, path)


@overload
def load_tensors(path: Path | str) -> Iterator[tuple[str, Tensor]]: ...
@overload
def load_tensors(path: Path | str, keep_blocks: bool) -> Iterator[tuple[str, Weight]]: ...
def load_tensors(path: Path | str, keep_blocks: bool = False) -> Iterator[tuple[str, Weight]]:
    """(Hugging Face name, tensor) for every weight: as stored from safetensors, float32 from GGUF.

    With `keep_blocks` the Q8_0 and Q4_1 matrices of a GGUF file come as Blocks.
    Raises ModelFileError when a file is missing, truncated, or in a pickle format.
    """
    path = _existing(path)
    if is_gguf(path):
        yield from gguf.load_tensors(path, keep_blocks)
        return
    for file, names in _shards(path).items():
        yield from _read_shard(file, names)


def random_tensors(config: DecoderConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Weights for mocking (`--weights random`): float32, normal with deviation 0.02, norms one; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs, by Hugging Face name. A tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


AnyWeight = TypeVar("AnyWeight", Tensor, Weight)


def check_tensors(
    config: DecoderConfig, tensors: Iterable[tuple[str, AnyWeight]], source: Path | str
) -> Iterator[tuple[str, AnyWeight]]:
    """Pass `tensors` on while checking names and shapes; what a tied or old checkpoint stores twice is dropped.

    Raises ModelFileError naming the tensor that is unknown, of a wrong shape or, at the end, missing.
    """
    expected = expected_shapes(config)
    missing = dict.fromkeys(expected)
    for name, tensor in tensors:
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
    """Raises ModelFileError when a tensor holds NaN or an infinity, or no fractions at all. A sum is the cheapest look."""
    if isinstance(weight, Blocks):
        block_bytes, scale_bytes = (34, 2) if weight.kind == "Q8_0" else (20, 4)
        scales = weight.data.view(-1, block_bytes)[:, :scale_bytes].contiguous().view(torch.float16)
        return check_finite(name, scales, source)
    if not weight.is_floating_point() or weight.is_complex():
        raise ModelFileError(f"{source}: tensor {name!r} holds {weight.dtype}, not fractions: fetch the model again")
    values = weight.float() if weight.element_size() == 1 else weight
    is_finite = not values.numel() or math.isfinite(values.sum()) or bool(torch.stack(torch.aminmax(values)).isfinite().all())
    if not is_finite:  # a sum may overflow where no value is infinite, the extremes cannot
        raise ModelFileError(
            f"{source}: tensor {name!r} holds NaN or an infinity: the training that made it failed, or the file is damaged; "
            "use another checkpoint"
        )
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelFileError when it is missing, unreadable or something else."""
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is no regular file: give a Hugging Face model folder or a .gguf file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: give a Hugging Face model folder or a .gguf file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object: fetch the model again")
    return value


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, then those of config.json, without repeats."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(not _is_int(token) or not 0 <= token <= MAX_SIZE for token in ids):
        raise ModelFileError(f"{folder}: eos_token_id must be an id or a list of ids (got {_short(ids)}): correct the config")
    return tuple(dict.fromkeys(ids))


def _existing(path: Path | str) -> Path:
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelNotFoundError(f"no folder or file {path}: give a Hugging Face model folder or a .gguf file")
    return path


def _supported_architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else f"model_type {raw.get('model_type')!r}"
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: architecture {name!s:.80} is not implemented (known: {', '.join(FAMILIES)}): "
            "the Transformers fallback runs it from a safetensors folder"
        )
    for key, plain in (
        ("quantization_config", (None,)),
        ("hidden_act", (None, "silu")),
        ("partial_rotary_factor", (None, 1.0)),
    ):
        if raw.get(key) not in plain:
            raise UnsupportedModelError(
                f"{path}: {key} {_short(raw[key])} is not implemented: "
                "use an unquantised, unmodified checkpoint, or the Transformers fallback"
            )
    return name


def decoder_config(values: dict[str, Any], tied: bool, path: Path) -> DecoderConfig:
    family, num_heads = values["family"], _positive(values, "num_attention_heads", path)
    hidden_size, max_position = _positive(values, "hidden_size", path), _positive(values, "max_position_embeddings", path)
    head_dim = _positive(values, "head_dim", path) if values.get("head_dim") is not None else hidden_size // num_heads
    num_kv_heads = (
        _positive(values, "num_key_value_heads", path) if values.get("num_key_value_heads") is not None else num_heads
    )
    theta, scaling = _rope(values, max_position, path)
    biased = values.get("attention_bias") is True and family in ("llama", "qwen3")
    config = DecoderConfig(
        family=family,
        vocab_size=_positive(values, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=_positive(values, "intermediate_size", path),
        num_layers=_positive(values, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_number(values, "rms_norm_eps", 1e-6, path),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=tied,
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=values.get("mlp_bias") is True and family == "llama",
        qk_norm=family == "qwen3",
        windows=_windows(values, path),
    )
    config.check_heads(path)
    return config


def _rope(values: dict[str, Any], max_position: int, path: Path) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: rope parameters must be an object (got {_short(given)}): correct config.json")
    if any(isinstance(value, dict) for value in given.values()) or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{path}: partial or per-layer rope is not implemented: use the Transformers fallback")
    scaling = {key: value for key, value in given.items() if key not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling.setdefault("rope_type", given.get("type", "default"))
    if not isinstance(scaling["rope_type"], str):
        raise ModelFileError(f"{path}: rope_type must be a name (got {_short(scaling['rope_type'])}): correct config.json")
    if scaling["rope_type"] in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", values.get("original_max_position_embeddings", max_position))
    if (
        scaling["rope_type"] == "yarn"
        and scaling.get("factor") is None
        and _is_int(scaling["original_max_position_embeddings"])
        and scaling["original_max_position_embeddings"] > 0
    ):
        scaling["factor"] = max_position / scaling["original_max_position_embeddings"]
    check_rope(scaling)
    theta = _number(given if given.get("rope_theta") is not None else values, "rope_theta", 10000.0, path)
    if theta <= 1:
        raise ModelFileError(f"{path}: rope_theta must be larger than 1 (got {theta}): correct config.json")
    return theta, None if scaling["rope_type"] == "default" else scaling


def _windows(values: dict[str, Any], path: Path) -> tuple[int | None, ...]:
    """Mistral: every layer has the window. Qwen: only with use_sliding_window, from max_window_layers or by layer_types."""
    num_layers, family = values["num_hidden_layers"], values["family"]
    window = values.get("sliding_window")
    if family == "llama" or (family != "mistral" and values.get("use_sliding_window") is not True):
        window = None
    if window is None:
        return ()
    window = _positive(values, "sliding_window", path)
    if family == "mistral":
        return (window,) * num_layers
    first = values.get("max_window_layers", 28)
    if not _is_int(first):
        raise ModelFileError(f"{path}: max_window_layers must be a whole number (got {_short(first)}): correct config.json")
    types = values.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise UnsupportedModelError(f"{path}: layer_types {_short(types)} is not implemented: use the Transformers fallback")
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (rows, columns, biased) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Each weight file with the tensors to take from it; None takes all of them."""
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise _no_weights(folder)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} holds no weight_map: fetch the model again")
    shards: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise ModelFileError(
                f"{index} points to {file!r}, which is no safetensors file of its folder: fetch the model again"
            )
        names = shards.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    for file in shards:
        if not file.is_file():
            raise ModelFileError(f"{file} is missing, one of {len(shards)} shards: fetch the model again")
    return shards


def _no_weights(folder: Path) -> ModelFileError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return ModelFileError(
            f"{folder} holds pickled weights only, which can run code and are never read: convert them to safetensors"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return ModelFileError(f"{folder} holds no model.safetensors: give the GGUF file itself, such as {ggufs[0]}")
    return ModelFileError(f"{folder} holds no model.safetensors nor model.safetensors.index.json: fetch the model again")


_TENSORS_PER_MAP = 16


def _read_shard(file: Path, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as shard:
            wanted = list(shard.keys()) if names is None else names
        for first in range(0, len(wanted), _TENSORS_PER_MAP):
            # Mapped anew every few tensors: pages that were read count as this process's memory until they are unmapped.
            with safe_open(file, framework="pt") as shard:
                for name in wanted[first : first + _TENSORS_PER_MAP]:
                    yield name, shard.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFileError(f"{file} is truncated or damaged ({error}): delete it and fetch the model again") from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(values: dict[str, Any], key: str, path: Path) -> int:
    value: Any = values.get(key)
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    if not _is_int(value) or not 1 <= value <= most:
        raise ModelFileError(
            f"{path}: config.json needs {key!r} as a positive whole number, at most {most} (got {_short(value)}): correct it"
        )
    return value


def _number(values: dict[str, Any], key: str, default: float, path: Path) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
        raise ModelFileError(f"{path}: config.json needs {key!r} as a positive number (got {_short(value)}): correct it")
    return float(value)


def _short(value: object) -> str:
    return reprlib.repr(value)

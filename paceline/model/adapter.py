"""LoRA adapters in PEFT's folders (adapter_config.json, adapter_model.safetensors), added to their base's weights.

    W + scaling * (B @ A)

`scaling` is lora_alpha / r (arXiv 2106.09685), or lora_alpha / sqrt(r) with use_rslora (arXiv 2312.03732).
`checkpoint.py` adds adapters in float32 while it reads the base. An adapter that PEFT's `merge_and_unload` would merge
differently is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DownloadError, ModelFileError, ModelNotFoundError, UnsupportedModelError, reraised
from paceline.hub import resolve

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
"""Files of an adapter's folder; `base` is an optional link to the base, in place of its name in the config."""
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
READ |= {"target_modules", "init_lora_weights"}
FOR_TRAINING = {"auto_mapping", "inference_mode", "lora_dropout", "peft_version", "task_type", "exclude_modules"}
FOR_TRAINING |= {"layers_to_transform", "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size"}
FOR_TRAINING |= {"eva_config"}
"""Keys without effect on a merge: the weights' own names say which layers have an adapter."""
NEUTRAL = (None, False, "none", "main", [], {})
"""Values of all other keys with which they change nothing ("none" of bias, "main" of revision)."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that left the base as it was. Others (PiSSA, OLoRA, ...) changed it before training."""
MARK = " with adapter sha256:"
"""Text between a target's name and the hash of its adapter."""
MERGE_IT = "merge it with PEFT (merge_and_unload, save_pretrained) and give that folder"


def is_adapter(path: Path) -> bool:
    """Return True if `path` is the folder of a LoRA adapter. Raises ModelFileError if the folder also contains a whole
    model."""
    if not (path / CONFIG).is_file():
        return False
    if (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file():
        raise ModelFileError(f"{path} holds both an adapter and a whole model: move one of them to another folder")
    return True


def base_of(path: Path) -> Path:
    """Return the path of the base model of the adapter in folder `path`; `path` itself if it is not an adapter's
    folder.

    Raises ModelNotFoundError (base not found or not downloaded), UnsupportedModelError (the base is an adapter too),
    ModelFileError (adapter_config.json is damaged or names no base) or CacheError (a downloaded base cannot be stored).
    """
    if not is_adapter(path):
        return path
    name = base_name(path)
    try:
        base = resolve(name)
    except (ModelNotFoundError, DownloadError) as error:
        raise ModelNotFoundError(
            f"{path}: the adapter's base {name!r} cannot be read ({error}): link the base's folder or GGUF file as "
            f"{path / BASE}, or correct base_model_name_or_path in {CONFIG}"
        ) from error
    if is_adapter(base):
        raise UnsupportedModelError(f"{path}: its base {base} is an adapter too: {MERGE_IT} as the base")
    return base


def base_name(folder: Path) -> str:
    """Return the path or name of an adapter's base: the target of the link `base` in its folder, else
    `base_model_name_or_path` of adapter_config.json. Raises ModelFileError if there is neither."""
    if (folder / BASE).exists():
        return str((folder / BASE).resolve())
    name = read_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelFileError(f"{folder / CONFIG}: base_model_name_or_path is missing: write the base's name there")
    return name


def read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of an adapter's folder. Raises ModelFileError if it is missing, damaged or not a JSON
    object."""
    file = folder / CONFIG
    with reraised(
        ModelFileError, f"{file} cannot be read", "copy the adapter again", OSError, ValueError, RecursionError
    ):
        raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ModelFileError(f"{file} does not hold a JSON object: copy the adapter again")
    return raw


def identity_of(model: str) -> str:
    """Return the name by which a training or evaluation run records its target. A resumed run compares it, to notice
    that the target has changed.

    For a model that is not an adapter, this is `model` itself. For an adapter's folder it is the absolute path and a
    hash, because the adapter may be trained again in the same folder. The hash covers the adapter's files and the link
    to its base.
    """
    folder = Path(os.path.expanduser(model)).resolve()
    if not is_adapter(folder):
        return model
    link = str((folder / BASE).resolve()) if (folder / BASE).exists() else ""
    return f"{folder}{MARK}{hashlib.sha256(f'{adapter_digest(folder)} {link}'.encode()).hexdigest()[:32]}"


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256, in hex, of an adapter's config and weights; the base is not included. Raises ModelFileError
    if a file cannot be read."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (
            reraised(ModelFileError, f"{folder / name} cannot be read", "copy the adapter again", OSError),
            (folder / name).open("rb") as file,
        ):
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Pair:
    """LoRA matrices A and B of one linear layer, whose weight W becomes W + scaling * B A."""

    a_RI: Tensor
    """[rank, inputs]"""
    b_OR: Tensor
    """[outputs, rank]"""
    scaling: float
    module: str
    """Name of the layer in PEFT's file."""

    def added_to(self, weight_OI: Tensor, source: object) -> Tensor:
        """Return `weight_OI` + scaling * B A in float32. Raises ModelFileError, naming `source`, if the shapes
        differ."""
        shape = (self.b_OR.shape[0], self.a_RI.shape[1])
        if tuple(weight_OI.shape) != shape:
            raise ModelFileError(
                f"{source}: the adapter of {self.module} has shape {shape}, the base's weight "
                f"{tuple(weight_OI.shape)}: it was trained on another base"
            )
        return weight_OI.float() + (self.b_OR.float() @ self.a_RI.float()) * self.scaling


def read_pairs(folder: Path, tensors: Mapping[str, Tensor]) -> list[Pair]:
    """Return an adapter's LoRA matrices, one `Pair` for each layer that it changes. `tensors`: content of the
    safetensors file in the adapter's `folder`, by name.

    Raises UnsupportedModelError for more than LoRA of linear layers (such as DoRA or trained biases), ModelFileError if
    the adapter's config and `tensors` contradict each other.
    """
    raw = read_config(folder)
    _refuse_others(folder, raw)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            raise UnsupportedModelError(f"{folder / WEIGHTS}: {key!r} is no LoRA matrix of a linear layer: {MERGE_IT}")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    pairs = [_pair(folder, raw, module, pair) for module, pair in parts.items()]
    _check_modules(folder, raw.get("target_modules"), list(parts))
    return pairs


def added(
    tensors: Iterator[tuple[str, Tensor]],
    pairs: list[Pair],
    own_name: Callable[[str], str | None],
    source: Path,
    is_whole: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Merge an adapter into its base: yields (name, tensor) for each of the base's `tensors`, with the LoRA matrices in
    `pairs` added.

    `own_name` is given by the caller: it converts the name of a weight in a checkpoint to the decoder's name, or to
    None if the decoder does not use this weight. `source`: path for error messages. `is_whole`: True if `tensors`
    contains all weights of the base; False if the caller reads only some of them.

    Raises ModelFileError if a pair belongs to a weight that the decoder does not use, or if two pairs belong to one
    weight. If `is_whole`, also raises it for a pair whose weight is not in `tensors`.
    """
    left = {own_name(f"{pair.module}.weight"): pair for pair in pairs}
    if None in left or len(left) < len(pairs):
        unused = left[None].module if None in left else "two of the layers"
        raise ModelFileError(f"{source}: {unused} of the adapter cannot be added to a weight of its own: {MERGE_IT}")
    for name, tensor in tensors:
        pair = left.pop(own_name(name), None)
        yield name, tensor if pair is None else pair.added_to(tensor, source)
    if left and is_whole:
        first = next(iter(left.values())).module
        raise ModelFileError(
            f"{source}: {len(left)} layers of the adapter match no weight of its base, first {first!r}: is it the "
            f"right base? Else {MERGE_IT}"
        )


def _refuse_others(folder: Path, raw: dict[str, Any]) -> None:
    """Raises UnsupportedModelError for the first setting of adapter_config.json that a plain merge does not cover."""
    file = folder / CONFIG
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{file}: peft_type {raw.get('peft_type')!r} is not LORA: {MERGE_IT}")
    others = {name: value for name, value in raw.items() if name not in READ | FOR_TRAINING}
    if raw.get("init_lora_weights") not in PLAIN_STARTS:
        others["init_lora_weights"] = raw["init_lora_weights"]
    for name, value in others.items():
        if value not in NEUTRAL:
            raise UnsupportedModelError(f"{file}: {name} is {value!r:.60}, which is not implemented: {MERGE_IT}")


def _pair(folder: Path, raw: dict[str, Any], module: str, pair: dict[str, Tensor]) -> Pair:
    if len(pair) < 2:
        (present,) = pair
        raise ModelFileError(f"{folder / WEIGHTS}: {module} has only lora_{present}: copy the adapter again")
    rank = _setting(folder, raw, "r", "rank_pattern", module)
    alpha = _setting(folder, raw, "lora_alpha", "alpha_pattern", module)
    a_RI, b_OR = pair["A"], pair["B"]
    are_matrices = a_RI.ndim == b_OR.ndim == 2 and a_RI.is_floating_point() and b_OR.is_floating_point()
    if not are_matrices or a_RI.shape[0] != rank or b_OR.shape[1] != rank:
        raise ModelFileError(
            f"{folder / WEIGHTS}: {module} has matrices of {tuple(a_RI.shape)} and {tuple(b_OR.shape)}, {CONFIG} asks "
            f"for rank {rank:g}: copy the adapter again"
        )
    scaling = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    return Pair(a_RI, b_OR, scaling, module)


def _setting(folder: Path, raw: dict[str, Any], usual: str, by_layer: str, module: str) -> float:
    """Return the rank or alpha of a layer: that of the first pattern that matches the end of its name, else the usual
    one. Raises ModelFileError for an invalid pattern or number."""
    patterns = raw.get(by_layer) or {}
    fault = f"{folder / CONFIG}: invalid {by_layer}"
    with reraised(ModelFileError, fault, "correct it", re.error, AttributeError):
        values = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    value = values[0] if values else raw.get(usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelFileError(
            f"{folder / CONFIG}: {by_layer if values else usual} of {module} is {value!r:.40}: write a positive number"
        )
    return value


def _check_modules(folder: Path, wanted: Any, modules: list[str]) -> None:
    """Raises ModelFileError if the config's target modules and the layers in the file contradict each other."""
    if not modules:
        raise ModelFileError(f"{folder / WEIGHTS} holds no LoRA matrices: copy the adapter again")
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelFileError(f"{folder / CONFIG}: target_modules is {wanted!r:.60}: name the layers, as PEFT does")
    patterns = [wanted] if isinstance(wanted, str) else [rf"(?:.*\.)?{re.escape(name)}" for name in names]
    with reraised(ModelFileError, f"{folder / CONFIG}: invalid target_modules", "correct it", re.error):
        matched = [{module for module in modules if re.fullmatch(pattern, module)} for pattern in patterns]
    unused = [f"no matrices of {name!r}" for name, each in zip(names, matched, strict=True) if not each]
    unused += [
        f"matrices of {module!r}, which it leaves out" for module in modules if module not in set().union(*matched)
    ]
    if unused:
        raise ModelFileError(
            f"{folder / CONFIG}: target_modules does not fit {WEIGHTS}, which has {unused[0]}: copy the adapter again"
        )

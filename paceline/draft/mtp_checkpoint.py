"""The multi-token-prediction layer that some models' files hold beside the model, in either of two layouts.

    Qwen3-Next, Qwen3.5      mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0.*
    DeepSeek-V3 and its kin  of model.layers.L, L the number of layers: eh_proj, enorm, hnorm, shared_head.norm, and the layer's
                             own; embed_tokens and shared_head.head are copies of the target's, which are used

Transformers drops these tensors. Their names are those that vLLM's loaders read (`qwen3_next_mtp.py`, `deepseek_mtp.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.checkpoint import check_finite, load_config, load_named
from paceline.model.config import DecoderConfig
from paceline.model.gguf_file import is_gguf
from paceline.model.layout import as_ours, layer_shapes

LAYER = "model.layers.0."
QWEN = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.norm.": "final_norm.",
    "mtp.layers.0.": LAYER,
}
DEEPSEEK = {"eh_proj.": "fc.", "enorm.": "embedding_norm.", "hnorm.": "hidden_norm.", "shared_head.norm.": "final_norm."}
COPIES = ("embed_tokens.", "shared_head.head.")
CHOOSE = "choose another drafter, such as default, ngram or a DFlash drafter's folder"


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One such layer."""

    config: DecoderConfig
    """Of the layer: the target's, with this one layer, which has attention."""
    tensors: dict[str, Tensor]
    """fc, embedding_norm, hidden_norm and final_norm, and those of the layer by their names within it."""
    tells_normed: bool
    """Whether a step is told the hidden state of the one before behind the final norm (Qwen) or before it (DeepSeek)."""


def read_mtp(path: Path) -> MtpLayer:
    """The layer in a target's folder. Raises ModelFileError where there is none or its tensors do not fit the target's config,
    UnsupportedModelError for a target or a layer that our decoder does not compute."""
    if is_gguf(path):
        raise ModelFileError(f"{path}: the mtp drafter reads a folder of safetensors, not a GGUF file: {CHOOSE}")
    try:
        config = load_config(path)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; its mtp layer is not read then: {CHOOSE}") from error
    last = f"model.layers.{config.num_layers}."
    found = dict(load_named(path, lambda name: name.startswith(("mtp.", last, f"model.layers.{config.num_layers + 1}."))))
    if not found:
        raise ModelFileError(f"{path} holds no multi-token-prediction layer (no tensors mtp.* nor {last}*): {CHOOSE}")
    is_qwen = any(name.startswith("mtp.") for name in found)
    layer = replace(config, num_layers=1, delta=None, linear_layers=(), dense_layers=(), windows=(), ropes=())
    tensors = dict(as_ours(layer, _shapes(layer), _renamed(found, last, is_qwen, path), path))
    return MtpLayer(layer, _checked(layer, tensors, path), tells_normed=is_qwen)


def _shapes(layer: DecoderConfig) -> dict[str, tuple[int, ...]]:
    size = layer.hidden_size
    own = {f"{LAYER}{name}": shape for name, shape in layer_shapes(layer, 0).items()}
    norms = {f"{name}.weight": (size,) for name in ("embedding_norm", "hidden_norm", "final_norm")}
    return own | norms | {"fc.weight": (size, 2 * size)}


def _renamed(found: dict[str, Tensor], last: str, is_qwen: bool, path: Path) -> Iterator[tuple[str, Tensor]]:
    names = QWEN if is_qwen else {f"{last}{theirs}": ours for theirs, ours in DEEPSEEK.items()} | {last: LAYER}
    for name, tensor in found.items():
        if name.startswith(tuple(f"{last}{copy}" for copy in COPIES)):
            continue
        theirs = next((theirs for theirs in names if name.startswith(theirs)), None)
        if theirs is None:
            raise UnsupportedModelError(f"{path}: tensor {name!r}: mtp of more than one layer is not implemented: {CHOOSE}")
        if "self_attn.kv_a_proj" in name:
            raise UnsupportedModelError(f"{path}: the mtp layer's attention is MLA, which is not implemented: {CHOOSE}")
        yield name.replace(theirs, names[theirs], 1), tensor


def _checked(layer: DecoderConfig, tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """By their names within the layer."""
    expected = _shapes(layer)
    for name in [*expected, *tensors]:
        shape, found = expected.get(name), tuple(tensors[name].shape) if name in tensors else None
        if shape != found:
            raise ModelFileError(
                f"{path}: tensor {name.removeprefix(LAYER)!r} of the mtp layer has shape {found}, the config asks for {shape}: "
                "config and weights are of different models, fetch the model again"
            )
        check_finite(name, tensors[name], path)
    return {name.removeprefix(LAYER): tensor for name, tensor in tensors.items()}

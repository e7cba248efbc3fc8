"""Reads and writes the multi-token-prediction layer that some models' files contain, in either of two layouts.

    Qwen3-Next, Qwen3.5      mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0.*
    DeepSeek-V3 and similar  in model.layers.L, L the number of layers: eh_proj, enorm, hnorm, shared_head.norm, and a
                             decoder layer; embed_tokens and shared_head.head are copies of the target's and are not
                             read

Transformers drops these tensors. The names are those of vLLM's loaders (`qwen3_next_mtp.py`, `deepseek_mtp.py`).

A trained layer (`train/methods/mtp.py`) has its own folder: these tensors under the same names, and the target's
config.json with the additional key `paceline_mtp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.adapter import base_of
from paceline.model.checkpoint import check_finite, config_json, load_tensors
from paceline.model.config.decoder import DecoderConfig, decoder_config
from paceline.model.config.values import MOST, is_whole, short
from paceline.model.gguf.container import is_gguf
from paceline.model.layout import as_ours, layer_shapes

LAYER = "model.layers.0."
QWEN = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.norm.": "final_norm.",
    "mtp.layers.0.": LAYER,
}
DEEPSEEK = {
    "eh_proj.": "fc.",
    "enorm.": "embedding_norm.",
    "hnorm.": "hidden_norm.",
    "shared_head.norm.": "final_norm.",
}
COPIES = ("embed_tokens.", "shared_head.head.")
MARK = "paceline_mtp"
"""Key of config.json in a folder that holds only an MTP layer. Its value: {"layout": "qwen" or "deepseek", "steps":
number of drafts it was trained for}."""
CHOOSE = "choose another drafter, such as default, ngram or a DFlash drafter's folder"


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A multi-token-prediction (MTP) layer as read from its file: config and tensors."""

    config: DecoderConfig
    """Config of the layer: the target's, reduced to one layer with full attention."""
    tensors: dict[str, Tensor]
    """The tensors fc, embedding_norm, hidden_norm and final_norm, and those of the decoder layer."""
    tells_normed: bool
    """True if the next drafting step receives the hidden state after the final norm (Qwen); False: before it
    (DeepSeek)."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The JSON object of the config.json that it was read with."""

    @property
    def steps(self) -> int | None:
        """Number of consecutive drafts that the layer was trained for. None if this is unknown, as for a layer that was
        read from the target's own files."""
        return self.raw[MARK]["steps"] if MARK in self.raw else None

    def marked(self, steps: int) -> dict[str, Any]:
        """Returns the config.json for a folder that holds only this layer: the target's config.json without its
        quantization_config, plus the key `paceline_mtp` (MARK) by which paceline recognises such a folder. `steps`:
        number of consecutive drafts that the layer was trained for."""
        kept = {name: value for name, value in self.raw.items() if name != "quantization_config"}
        more = {} if self.tells_normed else {"num_nextn_predict_layers": 1}
        return {**kept, **more, MARK: {"layout": "qwen" if self.tells_normed else "deepseek", "steps": steps}}


def is_mtp(raw: dict[str, Any]) -> bool:
    """True if `raw` is the config.json of a folder that holds only an MTP layer."""
    return MARK in raw


def read_mtp(path: Path) -> MtpLayer:
    """Reads the MTP layer from a target's folder, or from a folder that holds only the layer. Raises ModelFileError if
    there is no layer; other errors are those of `find_mtp`."""
    layer = find_mtp(path)
    if layer is None:
        names = f"mtp.* nor model.layers.{decoder_config(config_json(path), path).num_layers}.*"
        raise ModelFileError(f"{path} holds no multi-token-prediction layer (no tensors {names}): {CHOOSE}")
    return layer


def find_mtp(path: Path) -> MtpLayer | None:
    """Reads the MTP layer from a target's folder, or from a folder that holds only the layer; returns None if there is
    no layer. Raises ModelFileError for a GGUF file or if a tensor does not fit the config, UnsupportedModelError for a
    target or layer that paceline's decoder does not implement."""
    if is_gguf(base_of(path)):
        raise ModelFileError(f"{path}: the mtp drafter reads a folder of safetensors, not a GGUF file: {CHOOSE}")
    raw = config_json(path)
    try:
        config = decoder_config(raw, path)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; its mtp layer is not read then: {CHOOSE}") from error
    last = f"model.layers.{config.num_layers}."
    wanted = ("mtp.", last, f"model.layers.{config.num_layers + 1}.")
    stored = dict(load_tensors(path, is_wanted=lambda name: name.startswith(wanted)))
    if not stored:
        return None
    is_qwen = any(name.startswith("mtp.") for name in stored)
    layer = one_layer(config)
    tensors = dict(as_ours(layer, _shapes(layer), _renamed(stored, last, is_qwen, path), path))
    return MtpLayer(layer, checked(layer, tensors, path), is_qwen, _checked_mark(raw, is_qwen, path))


def _checked_mark(raw: dict[str, Any], is_qwen: bool, path: Path) -> dict[str, Any]:
    """Return config.json after checking that its mark agrees with the tensor names. Raises ModelFileError."""
    layout = "qwen" if is_qwen else "deepseek"
    mark = raw.get(MARK, {"layout": layout, "steps": 1})
    steps = mark.get("steps") if isinstance(mark, dict) and mark.get("layout") == layout else None
    if not is_whole(steps) or not 1 <= steps <= MOST["block_size"]:
        raise ModelFileError(
            f"{path}: {MARK} in config.json is {short(mark)}, where the tensors have the names of {layout}: fetch the "
            "drafter again"
        )
    return raw


def one_layer(config: DecoderConfig) -> DecoderConfig:
    """Returns the config of an MTP layer: the target's `config`, reduced to one layer with full attention."""
    return replace(config, num_layers=1, delta=None, linear_layers=(), dense_layers=(), windows=(), ropes=())


def layer_of(raw: dict[str, Any], tensors: dict[str, Tensor]) -> MtpLayer:
    """Creates an MTP layer from tensors in memory. `raw`: config.json of a folder that holds only this layer, from
    `MtpLayer.marked`. `tensors`: as in `MtpLayer.tensors`."""
    config = decoder_config(raw, Path("config.json"))
    return MtpLayer(one_layer(config), tensors, raw[MARK]["layout"] == "qwen", raw)


def write_mtp(folder: Path | str, layer: MtpLayer) -> None:
    """Writes a folder that holds only this MTP layer, under the tensor names of the target's file. Each expert of an
    MoE layer has tensors of its own. Raises CacheError if writing fails."""
    write_checkpoint(folder, layer.marked(layer.steps or 1), target_names(layer))


def target_names(layer: MtpLayer) -> dict[str, Tensor]:
    """Returns the layer's tensors under their names in the target's file."""
    last = f"model.layers.{decoder_config(layer.raw, Path('config.json')).num_layers}."
    file_names = {own_name: name for name, own_name in QWEN.items() if own_name != LAYER}
    if not layer.tells_normed:
        file_names = {own_name: last + name for name, own_name in DEEPSEEK.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in layer.tensors.items():
        owner, dot, rest = name.partition(".")
        inside = "mtp.layers.0." if layer.tells_normed else last
        renamed[file_names[owner + dot] + rest if owner + dot in file_names else inside + name] = tensor
    return renamed


def _shapes(layer: DecoderConfig) -> dict[str, tuple[int, ...]]:
    size = layer.hidden_size
    own = {f"{LAYER}{name}": shape for name, shape in layer_shapes(layer, 0).items()}
    norms = {f"{name}.weight": (size,) for name in ("embedding_norm", "hidden_norm", "final_norm")}
    return own | norms | {"fc.weight": (size, 2 * size)}


def _renamed(tensors: dict[str, Tensor], last: str, is_qwen: bool, path: Path) -> Iterator[tuple[str, Tensor]]:
    names = QWEN
    if not is_qwen:
        names = {f"{last}{file_name}": own_name for file_name, own_name in DEEPSEEK.items()} | {last: LAYER}
    for name, tensor in tensors.items():
        if name.startswith(tuple(f"{last}{copy}" for copy in COPIES)):
            continue
        file_name = next((file_name for file_name in names if name.startswith(file_name)), None)
        if file_name is None:
            raise UnsupportedModelError(
                f"{path}: tensor {name!r}: mtp of more than one layer is not implemented: {CHOOSE}"
            )
        if "self_attn.kv_a_proj" in name:
            raise UnsupportedModelError(f"{path}: the mtp layer's attention is MLA, which is not implemented: {CHOOSE}")
        yield name.replace(file_name, names[file_name], 1), tensor


def checked(layer: DecoderConfig, tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns an MTP layer's tensors, without the prefix `model.layers.0.` of their names. `path`: their origin, for
    error messages. Raises ModelFileError if a tensor is missing, unknown, not finite, or does not fit the config
    `layer`."""
    expected = _shapes(layer)
    for name in [*expected, *tensors]:
        shape, given = expected.get(name), tuple(tensors[name].shape) if name in tensors else None
        if shape != given:
            raise ModelFileError(
                f"{path}: tensor {name.removeprefix(LAYER)!r} of the mtp layer has shape {given}, the config asks for "
                f"{shape}: config and weights are of different models, fetch the model again"
            )
        check_finite(name, tensors[name], path)
    return {name.removeprefix(LAYER): tensor for name, tensor in tensors.items()}

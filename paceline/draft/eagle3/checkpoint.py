"""Reads and writes EAGLE-3 checkpoints in two formats.

    SpecForge, SGLang, EAGLE   LlamaForCausalLMEagle3, flat config, midlayer.*, fc, norm, lm_head, d2t, t2d
    speculators, vLLM          Eagle3Speculator, transformer_layer_config, layers.0.*, the other tensors,
                               perhaps embed_tokens

`Eagle3Config.from_json` parses both configs; `write_eagle3` writes either format. `d2t` holds offsets: row i of the
head is token i + d2t[i]; `t2d` marks the tokens that the head has. Target layers are counted in two ways: the top-level
key `eagle_aux_hidden_state_layer_ids` uses Transformers' hidden_states (id 2 is the output of layer 1; vLLM,
speculators), the one in `eagle_config` counts layers (SGLang adds one).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.config import is_dflash, layer_sizes, refuse_mismatch
from paceline.draft.formats.speculators import VERSION, proposal_config
from paceline.draft.vocabulary import as_tensors
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.checkpoint import check_finite, load_tensors, read_json
from paceline.model.config.decoder import FAMILIES, DecoderConfig, decoder_config, is_whole, short, whole
from paceline.model.config.values import check_flags, part
from paceline.model.target import Sizes

log = logging.getLogger("paceline.draft")
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
REQUIRED = ("fc.weight", "norm.weight", "lm_head.weight")
FAMILY = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NUM_TAPS = 3
"""Number of target layers that are read if the config does not name them."""
KEYS = json.loads(Path(__file__).with_name("eagle3_keys.json").read_text(encoding="utf-8"))
DEFAULT_DRAFTED = 5


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Config of an EAGLE-3 or 3.1 drafter: decoder layers and an LM head, which draft one token per step. A step reads
    a token's embedding and a hidden state of the position before it. The first step computes this state from the
    target's hidden states; later steps use an output of the step before."""

    shape: DecoderConfig
    """Sizes, RoPE and windows of the draft layers; its `vocab_size` is the target's."""
    draft_vocab_size: int
    target_hidden_size: int
    tap_layers: tuple[int, ...]
    """Target layers whose hidden states the drafter reads; layer l is Transformers' hidden_states[l + 1]. Empty: those
    of `default_taps`."""
    norm_before_residual: bool
    """True if the first layer adds its outputs to the normed features; False: to the features before the norm."""
    norm_before_fc: bool
    """True if one norm covers the concatenated features of all tapped layers (gpt-oss)."""
    fc_norm: bool
    """True if the features of each tapped layer have a norm of their own (EAGLE-3.1)."""
    norm_output: bool
    """True if the next drafting step receives the normed hidden state (EAGLE-3.1)."""
    raw: dict[str, Any]
    """The JSON object of config.json, as read."""

    @property
    def num_taps(self) -> int:
        return len(self.tap_layers) or NUM_TAPS

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path | str = "config.json") -> Eagle3Config:
        """Parses the JSON object `raw` of a config.json in SpecForge's format or in that of `speculators`. `path`: its
        name in error messages. Raises UnsupportedModelError for another drafter or an unsupported setting,
        ModelFileError for a missing or invalid key."""
        path = Path(path)
        layer = raw.get("transformer_layer_config", raw)
        if not isinstance(layer, dict) or not is_eagle3(raw):
            raise UnsupportedModelError(
                f"{path}: {short(raw.get('architectures'))} is no EAGLE-3 drafter: give {ARCHITECTURE} or a "
                "speculators folder"
            )
        shape = _shape(layer, path)
        check_flags(raw, path, FLAGS)
        flags = {name: raw.get(name) is True for name in FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise ModelFileError(f"{path}: norm_before_fc and fc_norm exclude each other: correct config.json")
        return cls(
            shape=shape,
            draft_vocab_size=whole(raw, "draft_vocab_size", path, shape.vocab_size, least=2),
            target_hidden_size=whole(raw, "target_hidden_size", path, shape.hidden_size),
            tap_layers=_taps(raw, path),
            **flags,
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """Contents of an EAGLE-3 drafter's folder: config, tensors and draft vocabulary."""

    config: Eagle3Config
    tensors: dict[str, Tensor]
    """The network's tensors, under the names of `speculators`."""
    ids: Tensor
    """Token id of each row of the LM head, int64 [size of the draft vocabulary]."""
    others: dict[str, Tensor] = field(default_factory=dict)
    """Tensors in the file that the network does not use; they are written back unchanged."""


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """True if `raw` is the config.json of an EAGLE-3 drafter, in SpecForge's format or in that of `speculators`. If it
    names no architecture, its keys decide: those that only EAGLE-3 has."""
    kind, names = raw.get("speculators_model_type"), str(raw.get("architectures") or "")
    if kind is not None:
        return kind == "eagle3"
    if not names:
        return not is_dflash(raw) and any(
            raw.get(key) is not None for key in ("draft_vocab_size", "eagle_config", LAYER_IDS)
        )
    return "eagle3" in names.lower() or ("LlamaForCausalLM" in names and "draft_vocab_size" in raw)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the target layers, counted from 0, whose hidden states a drafter reads if its config names none: layers
    1, n/2 - 1 and n - 4 of n layers, as in SGLang and vLLM. For n < 7: an early, a middle and a late layer."""
    ids = (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (1, num_layers // 2, num_layers - 1)
    return tuple(sorted({max(layer, 1) - 1 for layer in ids}))


def new_config(
    hidden_size: int,
    vocab_size: int,
    num_target_layers: int,
    *,
    draft_vocab_size: int | None = None,
    head_dim: int = 64,
    intermediate_size: int | None = None,
    version: str = "3.1",
    **keys: Any,
) -> dict[str, Any]:
    """Returns the config.json, in SpecForge's format, of a new one-layer drafter for a target with these sizes. `keys`
    overrides or adds keys.

    `version`: EAGLE-3 version. "3.1" norms each tapped layer's features, and the state passed to the next step; "3"
    norms neither.
    """
    taps = list(keys.pop("tap_layers", None) or default_taps(num_target_layers))
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size or vocab_size,
        "num_hidden_layers": 1,
        **layer_sizes(hidden_size, head_dim, intermediate_size),
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "fc_norm": version == "3.1",
        "norm_output": version == "3.1",
        LAYER_IDS: [layer + 1 for layer in taps],
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: taps},
        **keys,
    }


def read_eagle3(folder: Path | str) -> Eagle3Checkpoint:
    """Reads an EAGLE-3 drafter from its folder, in SpecForge's format or in that of `speculators`. Logs unknown keys
    and tensors as a warning.

    Raises UnsupportedModelError for another drafter or an unsupported setting, ModelFileError for a missing or damaged
    file, or a tensor that is missing or does not fit.
    """
    folder = Path(os.path.expanduser(folder))
    config = Eagle3Config.from_json(read_json(folder / "config.json"), folder)
    tensors, others = dict[str, Tensor](), dict[str, Tensor]()
    maps: dict[str, Tensor] = {}
    for stored, tensor in load_tensors(folder):
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if name in ("d2t", "t2d"):
            maps[name] = tensor
        elif name.split(".")[0] in ("fc", "fc_norm", "input_norm", "layers", "norm", "lm_head", "embed_tokens"):
            check_finite(name, tensor, folder)
            tensors[name] = tensor
        elif not name.endswith("rotary_emb.inv_freq"):
            others[stored] = tensor
    needed = [*REQUIRED, *(("d2t", "t2d") if config.draft_vocab_size != config.shape.vocab_size else ())]
    if missing := [name for name in needed if name not in tensors and name not in maps]:
        raise ModelFileError(
            f"{folder}: tensors that an EAGLE-3 drafter needs are missing: {', '.join(missing)}; export it with its "
            "head and its vocabulary, or fetch the drafter again"
        )
    _check_flags(config, tensors, folder)
    _log_unknown(config, others, folder)
    rows = list(tensors["lm_head.weight"].shape[:1])
    if rows != [config.draft_vocab_size]:
        raise ModelFileError(
            f"{folder}: lm_head.weight has {rows[0] if rows else 0} rows for a draft_vocab_size of "
            f"{config.draft_vocab_size}: config and weights are of different drafters"
        )
    return Eagle3Checkpoint(config, tensors, _ids(config, maps, folder), others)


def write_eagle3(folder: Path | str, checkpoint: Eagle3Checkpoint, verifier: Mapping[str, Any] | None = None) -> None:
    """Writes the drafter into a folder: in SpecForge's format, or with `verifier` in that of `speculators`. `verifier`:
    the target's name_or_path and architectures. Raises CacheError if writing fails."""
    config, ids, tensors = checkpoint.config, checkpoint.ids.cpu(), checkpoint.tensors
    if verifier is None:
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        raw = specforge_json(config)
    else:
        raw = speculators_json(config, verifier, str(tensors["fc.weight"].dtype).removeprefix("torch."))
    write_checkpoint(folder, raw, {**checkpoint.others, **tensors, **as_tensors(ids, config.shape.vocab_size)})


def speculators_json(config: Eagle3Config, verifier: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the drafter's config.json in the format of `speculators` 0.9, which vLLM reads. `verifier`: the target's
    name_or_path and architectures; unknown values may be missing. `dtype`: data type of the weights, such as
    "bfloat16"."""
    raw = dict(config.raw)
    layer = raw.pop("transformer_layer_config", None)
    if layer is None:
        layer = {name: raw.pop(name) for name in list(raw) if name not in KEYS["eagle"]}
        layer |= {"architectures": [FAMILY[layer.get("model_type", "llama")]]}
        raw.pop("eagle_config", None)
    proposal = proposal_config(raw.pop("speculators_config", None), "eagle3", DEFAULT_DRAFTED, verifier)
    taps = {LAYER_IDS: [each + 1 for each in config.tap_layers]} if config.tap_layers else {}
    return {
        "dtype": dtype,
        **raw,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": proposal,
        "transformer_layer_config": layer,
        "target_hidden_size": raw.get("target_hidden_size") or config.target_hidden_size,
        **taps,
    }


def specforge_json(config: Eagle3Config) -> dict[str, Any]:
    """Returns the config.json of this drafter in SpecForge's format."""
    raw = config.raw
    if "transformer_layer_config" not in raw:
        return raw if raw.get("architectures") else {**raw, "architectures": [ARCHITECTURE]}
    left_out = ("transformer_layer_config", "architectures", "speculators_model_type", "speculators_config")
    rest = {key: value for key, value in raw.items() if key not in left_out and value is not None}
    taps = {"use_aux_hidden_state": True, LAYER_IDS: list(config.tap_layers)} if config.tap_layers else {}
    return {**raw["transformer_layer_config"], **rest, "architectures": [ARCHITECTURE], "eagle_config": taps}


def check_eagle3_fit(config: Eagle3Config, target: Sizes, taps: Iterable[int], has_embedding: bool) -> None:
    """Raises DrafterMismatchError, with both values, if the drafter does not fit the target. `taps`: target layers
    whose hidden states it reads. `has_embedding`: True if it has a token embedding of its own; its hidden size may then
    differ from the target's."""
    wrong = [layer for layer in taps if not 0 <= layer < target.num_layers]
    size, hidden_size = config.shape.hidden_size, target.hidden_size
    refuse_mismatch(
        (config.target_hidden_size != hidden_size, "hidden size", config.target_hidden_size, hidden_size),
        (not has_embedding and size != hidden_size, "embedding (the drafter has none of its own)", size, hidden_size),
        (config.shape.vocab_size != target.vocab_size, "vocabulary", config.shape.vocab_size, target.vocab_size),
        (bool(wrong), "tapped layers", wrong, f"{target.num_layers} layers"),
    )


def _shape(layer: Mapping[str, Any], path: Path) -> DecoderConfig:
    kind = layer.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in FAMILY:
        raise UnsupportedModelError(
            f"{path}: EAGLE-3 layers of model_type {short(kind)} are not implemented: llama and qwen3 are"
        )
    values = {name: value for name, value in layer.items() if name not in ("use_sliding_window", "layer_types")}
    if layer.get("max_position_embeddings") is None:
        values.pop("max_position_embeddings", None)
    shape = decoder_config(FAMILIES[FAMILY[kind]] | values | {"architectures": [FAMILY[kind]]}, path)
    types = layer.get("layer_types")
    if not isinstance(types, list) or "sliding_attention" not in types:
        return replace(shape, windows=())
    if len(types) != shape.num_layers:
        raise ModelFileError(
            f"{path}: layer_types names {len(types)} layers, there are {shape.num_layers}: correct config.json"
        )
    window = whole(dict(layer), "sliding_window", path)
    return replace(shape, windows=tuple(window if each == "sliding_attention" else None for each in types))


def _taps(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    own = part(dict(raw), path, "eagle_config")
    part(dict(raw), path, "speculators_config", "verifier")
    check_flags(own, path, ("use_aux_hidden_state",))
    if own.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            f"{path}: use_aux_hidden_state is false: drafters that read the last hidden state alone are not implemented"
        )
    ids, first, name = raw.get(LAYER_IDS), 1, LAYER_IDS
    if ids is None:
        ids, first, name = own.get(LAYER_IDS), 0, f"eagle_config.{LAYER_IDS}"
    if ids is None:
        return ()
    if not isinstance(ids, list) or not ids or not all(is_whole(each) and each >= first for each in ids):
        raise ModelFileError(f"{path}: {name} must list layers from {first} on (got {short(ids)}): correct config.json")
    if len(set(ids)) < len(ids):
        raise ModelFileError(f"{path}: {name} names a layer twice: correct config.json")
    return tuple(each - first for each in ids)


def _check_flags(config: Eagle3Config, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises ModelFileError if a norm's flag and weights do not match: the network would draft badly without an
    error."""
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        is_there = any(name.startswith(prefix) for name in tensors)
        if is_there != getattr(config, flag):
            state, flag_value = ("are there", "true") if is_there else ("are missing", "false")
            raise ModelFileError(
                f"{folder}: weights {prefix}* {state}, and {flag} is {str(not is_there).lower()} in config.json: "
                f"set {flag} to {flag_value} if that is how it was trained"
            )


def _ids(config: Eagle3Config, maps: Mapping[str, Tensor], folder: Path) -> Tensor:
    size, vocab_size = config.draft_vocab_size, config.shape.vocab_size
    ids = torch.arange(size)
    if "d2t" in maps:
        if maps["d2t"].shape != (size,) or maps["d2t"].is_floating_point():
            raise ModelFileError(
                f"{folder}: d2t must hold {size} whole numbers, one for each row of the head: fetch it again"
            )
        ids = ids + maps["d2t"].long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < size:
        raise ModelFileError(
            f"{folder}: d2t does not name {size} different tokens of {vocab_size}: fetch the drafter again"
        )
    if "t2d" in maps:
        has_token = maps["t2d"].bool()
        if has_token.shape != (vocab_size,) or int(has_token.sum()) != size or not bool(has_token[ids].all()):
            raise ModelFileError(f"{folder}: d2t and t2d name different tokens: fetch the drafter again")
    return ids


def _log_unknown(config: Eagle3Config, others: Mapping[str, Tensor], folder: Path) -> None:
    layer = config.raw.get("transformer_layer_config") or {}
    keys = (config.raw.keys() | layer.keys()) - {
        key for name in ("shape", "eagle", "meaningless") for key in KEYS[name]
    }
    for what, names in (("config.json", sorted(keys)), ("the weights", sorted(others))):
        if names:
            log.warning("%s: not understood and not used, of %s: %s", folder, what, ", ".join(names))

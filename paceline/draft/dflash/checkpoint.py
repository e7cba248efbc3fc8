"""DFlash checkpoints on disk: config.json and model.safetensors in z-lab's format, read and written unchanged, or in vLLM's
`speculators` format (`draft/formats/speculators.py`), read in z-lab's words.

`DFlashConfig.from_json` says what a config means (defaults as in the authors' `dflash` package, 0.1.0); the JSON object itself
is kept, unknown keys included, and is what `write_checkpoint` writes. Keys that nothing here knows are logged as a warning.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.draft import vocabulary
from paceline.draft.foresight import Foresight
from paceline.draft.formats import gguf_reader as gguf_reading
from paceline.draft.formats import speculators
from paceline.draft.formats.packed import PACKED, packed, read_packed
from paceline.draft.vocabulary import ALL_TOKENS, DRAFT_IDS, Vocabulary
from paceline.errors import CacheError, DrafterMismatchError, ModelFileError, UnsupportedModelError, reraised
from paceline.model.checkpoint import check_finite, load_tensors, read_json
from paceline.model.config.decoder import (
    FAMILIES,
    LARGEST,
    TABLES,
    DecoderConfig,
    decoder_config,
    fraction,
    is_whole,
    short,
    whole,
)
from paceline.model.gguf.container import is_gguf
from paceline.model.target import Sizes
from paceline.runs.folder import sync, sync_folder

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
DENSE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = 0o644
"""Of a drafter's files: servers often run as another user than the training."""
KNOWN_KEYS: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_keys.json").read_text(encoding="utf-8"))
log = logging.getLogger("paceline.draft")


@dataclass(frozen=True, slots=True)
class DFlash2Sizes:
    """What DFlash 2 adds to a DFlash network (`draft/dflash2/drafter.py`)."""

    conv_kernel_size: int
    """Taps of a convolution: a slot and those before it."""
    conv_group_size: int
    """Neighbouring channels that share what a slot adds to the taps."""
    selector_rank: int
    selector_top_k: int
    """Candidates of a slot."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash drafter: a Qwen3-shaped decoder without embedding and head, and how it is attached to its target."""

    shape: DecoderConfig
    """Sizes, rope and windows of the draft layers; its vocabulary is the target's and not meant here."""
    vocab_size: int | None
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    """Tapped target layers; layer l is Transformers' hidden_states[l + 1]."""
    block_size: int
    mask_token_id: int
    is_causal: tuple[bool, ...]
    """Per draft layer: whether a slot sees only the slots before it. Without the key, only sliding layers are so."""
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float
    """0 is off."""
    raw: dict[str, Any]
    """config.json as it was read."""
    from_anchor: bool = False
    """Whether slot k says the token behind its position, so that the anchor's slot drafts too; else the token at it. Files call
    this sample_from_anchor, or shift_label."""
    second: DFlash2Sizes | None = None
    """Of a DFlash 2 drafter; None: DFlash v1."""
    foresight: Foresight = field(default_factory=Foresight)
    """How it guesses the target's draws: our own key `paceline`."""

    @property
    def num_slots(self) -> int:
        """Drafts of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path | str = "config.json") -> DFlashConfig:
        """Raises UnsupportedModelError for another format or architecture, ModelFileError for a missing or impossible key."""
        path = Path(path)
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, dict):
            raise ModelFileError(f"{path}: dflash_config must be an object: correct config.json")
        own = {**raw, **nested}
        _check_supported(raw, path)
        values = FAMILIES["Qwen3ForCausalLM"] | {"vocab_size": 1} | raw | {"architectures": ["Qwen3ForCausalLM"]}
        shape = decoder_config(values, path)
        num_target_layers = whole(own, "num_target_layers", path, 0, least=0) or None
        layer_ids = own.get("target_layer_ids")
        if layer_ids is None and num_target_layers is not None:
            layer_ids = default_layer_ids(num_target_layers, shape.num_layers)
        if not isinstance(layer_ids, list) or not layer_ids or not all(map(is_whole, layer_ids)):
            needed = "needs num_target_layers, or target_layer_ids as a list of layers"
            raise ModelFileError(f"{path}: config.json {needed} (got {short(layer_ids)}): correct it")
        if len(set(layer_ids)) < len(layer_ids):
            raise ModelFileError(f"{path}: target_layer_ids names a layer twice: correct config.json")
        return cls(
            shape=shape,
            vocab_size=whole(raw, "vocab_size", path, 0, least=0) or None,
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(layer_ids),
            block_size=whole(own, "block_size", path, 16, least=2),
            mask_token_id=whole(own, "mask_token_id", path, least=0),
            is_causal=_causal_layers(values, shape.num_layers, path),
            input_embedding_scale=fraction(own, "input_embedding_scale", 1.0, path, above=-LARGEST),
            output_multiplier=fraction(own, "output_multiplier", 1.0, path, above=-LARGEST),
            final_logit_softcapping=max(0.0, fraction(own, "final_logit_softcapping", 0.0, path, above=-LARGEST)),
            raw=raw,
            from_anchor=_flag(own, ("sample_from_anchor", "shift_label"), path),
            second=_second(raw, own, shape, path),
            foresight=Foresight.of(raw, path),
        )


def default_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The target layers a drafter of `num_layers` taps when its config names none: spread from layer 1 to the third last."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_layers - 1)) for index in range(num_layers)]


def new_config(
    hidden_size: int,
    vocab_size: int,
    num_target_layers: int,
    *,
    num_layers: int = 3,
    block_size: int = 8,
    head_dim: int = 64,
    intermediate_size: int | None = None,
    mask_token_id: int | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """config.json of a new drafter for a target of these sizes; `keys` overrides or adds any key of the format.

    The mask token defaults to the vocabulary's last id; one key head serves at most four query heads.
    """
    layer_ids = default_layer_ids(num_target_layers, num_layers)
    num_heads = max(1, hidden_size // head_dim)
    group = next(group for group in (4, 3, 2, 1) if num_heads % group == 0)
    return {
        "architectures": [ARCHITECTURE],
        **TABLES["drafter"]["always"],
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "num_target_layers": num_target_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // group,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size or -(-hidden_size * 8 // 3 // 64) * 64,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": vocab_size - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": sorted({min(max(layer, 0), num_target_layers - 1) for layer in layer_ids}),
        },
        **keys,
    }


def as_dflash2(raw: Mapping[str, Any], *, rank: int = 256, top_k: int = 16) -> dict[str, Any]:
    """config.json of a DFlash 2 drafter whose body is the DFlash v1 drafter that `raw` describes."""
    own = raw.get("dflash_config") or {}
    added = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank, "selector_top_k": top_k}
    return {**raw, "architectures": [ARCHITECTURE_2], "dflash_config": {**own, **added}}


def check_fit(config: DFlashConfig, target: Sizes, draft_ids: Tensor | None = None, head_VD: Tensor | None = None) -> None:
    """Raises DrafterMismatchError naming both values where a drafter and a target differ."""
    last_id = -1 if draft_ids is None else int(draft_ids.max())
    wrong_layers = [layer for layer in config.target_layer_ids if not 0 <= layer < target.num_layers]
    num_layers, vocab_size = target.num_layers, target.vocab_size
    rows = vocab_size if draft_ids is None else len(draft_ids)
    head = [rows, target.hidden_size] if head_VD is None else list(head_VD.shape)
    checks = (
        (config.shape.hidden_size != target.hidden_size, "hidden size", config.shape.hidden_size, target.hidden_size),
        (config.vocab_size not in (None, vocab_size), "vocabulary", config.vocab_size, vocab_size),
        (config.num_target_layers not in (None, num_layers), "target layers", config.num_target_layers, num_layers),
        (config.mask_token_id >= vocab_size, "mask token", config.mask_token_id, f"{vocab_size} tokens"),
        (last_id >= vocab_size, "draft vocabulary", f"token {last_id}", f"{vocab_size} tokens"),
        (head != [rows, target.hidden_size], "head", f"{head[0]} x {head[-1]}", f"{rows} tokens x {target.hidden_size}"),
        (bool(wrong_layers), "tapped layers", wrong_layers, f"{num_layers} layers"),
    )
    for is_wrong, what, drafter_value, target_value in checks:
        if is_wrong:
            raise DrafterMismatchError(
                f"{what}: the drafter says {drafter_value}, the target has {target_value}: "
                "give a drafter that was trained for this target"
            )


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a DFlash drafter, in whichever format and version."""
    names = f"{raw.get('architectures')} {raw.get('speculators_model_type')}"
    return "dflash_config" in raw or "dflash" in names.lower()


@dataclass(frozen=True, slots=True)
class StoredDrafter:
    """What a drafter's folder holds, whichever format it is in."""

    config: DFlashConfig
    """Its `raw` is in z-lab's words."""
    tensors: dict[str, Tensor]
    """The network's, memory-mapped, by z-lab's names."""
    vocabulary: Vocabulary = ALL_TOKENS
    others: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the file that nothing here reads; a copy in the same format has them too."""
    form: str = "z-lab"
    unread: tuple[str, ...] = ()
    """Keys of config.json that nothing here knows, and files whose contents are not read."""


def read_stored(folder: Path | str) -> StoredDrafter:
    """A drafter's folder; its weights may be sharded, or packed in 8 bits (`draft/formats/packed.py`). Or its GGUF
    file. What is not understood is logged.

    Raises ModelNotFoundError, ModelFileError or UnsupportedModelError.
    """
    folder = Path(folder).expanduser()
    if is_gguf(folder):
        raw, tensors, within, others = gguf_reading.read_gguf(folder)
        return StoredDrafter(DFlashConfig.from_json(raw, folder), tensors, within, others, "gguf")
    own = read_json(folder / "config.json")
    form = "speculators" if "speculators_model_type" in own else "z-lab"
    config = DFlashConfig.from_json(speculators.to_z_lab(own, folder) if form == "speculators" else own, folder)
    file = weights_file(folder)
    stored = read_packed(file, config.vocab_size) if file.name == PACKED else dict(load_tensors(folder))
    tensors, within, others = vocabulary.split(stored, folder)
    if config.shape.num_layers > len(tensors):
        raise ModelFileError(
            f"{folder} holds {len(tensors)} tensors for {config.shape.num_layers} layers: fetch the drafter again"
        )
    for name, tensor in tensors.items():
        check_finite(name, tensor, folder)
    unread = unread_keys(own, form) + tuple(
        sorted(each.name for kind in ("*.pt", "*.pth", "*.bin") for each in folder.glob(kind))
    )
    for what in (unread, tuple(others)):
        if what:
            log.warning("%s: not read, as nothing here knows what to do with it: %s", folder, ", ".join(what))
    return StoredDrafter(config, tensors, vocabulary.read_beside(folder) or within, others, form, unread)


def unread_keys(raw: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """Keys of a config.json in this format that nothing here knows."""
    harmless = {*KNOWN_KEYS["without effect"]}
    inner = "dflash_config" if form == "z-lab" else "transformer_layer_config"
    nested = raw.get(inner)
    known = {*KNOWN_KEYS["z-lab"], *harmless}
    found = [name for name in raw if name not in harmless | {*KNOWN_KEYS[form]}]
    return (*found, *(f"{inner}.{name}" for name in (nested if isinstance(nested, dict) else ()) if name not in known))


def read_checkpoint(folder: Path | str) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Config and network of a folder, as `read_stored`."""
    stored = read_stored(folder)
    return stored.config, stored.tensors


def weights_file(folder: Path) -> Path:
    """The file of a drafter's weights that this version has written, whether it is there or not."""
    dense, small = folder / DENSE, folder / PACKED
    return small if small.is_file() and not dense.exists() else dense


def read_draft_ids(folder: Path | str) -> Tensor | None:
    """The reduced draft vocabulary of a drafter: int64 ids, ascending, or None. Raises ModelFileError on a damaged file.

    z-lab's format has no place for it: there it is a file of its own, which other readers do not see. They draft with the same
    weights over the whole head.
    """
    folder = Path(folder).expanduser()
    if is_gguf(folder):
        return read_stored(folder).vocabulary.ids
    if beside := vocabulary.read_beside(folder):
        return beside.ids
    return None if (folder / PACKED).is_file() else vocabulary.split(dict(load_tensors(folder)), folder)[1].ids


def write_checkpoint(
    folder: Path | str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    draft_ids: Tensor | None = None,
    *,
    head_VD: Tensor | None = None,
    in_8_bits: bool = False,
) -> None:
    """Write config.json and model.safetensors, or `in_8_bits` the file of `draft/formats/packed.py`, which paceline
    alone reads; a reader never sees half a file, nor a new folder half filled. `head_VD`: the drafter's own head, a row
    for each of `draft_ids`.

    Into a folder that exists the files are moved one at a time, weights first. Beside the weights stands an index that names
    them alone: vLLM and SGLang read every *.safetensors of a folder without one. Raises CacheError when it cannot be written.
    """
    folder = Path(folder).expanduser()
    remedy = "free space or choose another folder"
    with reraised(CacheError, f"the drafter cannot be written to {folder}", remedy, OSError, SafetensorError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "drafter"
            made.mkdir()
            dense = _saved(tensors)
            weights, file = (packed(dense, draft_ids), PACKED) if in_8_bits else (dense, DENSE)
            save_file(weights, made / file, {"format": "pt"})
            if not in_8_bits:
                total = sum(tensor.nbytes for tensor in dense.values())
                index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(dense, DENSE)}
                (made / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            if head_VD is not None and draft_ids is None:
                draft_ids = torch.arange(len(head_VD))
            if draft_ids is not None:
                save_file(_saved({"ids": draft_ids} | ({} if head_VD is None else {"head": head_VD})), made / DRAFT_IDS)
            (made / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            _publish(made, folder)


def _saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _publish(made: Path, folder: Path) -> None:
    for file in made.iterdir():
        file.chmod(READABLE)
    sync_folder(made)
    if not folder.exists():
        os.rename(made, folder)
    for name in (DENSE, PACKED, INDEX, DRAFT_IDS, "config.json") if made.exists() else ():
        if (made / name).exists():
            os.replace(made / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    sync(folder, folder.parent)


def _causal_layers(values: dict[str, Any], num_layers: int, path: Path) -> tuple[bool, ...]:
    if values.get("is_causal") is not None:
        return (bool(values["is_causal"]),) * num_layers
    types = values.get("layer_types")
    if types is None:
        has_window = values.get("use_sliding_window") is True and values.get("sliding_window") is not None
        first = whole(values, "max_window_layers", path, 28, least=0) if has_window else num_layers
        return tuple(index >= first for index in range(num_layers))
    return tuple(kind == "sliding_attention" for kind in types)


def _flag(own: Mapping[str, Any], names: tuple[str, ...], path: Path) -> bool:
    values = [own[name] for name in names if own.get(name) is not None]
    if not all(isinstance(value, bool) for value in values) or len(set(values)) > 1:
        raise ModelFileError(f"{path}: {' and '.join(names)} must be true or false, and agree: correct config.json")
    return bool(values and values[0])


def _second(raw: Mapping[str, Any], own: dict[str, Any], shape: DecoderConfig, path: Path) -> DFlash2Sizes | None:
    names = DFlash2Sizes.__slots__
    if ARCHITECTURE_2 not in (raw.get("architectures") or []):
        if found := [name for name in names if own.get(name) is not None]:
            raise ModelFileError(
                f"{path}: {found[0]} is of DFlash 2, the architecture is {ARCHITECTURE}: without convolution and selector its "
                f"drafts would be others; write {ARCHITECTURE_2} in config.json"
            )
        return None
    sizes = DFlash2Sizes(*(whole(own, name, path, least=1) for name in names))
    if shape.hidden_size % sizes.conv_group_size:
        raise ModelFileError(
            f"{path}: conv_group_size {sizes.conv_group_size} does not divide hidden_size {shape.hidden_size}: correct them"
        )
    whole(dict(raw), "vocab_size", path, least=1)
    return sizes


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    if "speculators_model_type" in raw:
        raise UnsupportedModelError(f"{path}: this config is in speculators format: read its folder, which makes it z-lab's")
    names = raw.get("architectures") or [ARCHITECTURE]
    if not isinstance(names, list):
        raise ModelFileError(f"{path}: architectures must be a list: correct config.json")
    if not {ARCHITECTURE, ARCHITECTURE_2} & set(map(str, names)) or raw.get("model_type", "qwen3") != "qwen3":
        raise UnsupportedModelError(
            f"{path}: drafter architecture {names[0]} on model_type {raw.get('model_type')} is not implemented: "
            f"give a {ARCHITECTURE} or {ARCHITECTURE_2} on qwen3"
        )
    types = raw.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    is_list = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if types is not None and (not is_list or len(types) != raw.get("num_hidden_layers") or not set(types) <= known):
        raise ModelFileError(f"{path}: layer_types must name full_attention or sliding_attention once a layer: correct it")

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
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.formats import gguf_reader as gguf_reading
from paceline.draft.formats import speculators
from paceline.draft.formats.packed import PACKED, packed, read_packed
from paceline.draft.vocabulary import ALL_TOKENS, DRAFT_IDS, Vocabulary
from paceline.errors import CacheError, ModelFileError, reraised
from paceline.model.checkpoint import check_finite, load_tensors, read_json
from paceline.model.gguf.container import is_gguf
from paceline.runs.folder import sync, sync_folder

DENSE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = 0o644
"""Of a drafter's files: servers often run as another user than the training."""
KNOWN_KEYS: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_keys.json").read_text(encoding="utf-8"))
log = logging.getLogger("paceline.draft")


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
    return StoredDrafter(config, tensors, vocabulary.read_draft_ids(folder) or within, others, form, unread)


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
    if beside := vocabulary.read_draft_ids(folder):
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

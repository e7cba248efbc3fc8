"""Reads and writes DFlash checkpoints: config.json and model.safetensors in z-lab's format, unchanged. vLLM's
`speculators` format is read too, converted to z-lab's keys (`draft/formats/speculators.py`).

The config's JSON object is kept, unknown keys included, and `write_checkpoint` writes it back.
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
from paceline.draft.vocabulary import ALL_TOKENS, DRAFT_IDS, HEAD, Vocabulary
from paceline.errors import CacheError, ModelFileError, reraised
from paceline.model.checkpoint import check_finite, load_tensors, read_json
from paceline.model.gguf.container import is_gguf
from paceline.runs.folder import sync, sync_folder

DENSE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = 0o644
"""File mode of a drafter's files: readable by all users, because servers often run as another user than the
training."""
KNOWN_KEYS: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_keys.json").read_text(encoding="utf-8"))
log = logging.getLogger("paceline.draft")


@dataclass(frozen=True, slots=True)
class StoredDrafter:
    """Contents of a drafter's folder or GGUF file. Config keys and tensor names are z-lab's; those of other formats
    were converted."""

    config: DFlashConfig
    """The parsed config; its field `raw` has z-lab's keys."""
    tensors: dict[str, Tensor]
    """The network's tensors, memory-mapped, under z-lab's names."""
    vocabulary: Vocabulary = ALL_TOKENS
    others: dict[str, Tensor] = field(default_factory=dict)
    """Tensors in the files that paceline does not use. An export in the format of `speculators` contains them; other
    formats leave them out."""
    form: str = "z-lab"
    unread: tuple[str, ...] = ()
    """Unknown keys of config.json, and names of files that are ignored."""


def read_stored(folder: Path | str) -> StoredDrafter:
    """Reads a DFlash, DFlash 2 or DSpark drafter from its folder or GGUF file. A folder's weights may be in several
    files, or in one file packed in 8 bits (`draft/formats/packed.py`). Logs unknown keys and tensors as a warning.

    Raises UnsupportedModelError if the format or architecture is not supported, ModelFileError if a file is missing or
    damaged.
    """
    folder = Path(os.path.expanduser(folder))
    if is_gguf(folder):
        raw, tensors, within, others = gguf_reading.read_gguf(folder)
        config = DFlashConfig.from_json(raw, folder)
        vocabulary.check_sizes(within, config.vocab_size, config.shape.hidden_size, folder)
        return StoredDrafter(config, tensors, within, others, "gguf")
    raw = read_json(folder / "config.json")
    form = "speculators" if "speculators_model_type" in raw else "z-lab"
    config = config_of(raw, folder)
    file = weights_file(folder)
    stored = read_packed(file, config.vocab_size) if file.name == PACKED else dict(load_tensors(folder))
    tensors, within, others = vocabulary.split(stored, folder, config.vocab_size)
    if separate := vocabulary.read_draft_ids(folder):
        is_within = config.has_own_width and separate.head_VD is None and within.head_VD is not None
        within = vocabulary.with_head(separate, within.head_VD, file) if is_within else separate
    vocabulary.check_sizes(within, config.vocab_size, config.shape.hidden_size, folder)
    if config.markov:
        tensors = speculators.with_our_names(tensors, within.ids, config.vocab_size)
    if config.shape.num_layers > len(tensors):
        what = f"{folder}: {len(tensors)} tensors, for {config.shape.num_layers} layers"
        raise ModelFileError(f"{what}: config and weights are of different drafters")
    for name, tensor in tensors.items():
        check_finite(name, tensor, folder)
    unread = unread_keys(raw, form) + tuple(
        sorted(each.name for pattern in ("*.pt", "*.pth", "*.bin") for each in folder.glob(pattern))
    )
    for what in (unread, tuple(others)):
        if what:
            log.warning("%s: not read, as nothing here knows what to do with it: %s", folder, ", ".join(what))
    return StoredDrafter(config, tensors, within, others, form, unread)


def config_of(raw: dict[str, Any], folder: Path) -> DFlashConfig:
    """Parses the config.json `raw` of a drafter's folder, in z-lab's format or in that of `speculators`. Raises
    UnsupportedModelError if the format or architecture is not supported, ModelFileError for an invalid key."""
    return DFlashConfig.from_json(speculators.to_z_lab(raw, folder) if "speculators_model_type" in raw else raw, folder)


def unread_keys(raw: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """Returns the keys of a config.json that paceline does not know. `form`: "z-lab" or "speculators"."""
    harmless = {*KNOWN_KEYS["without effect"]}
    inner = "dflash_config" if form == "z-lab" else "transformer_layer_config"
    nested = raw.get(inner)
    known = {*KNOWN_KEYS["z-lab"], *harmless}
    unknown = [name for name in raw if name not in harmless | {*KNOWN_KEYS[form]}]
    inside = [f"{inner}.{name}" for name in nested if name not in known] if isinstance(nested, dict) else []
    return (*unknown, *inside)


def weights_file(folder: Path) -> Path:
    """Returns the path of the drafter's weights: model.safetensors, or model-q8_0.safetensors (8 bits) if the folder
    has only that. The file may be missing."""
    dense, small = folder / DENSE, folder / PACKED
    return small if small.is_file() and not dense.exists() else dense


def read_draft_ids(folder: Path | str) -> Tensor | None:
    """Returns the token ids of a drafter's reduced draft vocabulary, int64, ascending; None if it drafts over all
    tokens. `folder`: its folder or GGUF file. Raises ModelFileError for a damaged file.

    z-lab's format has no field for a draft vocabulary, so paceline stores it in a file that other programs ignore: they
    draft over all tokens.
    """
    folder = Path(os.path.expanduser(folder))
    if is_gguf(folder):
        return read_stored(folder).vocabulary.ids
    if separate := vocabulary.read_draft_ids(folder):
        return separate.ids
    return None if weights_file(folder).name == PACKED else vocabulary.split(dict(load_tensors(folder)), folder)[1].ids


def write_checkpoint(
    folder: Path | str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    draft_ids: Tensor | None = None,
    *,
    head_VD: Tensor | None = None,
    in_8_bits: bool = False,
) -> None:
    """Writes a drafter's config.json (the JSON object `raw`) and weights (`tensors`) into a folder.

    - `draft_ids`: token ids of the draft vocabulary, ascending; None: all tokens.
    - `head_VD`: the drafter's own LM head, one row per token of the draft vocabulary; None: the drafter uses the
      target's.
    - `in_8_bits`: round matrices to 8 bits, in a file that only paceline reads.

    A new folder appears only when all its files are written. In an existing folder, files are replaced one at a time,
    weights first. Raises CacheError if writing fails.
    """
    folder = Path(os.path.expanduser(folder))
    remedy = "free space or choose another folder"
    with reraised(CacheError, f"the drafter cannot be written to {folder}", remedy, OSError, SafetensorError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            staging = Path(scratch) / "drafter"
            staging.mkdir()
            if head_VD is not None and draft_ids is None:
                draft_ids = torch.arange(len(head_VD))
            head = {} if head_VD is None else {"head": head_VD}
            is_within = in_8_bits and head_VD is not None and raw.get("target_hidden_size") is not None
            dense = _saved({**tensors, HEAD: head_VD} if is_within and head_VD is not None else tensors)
            weights, file = (packed(dense, draft_ids), PACKED) if in_8_bits else (dense, DENSE)
            save_file(weights, staging / file, {"format": "pt"})
            if not in_8_bits:
                total = sum(tensor.nbytes for tensor in dense.values())
                index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(dense, DENSE)}
                (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            if draft_ids is not None:
                save_file(_saved({"ids": draft_ids} | ({} if is_within else head)), staging / DRAFT_IDS)
            (staging / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            _publish(staging, folder)


def _saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _publish(staging: Path, folder: Path) -> None:
    for file in staging.iterdir():
        file.chmod(READABLE)
    sync_folder(staging)
    if not folder.exists():
        os.rename(staging, folder)
    # A folder that existed was not replaced as a whole: its files are, one by one.
    for name in (DENSE, PACKED, INDEX, DRAFT_IDS, "config.json") if staging.exists() else ():
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    sync(folder, folder.parent)

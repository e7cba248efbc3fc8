"""Writes a copy of a target that contains a trained MTP layer, for programs that read the layer there, such as vLLM's
method mtp.

Files of the target are copied. Files with tensors of the layer are rewritten with the trained ones, in the data type
and under the names of the original; experts that the file stores as one tensor are combined again. If the target has no
such layer, it is written as an additional file, and config.json gets the keys for it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.draft.mtp.checkpoint import COPIES, MtpLayer, target_names
from paceline.errors import CacheError, DrafterMismatchError, UnsupportedModelError, reraised
from paceline.model.checkpoint import check_header, config_json, existing, read_tensors, shards_of
from paceline.model.config.decoder import decoder_config
from paceline.model.layout import FUSED
from paceline.model.stored_experts import TOGETHER
from paceline.runs.folder import check_new, sync, sync_folder

WHOLE, INDEX, NEW = "model.safetensors", "model.safetensors.index.json", "model-mtp.safetensors"


def stitch(layer: MtpLayer, target: Path, out: Path, *, links: bool = False) -> list[str]:
    """Writes a copy of the target into the new folder `out`, with this MTP layer. The layer replaces the target's own
    MTP layer, or is added if the target has no such layer. Returns the names of the replaced or added tensors. `links`:
    link to unchanged weight files, instead of copying them.

    Raises CacheError if `out` has files or cannot be written, DrafterMismatchError if the layer was made for another
    target, ModelNotFoundError if there is no target at that path, ModelFileError if the target is damaged,
    UnsupportedModelError if the target is not supported or its own MTP layer is quantised.
    """
    check_new(out)
    raw, files = config_json(target := existing(target)), shards_of(target)
    config = decoder_config(raw, target)
    for what, mine, theirs in (
        ("hidden size", layer.config.hidden_size, config.hidden_size),
        ("vocabulary", layer.config.vocab_size, config.vocab_size),
        ("layers", decoder_config(layer.raw, target).num_layers, config.num_layers),
    ):
        if mine != theirs:
            raise DrafterMismatchError(f"{what}: the mtp layer is of a target with {mine}, {target} has {theirs}")
    remedy = "free space or choose another folder"
    with reraised(CacheError, f"the model cannot be written to {out}", remedy, OSError, SafetensorError):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            staging = Path(scratch) / "model"
            staging.mkdir()
            names = _replace(target_names(layer), target, files, staging, links) or _add(layer, staging, raw)
            sync_folder(staging)
            staging.rename(out)
            sync(out.parent)
    return names


def _replace(
    ours: Mapping[str, Tensor], target: Path, files: Mapping[Path, list[str]], out: Path, links: bool
) -> list[str]:
    """Copy all files, replacing the layer's tensors; returns the names of the replaced ones."""
    beginnings, replaced = tuple({_beginning(name) for name in ours}), list[str]()
    for file in sorted(each for each in target.iterdir() if each.is_file()):
        own = [name for name in _names(file, files) if name.startswith(beginnings)]
        if not own:
            if links and file in files:
                (out / file.name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, out / file.name)
            continue
        tensors = read_tensors(file)
        _save(tensors | {name: _stored(name, tensors[name], ours) for name in own}, out / file.name)
        replaced += own
    return replaced


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors to a file that others may read as the umask allows; safetensors gives it mode 0600."""
    save_file(tensors, file, {"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)


def _beginning(name: str) -> str:
    """The name's prefix: `mtp.` or `model.layers.N.`."""
    return "mtp." if name.startswith("mtp.") else ".".join(name.split(".")[:3]) + "."


def _names(file: Path, files: Mapping[Path, list[str]]) -> list[str]:
    """Names of the model's tensors in a file."""
    if file not in files or files[file]:
        return files.get(file, [])
    check_header(file)
    with safe_open(file, framework="pt") as whole:
        return list(whole.keys())


def _stored(name: str, original: Tensor, ours: Mapping[str, Tensor]) -> Tensor:
    """The trained tensor for a name of the target's file, in that file's dtype."""
    tensor = _fused(name, original, ours)
    if tensor.shape != original.shape or not original.is_floating_point() or original.element_size() == 1:
        raise UnsupportedModelError(
            f"tensor {name!r} of the target's mtp layer is {original.dtype} of shape {tuple(original.shape)}, "
            "a trained one is not written so: use the drafter's folder (--drafter) beside the target"
        )
    return tensor.to(original.dtype).contiguous()


def _fused(name: str, original: Tensor, ours: Mapping[str, Tensor]) -> Tensor:
    if name in ours:
        return ours[name]
    owner, _, kind = name.rpartition(".")
    if any(f".{copy}" in name for copy in COPIES):
        return original
    if match := TOGETHER.fullmatch(name):
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up" else ("down_proj",)
        names = [[f"{match[1]}.{expert}.{part}.weight" for part in parts] for expert in range(len(original))]
        if all(each in ours for expert in names for each in expert):
            return torch.stack([torch.cat([ours[each] for each in expert]) for expert in names])
    for fused, parts in FUSED.items():
        each = [f"{owner.removesuffix(fused)}{part}.{kind}" for part in parts]
        if owner.endswith(f".{fused}") and all(part in ours for part in each):
            return torch.cat([ours[part] for part in each])
    raise UnsupportedModelError(
        f"tensor {name!r} of the target's mtp layer has no counterpart in the trained one: use the drafter's folder "
        "(--drafter) beside the target"
    )


def _add(layer: MtpLayer, out: Path, raw: dict[str, Any]) -> list[str]:
    """Add a layer that the target did not have: to its only file, or as an additional file."""
    tensors = {name: tensor.contiguous() for name, tensor in target_names(layer).items()}
    if (out / WHOLE).is_file():
        _save(read_tensors(out / WHOLE) | tensors, out / NEW)
        (out / NEW).replace(out / WHOLE)
    else:
        _save(tensors, out / NEW)
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(tensors, NEW)
        if "total_size" in (index.get("metadata") or {}):
            index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if not layer.tells_normed:
        text = json.dumps({**raw, "num_nextn_predict_layers": 1}, indent=2) + "\n"
        (out / "config.json").write_text(text, encoding="utf-8")
    return sorted(tensors)

"""Creates a drafter from its name: a key of DRAFTERS, a folder, a GGUF file or a hub id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from paceline import hub
from paceline.config import EngineConfig
from paceline.draft import shipped
from paceline.draft.base import Drafter, NoDrafter, Stamp
from paceline.draft.dflash.config import is_dflash
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.draft.eagle3.checkpoint import is_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.formats.family import read_drafter
from paceline.draft.formats.gguf_reader import is_gguf_drafter
from paceline.draft.mtp.checkpoint import is_mtp
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.small_model import SmallModelDrafter
from paceline.errors import ConfigError, ModelFileError, ModelNotFoundError, shown
from paceline.model.backends import load_target
from paceline.model.checkpoint import read_json
from paceline.model.target import Target


def _default(target: Target, target_name: str, **options: Any) -> Drafter:
    """The drafter that ships for this target, else prompt lookup; prints a notice if one ships but is missing."""
    folder = shipped.find_or_report(target_name) if target_name in shipped.SHIPPED else None
    return read_drafter(folder, **options) if folder else NgramDrafter(**options)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "default": _default,
    "none": lambda target, target_name, num_drafted=None: NoDrafter(),
    "ngram": lambda target, target_name, **options: NgramDrafter(**options),
    "mtp": lambda target, target_name, **options: MtpDrafter.of_target(target_name, **options),
    "random-dflash": lambda target, target_name, **options: DFlashDrafter.random(target, **options),
    "random-dflash2": lambda target, target_name, **options: DFlash2Drafter.random(target, **options),
    "random-dspark": lambda target, target_name, **options: DSparkDrafter.random(target, **options),
    "random-eagle3": lambda target, target_name, **options: Eagle3Drafter.random(target, **options),
}
Trained = DFlashDrafter | Eagle3Drafter | MtpDrafter
"""A drafter that training writes."""
Kind = Literal["dflash", "mtp", "eagle3", ""]
READERS: dict[Kind, Callable[..., Trained]] = {
    "dflash": read_drafter,
    "mtp": MtpDrafter.from_folder,
    "eagle3": Eagle3Drafter.from_folder,
}


def make_drafter(spec: str | Drafter | None, target: Target, *, target_name: str = "", **options: Any) -> Drafter:
    """Creates the drafter that `spec` names:

    - "default": the drafter that ships for this target, or prompt lookup if none ships or it cannot be downloaded
    - "none" or None: plain decoding
    - "ngram": prompt lookup
    - "mtp": the target's own MTP layer
    - "random-dflash" and other names that begin with "random-": random weights
    - a checkpoint (a folder, a GGUF file, a hub id or a built-in model): the drafter in it; if it is a language
      model, that model drafts
    - a Drafter object: the object itself

    `target_name`: name of the target, for "default" and "mtp". `options` other than None go to the drafter's
    constructor. Raises ModelNotFoundError for an unknown name, ConfigError for a Drafter object with options,
    UnsupportedModelError or ModelFileError if a checkpoint cannot be read.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(spec, Drafter):
        if options:
            raise ConfigError(f"a ready {type(spec).__name__} takes no options: set num_drafted where it is made")
        return spec
    if not isinstance(spec, str | Path | None) or (isinstance(spec, str) and not spec.strip()):
        raise ConfigError(f"a drafter must be a name, a path or a Drafter, not {shown(spec)}")
    name = "none" if spec is None else str(spec)
    source, stamp = origin_of(name)
    drafter = _read(stamp.path, target, options) if stamp.path else DRAFTERS[name](target, target_name, **options)
    drafter.source, drafter.stamp = source, stamp
    return drafter


def origin_of(name: str) -> tuple[str, Stamp]:
    """Returns (source, stamp) of the drafter with this name; downloads its files if necessary. Source: the absolute
    path of a local drafter, or the name of any other. Stamp: the state of its files, by which later changes are
    detected; empty for a method without files, such as "ngram". Raises ModelNotFoundError for an unknown name."""
    if name in DRAFTERS:
        return name, Stamp()
    stamp, local = Stamp.of(checkpoint_of(name).absolute()), Path(name).expanduser()
    return str(local.resolve()) if local.exists() else name, stamp


def read_trained(path: Path, **options: Any) -> Trained:
    """Reads a DFlash or EAGLE-3 drafter or an MTP layer from a folder or GGUF file. `options` go to the drafter's
    constructor. Raises ModelFileError if the path holds no such drafter or a file is damaged, UnsupportedModelError if
    the format or architecture is not supported."""
    return READERS[_trained_kind(path)](path, **options)


def _read(path: Path, target: Target, options: dict[str, Any]) -> Drafter:
    if kind_of(path):
        return read_trained(path, **options)
    # Anything else is a language model that drafts.
    cache, dtype, device = target.cache, str(target.dtype).removeprefix("torch."), str(target.device)
    settings = EngineConfig(str(path), dtype=dtype, device=device, max_batch=cache.num_rows, max_len=cache.max_len)
    return SmallModelDrafter(load_target(settings), **options)


def folder_of(name: str, target_name: str | None = None) -> Path:
    """Returns the path of a trained drafter's checkpoint; downloads it if necessary. `name` is one of:

    - a checkpoint: a folder, a GGUF file or a hub id
    - a built-in model: means the drafter that ships for this model
    - "default": means the drafter that ships for `target_name`

    Raises ModelNotFoundError for an unknown name, DownloadError or CacheError if a download fails, ModelFileError if
    the checkpoint is neither a DFlash or EAGLE-3 drafter nor an MTP layer, ConfigError for "default" if no drafter
    ships for the target.
    """
    if name == "default":
        if target_name not in shipped.SHIPPED:
            having = ", ".join(sorted(shipped.SHIPPED))
            raise ConfigError(
                f"default is the drafter that ships for a model: name that model (--model), one of {having}"
            )
        name = target_name
    folder = shipped_or_checkpoint(name)
    _trained_kind(folder)
    return folder


def kind_of(path: Path) -> Kind:
    """Returns the type of the drafter in a folder or GGUF file: "dflash" (DFlash, DFlash 2 or DSpark), "mtp" (a folder
    that holds only an MTP layer) or "eagle3"; "" for anything else."""
    if not path.is_dir():
        return "dflash" if is_gguf_drafter(path) else ""
    raw = read_json(path / "config.json")
    return "dflash" if is_dflash(raw) else "mtp" if is_mtp(raw) else "eagle3" if is_eagle3(raw) else ""


def _trained_kind(path: Path) -> Kind:
    if kind := kind_of(path):
        return kind
    raise ModelFileError(
        f"{path} holds no DFlash or EAGLE-3 drafter: give a folder with the config.json of one, or a GGUF file"
    )


def shipped_or_checkpoint(name: str) -> Path:
    """Returns the path of the drafter that ships for the built-in model `name`. If `name` is not such a model, returns
    the path of the checkpoint `name` (see `checkpoint_of`). Raises ModelNotFoundError for an unknown name,
    DownloadError or CacheError if a download fails."""
    return shipped.find(name) if name in shipped.SHIPPED else checkpoint_of(name)


def checkpoint_of(name: str) -> Path:
    """Returns the path of the checkpoint `name`, which is a path of a folder or GGUF file, a hub id or a built-in
    model; downloads it if necessary. Raises ModelNotFoundError for an unknown name, DownloadError or CacheError if a
    download fails."""
    try:
        return hub.resolve(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"no drafter {name!r}: give one of {', '.join(DRAFTERS)}, a folder, a hub id, "
            f"or a built-in model ({', '.join(hub.BUILTINS)})"
        ) from error

"""Checkpoints of a training run: a drafter in z-lab's format, and beside it all that is needed to go on.

    runs/x/checkpoints/step-000200/     config.json, model.safetensors (float32), optimiser.safetensors, trainer.json
    runs/x/checkpoints/latest           the name of the newest whole one

A checkpoint is written into a folder of its own and becomes the newest by one rename; the one before stays until then.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.checkpoint import write_checkpoint
from paceline.errors import CacheError, ConfigError, PacelineError
from paceline.model.checkpoint import load_tensors, read_json
from paceline.runlog import plain, write_whole

LATEST = "latest"
FREE_TO_CHANGE = ("checkpoint_minutes", "heldout_every", "gradient_checkpointing", "parallel")
"""Settings that do not decide what is learned: a resumed run may have others."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    trainer: dict[str, Any]
    """step, place in the data, seconds so far, config, counts."""

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of the network and of the optimisers. Raises CacheError when they cannot be read."""
        try:
            read_json(self.folder / "config.json")
            return dict(load_tensors(self.folder)), load_file(self.folder / "optimiser.safetensors")
        except (PacelineError, OSError, SafetensorError) as error:
            raise CacheError(f"{self.folder} cannot be read ({error}): delete {self.folder.parent} to start again") from error


def save_checkpoint(
    folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], optimisers: dict[str, Tensor], trainer: dict[str, Any]
) -> Path:
    """Write checkpoint `step-N`, make it the newest, drop older ones. Raises CacheError; the newest one then stays."""
    newest = folder / f"step-{trainer['step']:06d}"
    described = json.dumps(plain(trainer), indent=1) + "\n"
    if _newest_name(folder) == newest.name and (newest / "trainer.json").read_text(encoding="utf-8") == described:
        return newest  # the same step of the same run: to replace it would leave a moment without any
    scratch = folder / f".{newest.name}"
    try:
        for left in folder.glob(".*step-*"):  # of a run killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        write_checkpoint(scratch, raw, tensors)
        save_file(optimisers, scratch / "optimiser.safetensors")
        (scratch / "trainer.json").write_text(described, encoding="utf-8")
        shutil.rmtree(newest, ignore_errors=True)
        scratch.rename(newest)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CacheError(
            f"the checkpoint {newest} cannot be written ({error}): free space and run the same command, it goes on from "
            "the last one"
        ) from error
    write_whole(folder / LATEST, newest.name + "\n")
    for old in folder.glob("step-*"):
        if old != newest:
            shutil.rmtree(old, ignore_errors=True)
    return newest


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None when it has none. Raises CacheError when it cannot be read."""
    name = _newest_name(folder)
    if name is None:
        return None
    newest = folder / name
    try:
        trainer = json.loads((newest / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"{newest} is not a whole checkpoint ({error}): delete {folder} to start again") from error
    return Checkpoint(newest, trainer)


def _newest_name(folder: Path) -> str | None:
    pointer = folder / LATEST
    return pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None


def check_same_config(ours: dict[str, Any], theirs: dict[str, Any], folder: Path) -> None:
    """Raises ConfigError that shows every difference which would change what is learned."""
    ours, theirs = _flat(plain(ours)), _flat(theirs)
    differences = [
        f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} now"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and name not in FREE_TO_CHANGE
    ]
    if differences:
        raise ConfigError(
            f"{folder} was begun with other settings ({'; '.join(differences)}): use the same, or another --out, or continue "
            "from its drafter with --init"
        )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat

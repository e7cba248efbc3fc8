"""Checkpoints of a training run: a drafter in z-lab's format, and beside it all that is needed to go on.

    runs/x/checkpoints/step-000200/     config.json, model.safetensors (float32), optimiser.safetensors, trainer.json
    runs/x/checkpoints/best/            the same without an optimiser: the weights that served held-out prompts best

A checkpoint is written into a folder beside and gets its name when it is whole; the one before stays until then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.errors import CacheError, ConfigError, PacelineError, check_memory, reraised
from paceline.model.checkpoint import load_tensors, read_json
from paceline.report.tables import differences
from paceline.runs.folder import plain, sync, sync_folder
from paceline.train.processes.agreement import mark_of, mark_of_text

LENGTH = ("epochs", "max_steps", "max_minutes")
"""A resumed run may go on for longer, or end sooner: the learning rate follows the new length from there."""
MEMORY = ("gradient_checkpointing", "parallel", "blocks_per_pack", "tokens_per_pack", "attention")
"""They decide how much is held at once; what is learned stays the same up to rounding."""
LOOKS = ("checkpoint_minutes", "heldout_every", "keep", "keep_last", "serve_share")
FREE_TO_CHANGE = (*LENGTH, *MEMORY, *LOOKS, "selector_share")
"""Settings that a resumed run may have otherwise; how a `regenerate` may grow says train/answers/run_identity.py."""


BEST, BEFORE = "best", ".best-before"


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    folder: Path
    trainer: dict[str, Any]
    """step, place in the data, seconds so far, config, counts."""
    weights: dict[str, Tensor]
    """Of the network."""
    optimisers: dict[str, Tensor]

    @property
    def mark(self) -> str:
        """A hash of its tensors."""
        every = {**self.weights, **{f"optimiser {name}": tensor for name, tensor in self.optimisers.items()}}
        return f"{mark_of_text(repr([(name, mark_of(tensor)) for name, tensor in sorted(every.items())])):x}"


def save_checkpoint(
    folder: Path,
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    optimisers: dict[str, Tensor],
    trainer: dict[str, Any],
    keep_last: int = 1,
) -> Path:
    """Write checkpoint `step-N`, drop all but the newest `keep_last`. Raises CacheError; the ones before then stay."""
    newest = folder / f"step-{trainer['step']:06d}"
    described = json.dumps(plain(trainer), indent=1) + "\n"
    if (newest / "trainer.json").is_file() and (newest / "trainer.json").read_text(encoding="utf-8") == described:
        return newest  # the same step of the same run: to replace it would leave a moment without any
    scratch = folder / f".{newest.name}"
    for left in folder.glob(".*step-*"):  # of a run killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    remedy = "free space and run the same command, it goes on from the last one"
    try:
        with reraised(CacheError, f"the checkpoint {newest} cannot be written", remedy, OSError, SafetensorError):
            write_checkpoint(scratch, raw, tensors)
            save_file(optimisers, scratch / "optimiser.safetensors")
            (scratch / "trainer.json").write_text(described, encoding="utf-8")
            sync_folder(scratch)
            shutil.rmtree(newest, ignore_errors=True)
            scratch.rename(newest)
            sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    others = sorted(old for old in folder.glob("step-*") if old != newest)
    later = [old for old in others if old > newest]  # of another run in the same folder
    for old in {*others[: max(0, len(others) - keep_last + 1)], *later}:
        shutil.rmtree(old, ignore_errors=True)
    return newest


def save_best(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    """Write the weights that are the best so far; `told` says at which step and how good. Raises CacheError."""
    best, scratch, before = folder / BEST, folder / f".{BEST}", folder / BEFORE
    refused = reraised(CacheError, f"the checkpoint {best} cannot be written", "free space", OSError, SafetensorError)
    try:
        with refused:
            write_checkpoint(scratch, raw, tensors)
            (scratch / "trainer.json").write_text(json.dumps(plain(told)) + "\n", encoding="utf-8")
            sync_folder(scratch)
            _take_up(folder)
            if best.is_dir():
                best.rename(before)  # two renames, and no moment in which neither is there
            scratch.rename(best)
            sync(folder)
            shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _take_up(folder: Path) -> None:
    """Give the best weights their name again where a run was killed between the two renames of `save_best`."""
    if not (folder / BEST).is_dir() and (folder / BEFORE).is_dir():
        (folder / BEFORE).rename(folder / BEST)
    shutil.rmtree(folder / BEFORE, ignore_errors=True)


def best_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Weights of `save_best`, and what it was told; None when there are none. Raises CacheError when they cannot be read."""
    best = folder / BEST
    with reraised(CacheError, f"{best} cannot be read", "train with --keep last", OSError, ValueError, SafetensorError):
        _take_up(folder)
        if not best.is_dir():
            return None
        return dict(load_tensors(best)), json.loads((best / "trainer.json").read_text(encoding="utf-8"))


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None when it has none. Raises CacheError when it cannot be read."""
    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        return None
    try:
        read_json(newest / "config.json")
        trainer = json.loads((newest / "trainer.json").read_text(encoding="utf-8"))
        return Checkpoint(newest, trainer, dict(load_tensors(newest)), load_file(newest / "optimiser.safetensors"))
    except (PacelineError, OSError, MemoryError, ValueError, SafetensorError) as error:
        check_memory(error)
        raise CacheError(f"{newest} is not a whole checkpoint ({error}): delete {folder} to start again") from error


def check_same(folder: Path, before: dict[str, Any], now: dict[str, Any], or_else: str = "") -> None:
    """Raises ConfigError that shows every difference of the settings which would change what is learned or answered."""
    found = {name: pair for name, pair in differences(before, plain(now)).items() if name not in FREE_TO_CHANGE}
    if found:
        listed = "; ".join(f"{name}: {old!r} there, {new!r} now" for name, (old, new) in found.items())
        raise ConfigError(f"{folder} was begun with other settings ({listed}): use the same, or another --out{or_else}")

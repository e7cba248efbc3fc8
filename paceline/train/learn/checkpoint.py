"""Checkpoints of a training run: a drafter in z-lab's format, with the state needed to resume.

    runs/x/checkpoints/step-000200/     config.json, model.safetensors (float32), optimiser.safetensors, trainer.json
    runs/x/checkpoints/best/            the same without an optimiser: the weights that served held-out prompts best

A checkpoint is written to a scratch folder and renamed when it is complete; the previous one is deleted afterwards.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
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
"""Settings that may lengthen or shorten a resumed run; the learning rate then follows the new length."""
MEMORY = ("gradient_checkpointing", "parallel", "blocks_per_pack", "tokens_per_pack", "attention")
"""Settings that decide how much memory is used; they change the results only by rounding."""
LOOKS = ("checkpoint_minutes", "heldout_every", "keep", "keep_last", "serve_share")
FREE_TO_CHANGE = (*LENGTH, *MEMORY, *LOOKS, "selector_share")
"""Settings that may differ in a resumed training; `regenerate` has its own list in train/answers/run_identity.py."""
BEST, BEFORE = "best", ".best-before"


class Checkpoint(NamedTuple):
    """A complete training checkpoint, read from disk: weights, optimiser states, and the trainer's progress."""

    folder: Path
    trainer: dict[str, Any]
    """Contents of trainer.json: step, place in the data, seconds so far, config, counts."""
    weights: dict[str, Tensor]
    """The network's weights."""
    optimisers: dict[str, Tensor]

    @property
    def mark(self) -> str:
        """Hash of the network's weights and the optimiser states, in hexadecimal. Processes compare it to check that
        they have read the same checkpoint."""
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
    """Writes a checkpoint to the folder `step-N` in `folder`; returns its path. Then deletes the oldest checkpoints, so
    that `keep_last` remain; also deletes checkpoints of later steps, which are left over from another run. `raw`: the
    drafter's config.json; `tensors`: its weights; `optimisers`: the optimiser states; `trainer`: contents of
    trainer.json. Raises CacheError for disk errors; all earlier checkpoints then remain."""
    newest = folder / f"step-{trainer['step']:06d}"
    described = json.dumps(plain(trainer), indent=1) + "\n"
    if (newest / "trainer.json").is_file() and (newest / "trainer.json").read_text(encoding="utf-8") == described:
        return newest  # already written; replacing it would leave a moment without a checkpoint
    for leftover in folder.glob(".*step-*"):  # of a run that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    with _scratch(newest, "free space and run the same command, it goes on from the last one") as scratch:
        write_checkpoint(scratch, raw, tensors)
        save_file(optimisers, scratch / "optimiser.safetensors")
        (scratch / "trainer.json").write_text(described, encoding="utf-8")
        sync_folder(scratch)
        shutil.rmtree(newest, ignore_errors=True)
        scratch.rename(newest)
        sync(folder)
    others = sorted(old for old in folder.glob("step-*") if old != newest)
    later = [old for old in others if old > newest]  # of another run in the same folder
    for old in {*others[: max(0, len(others) - keep_last + 1)], *later}:
        shutil.rmtree(old, ignore_errors=True)
    return newest


@contextlib.contextmanager
def _scratch(final: Path, remedy: str) -> Iterator[Path]:
    """Yields a scratch folder next to `final`, deleted at the end. Raises CacheError for disk errors."""
    scratch = final.with_name(f".{final.name}")
    try:
        with reraised(CacheError, f"the checkpoint {final} cannot be written", remedy, OSError, SafetensorError):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_best(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], figures: dict[str, Any]) -> None:
    """Writes the best weights so far to `folder`/best, in place of earlier ones. `raw`: the drafter's config.json;
    `figures`: stored with the weights, such as the step and the acceptance length. Raises CacheError for disk
    errors."""
    best, before = folder / BEST, folder / BEFORE
    with _scratch(best, "free space") as scratch:
        write_checkpoint(scratch, raw, tensors)
        (scratch / "trainer.json").write_text(json.dumps(plain(figures)) + "\n", encoding="utf-8")
        sync_folder(scratch)
        _finish_rename(folder)
        if best.is_dir():
            best.rename(before)  # two renames, so that one of the two always exists
        scratch.rename(best)
        sync(folder)
        shutil.rmtree(before, ignore_errors=True)


def _finish_rename(folder: Path) -> None:
    """Restores the name of the best weights if a run was interrupted between the two renames of `save_best`."""
    if not (folder / BEST).is_dir() and (folder / BEFORE).is_dir():
        (folder / BEFORE).rename(folder / BEST)
    shutil.rmtree(folder / BEFORE, ignore_errors=True)


def best_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Reads the best weights of a training run, as `save_best` wrote them to `folder`. Returns (name -> weight, figures
    such as step and acceptance length), or None if no best weights were saved. Raises CacheError if the files cannot be
    read."""
    best = folder / BEST
    with reraised(CacheError, f"{best} cannot be read", "train with --keep last", OSError, ValueError, SafetensorError):
        _finish_rename(folder)
        if not best.is_dir():
            return None
        return dict(load_tensors(best)), json.loads((best / "trainer.json").read_text(encoding="utf-8"))


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Reads the checkpoint of the largest step in `folder`, from which a run resumes. Returns None if there are no
    checkpoints. Raises CacheError if it is incomplete or unreadable."""
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
    """Checks that a run in `folder` can be resumed with the settings `now`; `before` are the settings that it stored.
    Raises ConfigError, with a list of the differences, if any setting differs that is not in `FREE_TO_CHANGE`.
    `or_else`: further advice at the end of the message."""
    changed = {name: pair for name, pair in differences(before, plain(now)).items() if name not in FREE_TO_CHANGE}
    if changed:
        listed = "; ".join(f"{name}: {old!r} there, {new!r} now" for name, (old, new) in changed.items())
        raise ConfigError(f"{folder} was begun with other settings ({listed}): use the same, or another --out{or_else}")

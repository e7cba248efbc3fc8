"""The target's hidden states for training: computed as documents come, or once and kept on disk.

`OnlineFeatures` runs the target in the same process. `cache_features` runs it once over every document and writes safetensors
files that `CachedFeatures` reads: worth it as soon as documents are seen more than once. The size is known beforehand,
announced, and refused when the disk lacks it.

    runs/x/features/document-000000.safetensors     taps [positions, F], final [positions, D] when the loss needs it

`ScaledFeatures` brings them to one scale while a drafter learns, exactly undone in every checkpoint. Hidden states of a
language model differ by orders of magnitude: in the built-in model later layers are ten times louder than early ones, a few
dimensions a hundred times louder than the rest, and half of their energy is a mean that says nothing. An optimiser that moves
every weight by about the same step (Adam, Muon) then learns from the loud ones above all. So each feature is multiplied by a
power of two near one over its size, and the column of `fc` that reads it is trained in those units. Powers of two are exact in
every format: the drafter that is saved computes bit for bit what was trained.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.errors import CacheError, reraised
from paceline.model.target import ForwardBatch, Target
from paceline.report.statistics import num_common
from paceline.runs.folder import whole_file
from paceline.runs.ranks import Ranks
from paceline.train.documents.dataset import Document

FREE_MARGIN, MOST_MARGIN = 0.05, 4e9
"""Share of the disk that must stay free, and what is enough in bytes however large it is."""
NUM_SAMPLED = 32
"""Documents that the scale is measured on."""
MOST_SAMPLED = 2048
"""Positions of one of them, about."""
POSITIONS_PER_PASS = 2048
"""Positions of a document that the target runs at once."""
LOUD = 3.0
"""Positions whose norm is this times the median are left out of the measurement: attention sinks, one in some hundred."""


@dataclass(frozen=True, slots=True)
class Features:
    """One document's hidden states."""

    taps_SF: Tensor
    """Outputs of the tapped layers side by side."""
    final_SD: Tensor | None
    """The final normed hidden state at each position, when asked for: it predicts the token after it."""


class FeatureSource(Protocol):
    """Where the loop gets hidden states from."""

    def of(self, number: int) -> Features:
        """Hidden states of document `number`."""
        ...


class MeasuredSource(FeatureSource, Protocol):
    """A source of known documents, of known size."""

    @property
    def documents(self) -> Sequence[Document]: ...

    @property
    def bytes_per_position(self) -> int:
        """Of the features of one position, as the source gives them."""
        ...


class OnlineFeatures:
    """Runs the target over one document at a time; a beginning shared with the document before is not run again."""

    def __init__(self, target: Target, documents: Sequence[Document], tap_layers: tuple[int, ...], needs_final: bool) -> None:
        self._target, self.documents = target, documents
        last = target.num_layers - 1
        self._needs_final, self._has_final = needs_final, last in tap_layers
        self._tap_layers = tap_layers
        target.set_taps((*tap_layers, last) if needs_final and not self._has_final else tap_layers)
        self._again: tuple[int, Features] | None = None
        """The latest document's number and features: of a long one, several packs in turn ask for them."""
        self._last: tuple[list[int], Tensor, int, int] | None = None
        """Of the document before: tokens, taps, row, and the row's generation, which tells whether another has had the row."""

    @property
    def num_bytes(self) -> int:
        """Of all documents' features, as they would be on disk."""
        return sum(len(document) for document in self.documents) * self.bytes_per_position

    @property
    def bytes_per_position(self) -> int:
        return (len(self._tap_layers) + self._needs_final) * self._target.hidden_size * self._target.dtype.itemsize

    def of(self, number: int) -> Features:
        if self._again is not None and self._again[0] == number:
            return self._again[1]
        self._again = number, self._compute(number)
        return self._again[1]

    def _compute(self, number: int) -> Features:
        tokens, cache = self.documents[number].tokens.tolist(), self._target.cache
        row = cache.allocate()
        assert row is not None, "training owns the target's cache"
        try:
            known_SF = self._known(tokens, row)
            taps_SF = self._run(tokens, row, known_SF)
        finally:
            cache.free(row)
        self._last = tokens, taps_SF, row, cache.generations[row]
        size = self._target.hidden_size
        if not self._needs_final:
            return Features(taps_SF, None)
        if self._has_final:
            slot = self._tap_layers.index(self._target.num_layers - 1)
            return Features(taps_SF, taps_SF[:, slot * size : (slot + 1) * size])
        return Features(taps_SF[:, :-size], taps_SF[:, -size:])

    def _run(self, tokens: list[int], row: int, known_SF: Tensor | None) -> Tensor:
        """Taps of all positions, of which the first few may be known; a long document's in passes of bounded size."""
        parts, begin = ([], 0) if known_SF is None else ([known_SF], len(known_SF))
        for start in range(begin, len(tokens), POSITIONS_PER_PASS):
            piece = tokens[start : start + POSITIONS_PER_PASS]
            taps_TF = self._target.forward(ForwardBatch([row], [start], [len(piece)], piece, "none")).taps_TF
            assert taps_TF is not None
            parts.append(taps_TF.clone() if self._target.overwrites_taps else taps_TF)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _known(self, tokens: list[int], row: int) -> Tensor | None:
        """Taps of the beginning that this document shares with the one before, whose keys and values `row` still holds."""
        if self._last is None or not self._target.is_width_invariant:
            return None
        before, taps_SF, last_row, generation = self._last
        if (row, self._target.cache.generations[row]) != (last_row, generation + 1):
            return None
        length = num_common(before, tokens[:-1])
        if not length:
            return None
        self._target.cache.adopt(row, row, length)
        return taps_SF[:length]


class Form:
    """How features are kept: as the target gave them. `quantised.Int8` keeps them in 8 bits."""

    def encode(self, features: Features) -> dict[str, Tensor]:
        """Contiguous tensors of their own, on the CPU."""
        tensors = {"taps": features.taps_SF.cpu().contiguous()}
        if features.final_SD is not None:  # which may be a part of the taps
            tensors["final"] = features.final_SD.cpu().clone(memory_format=torch.contiguous_format)
        return tensors

    def decode(self, tensors: dict[str, Tensor]) -> Features:
        """Raises KeyError when these are not what `encode` made."""
        return Features(tensors["taps"], tensors.get("final"))

    def bytes_of(self, num_bytes: int) -> int:
        """Of one position, which has so many bytes as it is."""
        return num_bytes

    def coder(self, features: Features) -> Callable[[], Features]:
        """Keeps features in memory; what it returns gives them back."""
        tensors = {name: tensor.clone() if name == "taps" else tensor for name, tensor in self.encode(features).items()}
        return lambda: self.decode(tensors)


PLAIN = Form()


@dataclass(frozen=True, slots=True)
class CachedFeatures:
    """Reads what `cache_features` wrote."""

    folder: Path
    form: Form = PLAIN

    def path(self, number: int) -> Path:
        return self.folder / f"document-{number:06d}.safetensors"

    def of(self, number: int) -> Features:
        path = self.path(number)
        remedy = "delete the folder to have it made again"
        with reraised(CacheError, f"{path} cannot be read", remedy, SafetensorError, OSError, KeyError):
            return self.form.decode(load_file(path))


def cache_features(
    folder: Path,
    source: MeasuredSource,
    ranks: Ranks | None = None,
    on_document: Callable[[], None] = lambda: None,
    form: Form = PLAIN,
) -> CachedFeatures:
    """Write the files that are missing; each process its share. Raises CacheError when the disk is too small or refuses.

    The folder's name should hold `fingerprint(...)`: files of other documents, layers or targets are not looked at.
    """
    kept = CachedFeatures(folder, form)
    num_bytes = sum(len(document) for document in source.documents) * kept.form.bytes_of(source.bytes_per_position)
    check_room(folder, num_bytes - sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    for number in (ranks or Ranks()).share_of(len(source.documents)):
        path = kept.path(number)
        if not path.exists():
            tensors = kept.form.encode(source.of(number))
            with whole_file(path, "free space and run again, what is written stays; or use --features online") as scratch:
                save_file(tensors, scratch)
        on_document()
    return kept


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises CacheError when the disk of `folder` lacks this much, with a margin."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    if num_bytes > disk.free - min(FREE_MARGIN * disk.total, MOST_MARGIN):
        raise CacheError(
            f"features need {num_bytes / 1e9:.1f} GB in {folder}, {disk.free / 1e9:.1f} GB are free: use --features online, "
            "fewer prompts, or another --out"
        )


def fingerprint(
    target_name: str, dtype: torch.dtype, documents: Sequence[Document], tap_layers: tuple[int, ...], needs_final: bool
) -> str:
    """Names a set of features by all that decides its contents."""
    digest = hashlib.sha256(repr((target_name, str(dtype), tap_layers, needs_final)).encode())
    for document in documents:
        digest.update(document.key.encode())
        digest.update(document.tokens.tobytes())
    return digest.hexdigest()[:16]


class ScaledFeatures:
    """A feature source with every feature multiplied by its own power of two."""

    def __init__(self, source: FeatureSource, scale_F: Tensor) -> None:
        self._source, self._scale_F = source, scale_F

    def of(self, number: int) -> Features:
        features = self._source.of(number)
        return Features(features.taps_SF * self._scale_F.to(features.taps_SF.device, features.taps_SF.dtype), features.final_SD)


def measure_scale(source: FeatureSource, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """(scale [F], powers of two; mean [F] of the scaled features), over quiet positions of evenly spread documents."""
    step = max(1, len(documents) // NUM_SAMPLED)
    taps = [_sampled(source.of(number).taps_SF) for number in range(0, len(documents), step)[:NUM_SAMPLED]]
    sample_SF = torch.cat(taps)
    norm_S = sample_SF.norm(dim=1)
    quiet_SF = sample_SF[norm_S <= LOUD * norm_S.median()]
    size_F = quiet_SF.square().mean(0).sqrt().clamp(min=1e-6)
    scale_F = torch.exp2(-size_F.log2().round())
    return scale_F, quiet_SF.mean(0) * scale_F


def _sampled(taps_SF: Tensor) -> Tensor:
    """Float32; of a long document only some positions, evenly spread."""
    return taps_SF[:: max(1, len(taps_SF) // MOST_SAMPLED)].float().cpu()


def stored_scale(file: Path, source: FeatureSource, documents: Sequence[Document], is_first: bool) -> tuple[Tensor, Tensor]:
    """As `measure_scale`, measured once a run: what a resumed run read back would mean otherwise is another unit.

    Raises CacheError when the file is damaged or cannot be written (by the first process).
    """
    with reraised(CacheError, f"{file} cannot be read", "use another --out", OSError, SafetensorError, KeyError):
        if file.is_file():
            stored = load_file(file)
            return stored["scale"], stored["mean"]
        scale_F, mean_F = measure_scale(source, documents)
    if is_first:
        with whole_file(file, "use another --out") as scratch:
            save_file({"scale": scale_F, "mean": mean_F}, scratch)
    return scale_F, mean_F


@torch.no_grad()
def train_in_scaled_units(network: DFlashNetwork | Eagle3Network, scale_F: Tensor) -> None:
    """From now on `fc.weight` reads scaled features, while `state_dict` gives and `load_state_dict` takes the real one."""
    fc = network.fc
    scale_F = scale_F.to(fc.weight.device)

    def save(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * scale_F

    def load(module: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / scale_F.to(state[f"{prefix}weight"].dtype)

    fc.weight.div_(scale_F)
    fc.register_state_dict_post_hook(save)
    fc.register_load_state_dict_pre_hook(load)


@torch.no_grad()
def begin_without_mean(network: DFlashNetwork | Eagle3Network, mean_F: Tensor) -> None:
    """First weights of `fc`, in scaled units: alike for all features, and blind to their mean."""
    weight, mean_F = network.fc.weight, mean_F.to(network.fc.weight.device)
    weight.mul_(0.02 / weight.std(dim=0, keepdim=True).clamp(min=1e-12))
    weight.sub_(torch.outer(weight @ mean_F, mean_F) / mean_F.square().sum())

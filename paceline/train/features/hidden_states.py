"""Computes the target's hidden states for training, when needed or once into files.

`OnlineFeatures` runs the target in the same process. `cache_features` runs it once over every document and writes
safetensors files for `CachedFeatures`, which pays off if documents are seen more than once. It fails at the start if
the disk lacks the room. A file is named after its document's tokens, and a folder after all else that decides the
values, so other runs find what is there.

    runs/x/features-<fingerprint>/3f/3f...safetensors     taps [positions, F], final [positions, D] if needed

`ScaledFeatures` brings all features to a similar size during training. Late layers of a language model are ten times
larger than early ones, and a few dimensions a hundred times larger than the rest. An optimiser that moves every weight
by about the same step (Adam, Muon) would learn mostly from these. So each feature is multiplied by a power of two near
the inverse of its size, and the column of `fc` that reads it is trained in those units. Powers of two are exact in
every format: the saved drafter computes bit for bit what was trained.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
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
"""Free space to leave on the disk: this share of it, but at most this many bytes."""
NUM_SAMPLED = 32
"""Number of documents from which the scale is measured."""
MOST_SAMPLED = 2048
"""Approximate number of positions that are used of each sampled document, at most."""
POSITIONS_PER_PASS = 2048
"""Positions of a document per forward pass of the target."""
LOUD = 3.0
"""Positions with a norm above this multiple of the median (attention sinks) are ignored when the scale is measured."""


@dataclass(frozen=True, slots=True)
class Features:
    """The target's hidden states at the S positions of one document."""

    taps_SF: Tensor
    """Outputs of the tapped target layers at each position, concatenated."""
    final_SD: Tensor | None
    """Final hidden state at each position, after the last norm, which predicts the next token; None if not
    requested."""


class FeatureSource(Protocol):
    """Provides the training loop with the target's hidden states of each document."""

    def of(self, number: int) -> Features:
        """Returns the hidden states of document `number`, an index in this source's list of documents."""
        ...


class MeasuredSource(FeatureSource, Protocol):
    """A feature source that also provides its list of documents, and the size of their hidden states."""

    @property
    def documents(self) -> Sequence[Document]: ...

    @property
    def bytes_per_position(self) -> int:
        """Bytes of the hidden states of one token position, before they are encoded for storage."""
        ...


class OnlineFeatures:
    """Computes the target's hidden states of a document when they are requested. The beginning that a document shares
    with the previously requested one is not computed again."""

    def __init__(
        self, target: Target, documents: Sequence[Document], tap_layers: tuple[int, ...], needs_final: bool
    ) -> None:
        self._target, self.documents = target, documents
        last = target.num_layers - 1
        self._needs_final, self._has_final = needs_final, last in tap_layers
        self._tap_layers = tap_layers
        target.set_taps((*tap_layers, last) if needs_final and not self._has_final else tap_layers)
        self._again: tuple[int, Features] | None = None
        """Number and features of the latest document: several consecutive packs of a long document request them."""
        self._last: tuple[list[int], Tensor, int, int] | None = None
        """The previous document's tokens, taps, cache row, and row generation, which shows if the row was reused
        since."""

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
        return Features(taps_SF[:, :-size], taps_SF[:, -size:])  # the last layer's tap is after the final norm

    def _run(self, tokens: list[int], row: int, known_SF: Tensor | None) -> Tensor:
        """Returns the taps of all positions, of which a prefix may be known, in passes of bounded size."""
        parts, begin = ([], 0) if known_SF is None else ([known_SF], len(known_SF))
        for start in range(begin, len(tokens), POSITIONS_PER_PASS):
            piece = tokens[start : start + POSITIONS_PER_PASS]
            taps_TF = self._target.forward(ForwardBatch([row], [start], [len(piece)], piece, "none")).taps_TF
            assert taps_TF is not None
            parts.append(taps_TF.clone() if self._target.overwrites_taps else taps_TF)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _known(self, tokens: list[int], row: int) -> Tensor | None:
        """Returns the taps of the prefix shared with the previous document, if `row` still holds its keys and
        values."""
        if self._last is None or not self._target.is_width_invariant:
            return None
        last_tokens, taps_SF, last_row, generation = self._last
        # Allocated only once since, by `_compute`: nothing else has written to the row.
        if (row, self._target.cache.generations[row]) != (last_row, generation + 1):
            return None
        length = num_common(last_tokens, tokens[:-1])
        if not length:
            return None
        self._target.cache.adopt(row, row, length)
        return taps_SF[:length]


class Form:
    """Format in which features (hidden states) are stored. This class stores them unchanged; the subclass
    `quantised.Int8` stores 8 bits per value."""

    @property
    def mark(self) -> str:
        """Text that distinguishes this format from others in `fingerprint`; empty for unchanged values."""
        return ""

    def encode(self, features: Features) -> dict[str, Tensor]:
        """Returns one document's features as named, contiguous CPU tensors that share no memory with each other."""
        tensors = {"taps": features.taps_SF.cpu().contiguous()}
        if features.final_SD is not None:  # which may be a part of the taps
            tensors["final"] = features.final_SD.cpu().clone(memory_format=torch.contiguous_format)
        return tensors

    def decode(self, tensors: dict[str, Tensor]) -> Features:
        """Converts stored tensors back to features. Raises KeyError if a tensor is missing."""
        return Features(tensors["taps"], tensors.get("final"))

    def bytes_of(self, num_bytes: int) -> int:
        """Returns the stored bytes of one token position. `num_bytes`: the bytes of its features before encoding."""
        return num_bytes

    def coder(self, features: Features) -> Callable[[], Features]:
        """Encodes `features` and holds only the encoded tensors, to save memory. Returns a function that decodes
        them."""
        # `encode` may return the source's own taps: a part of a larger tensor, which would stay in memory.
        tensors = {name: tensor.clone() if name == "taps" else tensor for name, tensor in self.encode(features).items()}
        return lambda: self.decode(tensors)


PLAIN = Form()


@dataclass(frozen=True, slots=True)
class CachedFeatures:
    """Reads each document's hidden states from a file in `folder`, written by `cache_features` in the format `form`.
    Documents with the same tokens share a file. A file is not checked against the target, so the folder's name must
    include `fingerprint(...)`."""

    folder: Path
    documents: Sequence[Document]
    form: Form = PLAIN

    def path(self, number: int) -> Path:
        """Returns the file of document `number`, named after a hash of its tokens."""
        name = hashlib.sha256(self.documents[number].tokens.tobytes()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"

    def missing(self) -> list[int]:
        """Returns the numbers of the documents that have no file yet. If several documents have the same tokens, and so
        share a file, only the first of them is returned."""
        first = dict[Path, int]()
        for number in range(len(self.documents)):
            first.setdefault(self.path(number), number)
        return [number for path, number in first.items() if not path.exists()]

    def check_room(self, missing: list[int], bytes_per_position: int) -> None:
        """Raises CacheError if the disk is too small for the features of the documents `missing` (their numbers), with
        some space left. `bytes_per_position`: bytes of the features of one token position, before encoding."""
        positions = sum(len(self.documents[number]) for number in missing)
        check_room(self.folder, positions * self.form.bytes_of(bytes_per_position))

    def of(self, number: int) -> Features:
        path = self.path(number)
        remedy = "delete it to have it computed again"
        with reraised(CacheError, f"{path} cannot be read", remedy, SafetensorError, OSError, KeyError):
            return self.form.decode(load_file(path))


def cache_features(
    cached: CachedFeatures,
    source: MeasuredSource,
    ranks: Ranks | None = None,
    on_document: Callable[[], None] = lambda: None,
    computing: Callable[[list[int]], AbstractContextManager[Callable[[int], Features]]] | None = None,
) -> CachedFeatures:
    """Computes the features of those documents of `cached` that have no file, and writes their files; returns `cached`.
    Several runs may write to the same folder concurrently.
    - `source`: computes the features of one document at a time.
    - `ranks`: the processes, each of which writes a share of the documents; None for a single process.
    - `on_document`: called once for each document of this process's share, to report progress.
    - `computing`: used in place of `source.of`, for example to compute several documents at once. It takes the numbers
      of the missing documents, and returns a context manager that yields a function, document number -> features.

    Raises CacheError if the disk is too small or fails."""
    share, missing = (ranks or Ranks()).share_of(len(cached.documents)), cached.missing()
    cached.check_room(missing, source.bytes_per_position)
    missing = [number for number in missing if number in share]
    for _ in range(len(share) - len(missing)):
        on_document()
    remedy = "free space and run again, what is written stays; or use --features online"
    with computing(missing) if computing else nullcontext(source.of) as compute:
        for number in missing:
            tensors = cached.form.encode(compute(number))
            with whole_file(cached.path(number), remedy) as scratch:
                save_file(tensors, scratch)
            on_document()
    return cached


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises CacheError if the disk of `folder` is too small for `num_bytes` of new features. Some of the disk must
    stay free: as many bytes again, but at most 5% of the disk (`FREE_MARGIN`) or 4 GB (`MOST_MARGIN`)."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    if num_bytes > disk.free - min(num_bytes, FREE_MARGIN * disk.total, MOST_MARGIN):
        raise CacheError(
            f"features need {num_bytes / 1e9:.1f} GB in {folder}, {disk.free / 1e9:.1f} GB are free: use --features "
            "online, fewer prompts, or another --out or --shared-features"
        )


def fingerprint(
    target: object, dtype: torch.dtype, tap_layers: tuple[int, ...], needs_final: bool, form: Form = PLAIN
) -> str:
    """Returns a hexadecimal hash of the arguments, for the name of a folder of stored hidden states. `target`: any
    object whose repr identifies the target's weights. `tap_layers`: the stored layers. `needs_final`: True if the final
    hidden states, before the LM head, are stored too."""
    identity = repr((target, str(dtype), tap_layers, needs_final, form.mark))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


class ScaledFeatures:
    """A feature source that scales the features of another source. Each of the F values per position is multiplied by
    its factor in scale_F [F]."""

    def __init__(self, source: FeatureSource, scale_F: Tensor) -> None:
        self._source, self._scale_F = source, scale_F

    def of(self, number: int) -> Features:
        features = self._source.of(number)
        scale_F = self._scale_F.to(features.taps_SF.device, features.taps_SF.dtype)
        return Features(features.taps_SF * scale_F, features.final_SD)


def measure_scale(source: FeatureSource, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Measures the magnitude and mean of each of the F features (values of the hidden state of one position). Returns
    (scale [F], mean [F]): the power of two by which to multiply a feature so that its root mean square is about 1, and
    the mean of the multiplied feature. It samples up to 32 documents, and ignores positions of unusually large norm
    (attention sinks)."""
    step = max(1, len(documents) // NUM_SAMPLED)
    taps = (source.of(number).taps_SF for number in range(0, len(documents), step)[:NUM_SAMPLED])
    sample_SF = torch.cat([taps_SF[:: max(1, len(taps_SF) // MOST_SAMPLED)].float().cpu() for taps_SF in taps])
    norm_S = sample_SF.norm(dim=1)
    quiet_SF = sample_SF[norm_S <= LOUD * norm_S.median()]
    size_F = quiet_SF.square().mean(0).sqrt().clamp(min=1e-6)
    scale_F = torch.exp2(-size_F.log2().round())
    return scale_F, quiet_SF.mean(0) * scale_F


def stored_scale(
    file: Path, source: FeatureSource, documents: Sequence[Document], is_first: bool, mark: str
) -> tuple[Tensor, Tensor]:
    """Returns (scale [F], mean [F]), as `measure_scale` defines them. They are read from `file`, so that a resumed run
    scales features as before. If the file is missing, or belongs to other features, they are measured; the process with
    `is_first` True then writes the file. `mark`: text that identifies the features. Raises CacheError if the file is
    damaged or cannot be written."""
    with reraised(CacheError, f"{file} cannot be read", "use another --out", OSError, SafetensorError, KeyError):
        if file.is_file():
            with safe_open(file, "pt") as stored:
                if (stored.metadata() or {}).get("features", mark) == mark:  # earlier versions wrote none
                    return stored.get_tensor("scale"), stored.get_tensor("mean")
        scale_F, mean_F = measure_scale(source, documents)
    if is_first:
        with whole_file(file, "use another --out") as scratch:
            save_file({"scale": scale_F, "mean": mean_F}, scratch, {"features": mark})
    return scale_F, mean_F


@torch.no_grad()
def train_in_scaled_units(network: DFlashNetwork | Eagle3Network, scale_F: Tensor) -> None:
    """Changes `fc`, the network's projection of the features, so that it takes features multiplied by scale_F [F],
    which have similar magnitudes. Its outputs stay the same. `state_dict` and `load_state_dict` still use weights for
    unscaled features."""
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
    """Initialises `fc`, the network's projection of the features, for scaled features. All F features get weights of
    the same standard deviation. The mean of the scaled features, mean_F [F], is projected to zero, so that the constant
    part of the inputs does not dominate the first outputs."""
    weight, mean_F = network.fc.weight, mean_F.to(network.fc.weight.device)
    weight.mul_(0.02 / weight.std(dim=0, keepdim=True).clamp(min=1e-12))
    weight.sub_(torch.outer(weight @ mean_F, mean_F) / mean_F.square().sum())

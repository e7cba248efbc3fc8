"""Hidden states of documents from the workers of a Ray cluster: the files of `cache_features`, byte for byte.

Each worker holds the target and computes documents as `OnlineFeatures` does; this process writes the files, so the workers need
no disk of ours. A worker that dies loses its batch, which another one computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from safetensors.torch import save

from paceline.config import EngineConfig
from paceline.model.backends import load_target, settle
from paceline.model.target import Target
from paceline.report.tables import Progress
from paceline.runs.folder import whole_file
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import PLAIN, CachedFeatures, OnlineFeatures, check_room, fingerprint
from paceline.train.processes.ray_cluster import Work, connected, shared_out

POSITIONS_PER_BATCH = 8192
"""Of documents that a worker computes before it sends them, about; one at least."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A document, and its place among all."""

    number: int
    document: Document


@dataclass(frozen=True, slots=True)
class File:
    """What stands in a document's file."""

    number: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """The job of a worker: the target reads documents."""

    settings: EngineConfig
    taps: tuple[int, ...]
    needs_final: bool

    def begin(self, num_threads: int | None) -> Work:
        """As Job."""
        settings = replace(self.settings, threads=self.settings.threads or num_threads)
        if settings.threads:
            import torch

            torch.set_num_threads(settings.threads)
        return partial(self._read, load_target(settle(settings)))

    def _read(self, target: Target, batch: list[Numbered]) -> list[File]:
        source = OnlineFeatures(target, [each.document for each in batch], self.taps, self.needs_final)
        return [File(each.number, save(PLAIN.encode(source.of(place)))) for place, each in enumerate(batch)]


def features_folder(
    config: TrainConfig, target: Target, documents: Sequence[Document], taps: tuple[int, ...], name: str, form: str = ""
) -> Path:
    """Where a run keeps these hidden states, by all that decides what they are."""
    mark = fingerprint(config.target.model, target.dtype, documents, taps, config.loop.loss.needs_target_probs)
    return config.out / f"{name}-{mark}{form}"


def cache_on_ray(
    config: TrainConfig, target: Target, documents: Sequence[Document], taps: tuple[int, ...], name: str, progress: Progress
) -> CachedFeatures:
    """Write the files that are missing; of the target only its sizes and its dtype are asked here.

    Raises CacheError when the disk is too small or refuses, and what `connected` and `shared_out` do.
    """
    needs_final = config.loop.loss.needs_target_probs
    folder = features_folder(config, target, documents, taps, name)
    width = (len(taps) + needs_final) * target.hidden_size * target.dtype.itemsize
    kept, length = CachedFeatures(folder), sum(map(len, documents))
    progress.say(f"features of {len(documents)} documents: {length * width / 1e9:.2f} GB in {folder}")
    check_room(folder, length * width - sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    missing = [Numbered(number, documents[number]) for number in range(len(documents)) if not kept.path(number).exists()]
    dtype = str(target.dtype).removeprefix("torch.")
    job = Reading(replace(config.target, dtype=dtype, max_batch=1, max_len=config.max_len), taps, needs_final)
    at_most = max(1, POSITIONS_PER_BATCH * len(documents) // max(1, length))
    with progress.bar("features", len(documents)) as advance:
        for _ in range(len(documents) - len(missing)):
            advance("features")
        if missing:
            with connected(config.elsewhere) as ray:
                for file in shared_out(ray, config.elsewhere, job, missing, at_most):
                    _write(kept.path(file.number), file.content)
                    advance("features")
    return kept


def _write(path: Path, content: bytes) -> None:
    with whole_file(path, "free space and run again, what is written stays") as scratch:
        scratch.write_bytes(content)

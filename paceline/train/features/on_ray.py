"""Computes hidden states on the workers of a Ray cluster, into the same files as `cache_features`, byte for byte.

Each worker loads the target and computes documents with `OnlineFeatures`; this process writes the files, so workers
need no shared disk. If a worker dies, another one computes its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from safetensors.torch import save

from paceline.config import EngineConfig
from paceline.model.adapter import adapter_digest, base_of, is_adapter
from paceline.model.backends import form_of, load_target, settle
from paceline.model.remote_embedding import light_folder
from paceline.model.target import Target
from paceline.report.tables import Progress
from paceline.runs.folder import whole_file
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import PLAIN, CachedFeatures, Form, OnlineFeatures, fingerprint
from paceline.train.processes.agreement import mark_of_text
from paceline.train.processes.ray_cluster import Work, connected, distributed

POSITIONS_PER_BATCH = 8192
"""Approximate positions of the documents that a worker computes before it sends them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The job of a Ray worker that computes hidden states: `begin` loads the target, and returns the function that
    processes a batch of (document number, document) pairs."""

    settings: EngineConfig
    taps: tuple[int, ...]
    needs_final: bool

    def begin(self, num_threads: int | None) -> Work:
        settings = replace(self.settings, threads=self.settings.threads or num_threads)
        if settings.threads:
            import torch

            torch.set_num_threads(settings.threads)
        return partial(self._read, load_target(settle(settings)))

    def _read(self, target: Target, batch: list[tuple[int, Document]]) -> list[tuple[int, bytes]]:
        source = OnlineFeatures(target, [document for _, document in batch], self.taps, self.needs_final)
        return [(number, save(PLAIN.encode(source.of(place)))) for place, (number, _) in enumerate(batch)]


def mark_of_target(config: TrainConfig, target: Target) -> int:
    """Returns a 64-bit hash that identifies the target, so that stored hidden states of another model are never read.
    It depends on:
    - path, names, sizes and modification times of the weight files, so it differs on machines with other paths;
    - the adapter and the weight format;
    - whether a server computes the hidden states; with `config.shared_features`, also its address and model name."""
    settings, remote = config.target, config.remote
    path = light_folder(settings.model).resolve()
    adapter, base = (adapter_digest(path) if is_adapter(path) else ""), base_of(path)
    stats = [(file.name, file.stat()) for file in ([base] if base.is_file() else sorted(base.glob("*.safetensors")))]
    weights = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    is_remote = remote.features_from is not None
    # A run may go on with its server at another address; other runs cannot know that it is the same model.
    server = (remote.features_from, remote.served_name) if config.shared_features else is_remote
    formats = settings.weight_format, form_of(target).weight_format
    return mark_of_text(repr((str(base), adapter, weights, settings.weights, formats, server)))


def stored_features(
    config: TrainConfig,
    target: Target,
    mark: int,
    documents: Sequence[Document],
    taps: tuple[int, ...],
    form: Form = PLAIN,
) -> CachedFeatures:
    """Returns a feature source that reads the hidden states of `documents` at the target layers `taps` from files. It
    does not create the files: `cache_features` does. They are in the folder `features-<fingerprint>` of
    `config.shared_features` or, if that is None, of `config.out`. `mark`: hash of the target (`mark_of_target`), the
    same in all processes."""
    name = fingerprint(mark, target.dtype, taps, config.loop.loss.needs_target_probs, form)
    return CachedFeatures((config.shared_features or config.out) / f"features-{name}", documents, form)


def cache_on_ray(
    config: TrainConfig, target: Target, cached: CachedFeatures, taps: tuple[int, ...], progress: Progress
) -> None:
    """Computes hidden states at the target layers `taps` on a Ray cluster, for the documents of `cached` that have no
    file, and writes their files. `target` only gives sizes and dtype. Raises CacheError if the disk is too small or
    fails, ConfigError without Ray, DownloadError if the cluster cannot be reached or fails, and a worker's
    PacelineError."""
    needs_final = config.loop.loss.needs_target_probs
    width = (len(taps) + needs_final) * target.hidden_size * target.dtype.itemsize
    documents, length = cached.documents, sum(map(len, cached.documents))
    progress.say(f"features of {len(documents)} documents: {length * width / 1e9:.2f} GB in {cached.folder}")
    numbers = cached.missing()
    cached.check_room(numbers, width)
    missing = [(number, documents[number]) for number in numbers]
    dtype = str(target.dtype).removeprefix("torch.")
    job = Reading(replace(config.target, dtype=dtype, max_batch=1, max_len=config.max_len), taps, needs_final)
    at_most = max(1, POSITIONS_PER_BATCH * len(documents) // max(1, length))
    with progress.bar("features", len(documents)) as advance:
        for _ in range(len(documents) - len(missing)):
            advance("features")
        if missing:
            with connected(config.remote) as ray:
                for number, content in distributed(ray, config.remote, job, missing, at_most):
                    remedy = "free space and run again, what is written stays"
                    with whole_file(cached.path(number), remedy) as scratch:
                        scratch.write_bytes(content)
                    advance("features")

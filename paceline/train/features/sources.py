"""Selects the feature source of a run: computed when needed, stored on disk, or prefetched.

| --features | memory | disk | the target runs |
|---|---|---|---|
| online | one document's | none | once an epoch, while the trainer waits |
| cached | one document's | all of them | once |
| streamed | `--stream-buffer` | those of the held-out documents | once an epoch, while the trainer works |

`auto` selects cached if documents are seen again and the disk has room, else online, or streamed from a remote target.
`--feature-dtype int8` stores them in 8 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import CacheError
from paceline.model.adapter import identity_of
from paceline.model.target import Target
from paceline.report.tables import Progress
from paceline.runs.ranks import Ranks
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import (
    PLAIN,
    CachedFeatures,
    Features,
    FeatureSource,
    Form,
    MeasuredSource,
    OnlineFeatures,
    cache_features,
    fingerprint,
    stored_scale,
)
from paceline.train.features.on_ray import cache_on_ray, mark_of_target, stored_features
from paceline.train.features.quantised import Int8
from paceline.train.features.remote import RemoteFeatures, vllm_command
from paceline.train.features.stream import StreamedFeatures, packs_ahead, upcoming
from paceline.train.plan.lengths import longest_of
from paceline.train.processes.parallel import Replicated

if TYPE_CHECKING:
    from paceline.train.learn.loop import Trainer


@dataclass(slots=True)
class Sources:
    """Creates the feature sources of a run: objects that give the target's hidden states of documents to the training
    loop. Each process has its own."""

    config: TrainConfig
    target: Target
    taps: tuple[int, ...]
    documents: Sequence[Document]
    """Training documents."""
    ranks: Ranks
    progress: Progress
    wait: Callable[[], None]
    """Waits for all processes."""
    stream: StreamedFeatures | None = None
    _scale: tuple[Tensor, Tensor] | None = None
    _mark: int | None = None
    """The first process's `mark_of_target`."""
    _is_cached: bool = False
    """True if the training documents' features are read from disk."""
    _sources: dict[int, MeasuredSource] = field(default_factory=dict)

    def of(self, documents: Sequence[Document]) -> FeatureSource:
        """Returns a feature source for `documents`. With a Ray cluster, hidden states are always computed before
        training and stored on disk. Without one, `config.features` selects one of these methods, or "auto", which
        chooses one:
        - online: computed on request;
        - cached: computed before training and stored on disk;
        - streamed: for training documents, threads compute them in advance; for other documents, as cached."""
        is_learned = documents is self.documents
        if self.config.remote.ray:
            return self._of_ray(documents, is_learned)
        source, form, kind = self._computed(documents), self._form(), self._kind(documents)
        self._is_cached = self._is_cached or (kind == "cached" and is_learned)
        if kind == "online":
            return source
        if kind == "streamed" and is_learned:
            self.stream = self._streamed(source, form)
            return self.stream
        return self._cached(documents, source, form)

    def scale(self, features: FeatureSource) -> tuple[Tensor, Tensor]:
        """Returns (scale [F], mean [F]) of the F features, as `measure_scale` defines them. They are measured once per
        run, then read from the run's folder. `features`: source of the training documents."""
        if self._scale is None:
            file = self.config.out / "feature-scale.safetensors"
            mark = fingerprint(identity_of(self.config.target.model), self.target.dtype, self.taps, needs_final=False)
            self._scale = stored_scale(file, features, self.documents, self.ranks.is_first, mark)
            self.wait()
        return self._scale

    @contextlib.contextmanager
    def following(self, trainer: Trainer) -> Iterator[None]:
        """Context manager: inside it, threads compute in advance what the next training steps of `trainer` need. If
        features are streamed, these are the hidden states of the next documents. If features are stored on disk, or
        streamed to a GPU, the next packs (batches of training blocks) are also assembled in advance."""
        with contextlib.ExitStack() as stack:
            if self.stream is not None:
                stack.callback(self.stream.close)
                self.stream.begin(upcoming(trainer))
            if self._is_cached or (self.stream is not None and trainer.device.type == "cuda"):
                stack.enter_context(packs_ahead(trainer))
            yield

    def _of_ray(self, documents: Sequence[Document], is_learned: bool) -> FeatureSource:
        """Returns features computed on Ray by the first process, and read from files by all."""
        self._is_cached, cached = self._is_cached or is_learned, self._stored(documents, PLAIN)
        if self.ranks.is_first:
            cache_on_ray(self.config, self.target, cached, self.taps, self.progress)
        self.wait()
        return cached

    def _stored(self, documents: Sequence[Document], form: Form) -> CachedFeatures:
        """Returns the source that reads stored features. The first process identifies the target for all."""
        if self._mark is None:
            mark = mark_of_target(self.config, self.target) if self.ranks.is_first else 0
            self._mark = Replicated(self.ranks, self.target.device).first(mark)
        return stored_features(self.config, self.target, self._mark, documents, self.taps, form)

    def _computed(self, documents: Sequence[Document]) -> MeasuredSource:
        remote, needs_final = self.config.remote, self.config.loop.loss.needs_target_probs
        # By identity: the source keeps `documents`, so that no other list gets this id.
        if id(documents) not in self._sources:
            inputs = (self.target, documents, self.taps, needs_final)
            if remote.features_from:
                self._say_command()
                self._sources[id(documents)] = features = RemoteFeatures(remote, *inputs)
                self.progress.say(features.introduction)
            else:
                self._sources[id(documents)] = OnlineFeatures(*inputs)
        return self._sources[id(documents)]

    def _say_command(self) -> None:
        """Reports how vLLM must be started, once, before the first connection, which waits for a server."""
        folder = self.config.remote.features_folder
        if folder is not None and not self._sources:
            command = vllm_command(self.config.target.model, self.taps, longest_of(self.config), folder)
            self.progress.say(f"vLLM at {self.config.remote.features_from} is started like this:\n  {command}")

    def _form(self) -> Form:
        if self.config.feature_dtype == "model":
            return PLAIN
        return Int8(self.scale(self._computed(self.documents))[0], len(self.taps), self.target.dtype)

    def _kind(self, documents: Sequence[Document]) -> str:
        if self.config.features != "auto":
            return self.config.features
        if self._should_cache(documents):
            return "cached"
        return "streamed" if self.config.remote.features_from else "online"

    def _should_cache(self, documents: Sequence[Document]) -> bool:
        """Returns True if documents are seen more than once, or other runs may read their features, and the disk has
        room. The result is the same in all processes."""
        config = self.config
        if config.loop.epochs <= 1.0 and config.loop.max_steps is None and config.shared_features is None:
            return False
        cached, lacks_room = self._stored(documents, self._form()), False
        try:
            cached.check_room(cached.missing(), self._computed(documents).bytes_per_position)
        except CacheError:
            lacks_room = True
        if Replicated(self.ranks, self.target.device).most(float(lacks_room)) > 0:
            self.progress.say("note: the disk has no room for features: the target computes them anew every epoch")
            return False
        return True

    def _streamed(self, source: MeasuredSource, form: Form) -> StreamedFeatures:
        # Only thread-safe sources have `num_at_once`.
        width, num_threads = form.bytes_of(source.bytes_per_position), getattr(source, "num_at_once", 1)

        def size_of(number: int) -> int:
            return width * len(source.documents[number])

        return StreamedFeatures(source, size_of, self.config.stream_buffer, form=form, num_threads=num_threads)

    @contextlib.contextmanager
    def _computing(self, source: MeasuredSource, numbers: list[int]) -> Iterator[Callable[[int], Features]]:
        """Yields the function that computes a document. A remote target computes the documents `numbers`
        concurrently."""
        if not isinstance(source, RemoteFeatures):
            yield source.of
            return
        with contextlib.closing(self._streamed(source, PLAIN)) as stream:
            stream.begin(iter(numbers))
            yield stream.of

    def _cached(self, documents: Sequence[Document], source: MeasuredSource, form: Form) -> FeatureSource:
        cached = self._stored(documents, form)
        num_bytes = sum(map(len, documents)) * form.bytes_of(source.bytes_per_position)
        self.progress.say(f"features of {len(documents)} documents: {num_bytes / 1e9:.2f} GB in {cached.folder}")
        with self.progress.bar("features", len(self.ranks.share_of(len(documents)))) as advance:
            cache_features(cached, source, self.ranks, partial(advance, "features"), partial(self._computing, source))
        self.wait()
        return cached

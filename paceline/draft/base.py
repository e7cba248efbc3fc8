"""The drafter interface: draft the next tokens, observe verified ones, forget finished sequences.

One drafter serves a whole batch; its per-sequence state is keyed by the sequence's cache row. The engine calls `bind`
once; then for each sequence `start`, `observe` once per prefill chunk, `propose` and `observe` every round, and finally
`drop`. A drafter owns its cache: after `propose` the cache may hold entries of drafts, which the next `propose` must
ignore unless they were accepted. Some drafters read hidden states of the target, called taps or features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from paceline import rng
from paceline.bounds import MAX_DRAFTED
from paceline.errors import ConfigError, shown
from paceline.model.sampling.logits import sample, target_probs
from paceline.model.target import Target
from paceline.types import Batch, DraftBlock, Sequence


class Stamp(NamedTuple):
    """State of a drafter's files at one time (names, sizes and modification times), to detect later changes."""

    path: Path | None = None
    """Absolute path of the folder or file, downloaded if it is on a hub; None for a drafter without files."""
    files: tuple[tuple[str, int, int], ...] = ()
    """(name, size in bytes, modification time in ns) of each file."""

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Returns the state of the files at `path`, a folder or one file. Raises OSError if `path` is missing."""
        stats = [(file.name, file.stat()) for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
        return cls(path, tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats))

    def is_current(self) -> bool:
        """True if no file was changed, added or deleted since the stamp was made, judged by name, size and modification
        time. An empty stamp, of a drafter without files, is always current."""
        try:
            return self.path is None or self == Stamp.of(self.path)
        except OSError:
            return False


def checked_num_drafted(num_drafted: int) -> int:
    """Returns this number of drafts per round. Raises ConfigError unless it is between 0 and 1024 (MAX_DRAFTED)."""
    if not 0 <= num_drafted <= MAX_DRAFTED:
        raise ConfigError(f"num_drafted must be between 0 and {MAX_DRAFTED}, not {shown(num_drafted)}")
    return num_drafted


@dataclass(slots=True)
class Observed:
    """Newly verified positions [start, start + count) of one sequence, and the target's hidden states at these
    positions."""

    sequence: Sequence
    start: int
    count: int
    taps_TF: Tensor | None
    """Hidden states [T, F] of the target's `tap_layers`, concatenated in that order, for all tokens of the pass that
    computed these positions. Valid during the call, and longer if the target does not overwrite its buffers."""
    begin: int = 0
    """Row of `taps_TF` that belongs to position `start`."""

    @property
    def taps_NF(self) -> Tensor | None:
        """The target's hidden states [N, F] at the N = `count` positions, F = tapped layers * hidden size; None if no
        layer is tapped."""
        return None if self.taps_TF is None else self.taps_TF[self.begin : self.begin + self.count]


class Drafter(ABC):
    """Base class of drafters, which propose tokens that the target then verifies."""

    name: str = ""
    source: str = ""
    """Name that the drafter was created from: a key of `registry.DRAFTERS`, a folder or a hub id."""
    stamp: Stamp = Stamp()
    """State of the files that the drafter was created from, at that time."""
    num_drafted: int = 0
    """Maximum tokens drafted per round."""
    is_instant: bool = False
    """True if drafting takes almost no time, as in prompt lookup, and `chance` can predict acceptance before
    drafting."""
    is_stepwise: bool = False
    """True if every drafted token takes a forward pass of its own."""
    has_own_threads: bool = True
    """True if drafting does not benefit from PyTorch's thread pool."""
    tap_layers: tuple[int, ...] = ()
    """Target layers whose hidden states `observe` receives; layer l is Transformers' hidden_states[l + 1]."""

    is_released: bool = False
    """True only for the placeholder of a drafter whose weights are not in memory (`engine/residency.py`); it drafts
    nothing."""
    held: Mapping[Hashable, tuple[int, int]] = MappingProxyType({})
    """Matrices that this drafter may share with others of its pool: key of a matrix -> (its bytes, number of places in
    this drafter that use it). See `model.sharing.Held`."""

    def bind(self, target: Target) -> None:
        """Check that this drafter fits the target, and allocate caches with `target.cache.num_rows` rows.

        Raises DrafterMismatchError if hidden size, vocabulary or layer ids differ; its message has both values.
        """

    @property
    def is_failed(self) -> bool:
        """True if loading the drafter failed and the next attempt is not due yet. Routers do not choose such a
        drafter."""
        return False

    def cache_bytes(self, target: Target) -> int:
        """Returns the bytes that the drafter's own KV cache occupies once it is bound to `target`; 0 without a
        cache."""
        return 0

    def cache_shape(self, target: Target) -> Hashable:
        """Returns a value that identifies the shape of this drafter's KV cache: if it is equal for two drafters of a
        pool, they share one cache."""
        return id(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own weights, without those of the target that it uses. After `bind`, this includes
        weights that were copied and packed for the target."""
        return 0

    def keep_weights(self) -> None:
        """Load memory-mapped weights into memory. The files may be changed or deleted afterwards."""

    def record(self) -> None:
        """Capture the drafter's passes as CUDA graphs, if the device uses them; takes seconds. Call after `bind`."""

    def start(self, seq: Sequence) -> None:
        """Reset the state of row `seq.row` for a new sequence."""

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """Reuse the cached state of row `source` for a new sequence that begins with the same `length` tokens. Call
        after `start(seq)`.

        Returns the number of leading positions of `seq` whose state was taken over, at most `length`; later positions
        must be passed to `observe`. `source`: a row whose sequence is running or has ended, but that was not reused
        since. It may be `seq.row` itself.
        """
        return 0 if self.tap_layers else length

    def can_draft(self, seq: Sequence) -> bool:
        """True if the drafter can draft for this sequence now; False as long as `observe` has not received all earlier
        positions that it needs."""
        return True

    def chance(self, seq: Sequence) -> float:
        """Estimates, before drafting, how likely each draft of the next round is accepted if all drafts before it are:
        one probability that holds for every draft. 0.0 if nothing would be drafted. Only for drafters whose drafting
        takes almost no time (`is_instant`), such as prompt lookup."""
        return 0.0

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Estimates, before drafting, the acceptance of up to `most` drafts: for each, the probability that it is
        accepted if all drafts before it are. () if nothing would be drafted. Only for drafters whose drafting takes
        almost no time (`is_instant`), such as prompt lookup."""
        chance = self.chance(seq)
        return (chance,) * most if chance else ()

    @abstractmethod
    def propose(self, batch: Batch) -> DraftBlock:
        """Drafts the tokens that may follow each sequence's last token; returns the drafts of all rows. A row gets at
        most `num_drafted` drafts, and at most its entry of `batch.draft_limits_B(num_drafted)`.

        Drafts for greedy and seeded requests are deterministic, so that seeded requests get the output of plain
        decoding.
        """

    def observe(self, observed: list[Observed]) -> None:
        """Update the drafter's state with newly verified positions. Called after each prefill chunk with its positions,
        and after each round with those of all sequences of this drafter, in batch order."""

    def drop(self, seq: Sequence) -> None:
        """Release the state of a sequence that has finished; its row may be reallocated."""


def sample_draft(seq: Sequence, logits_V: Tensor, place: int) -> tuple[int, Tensor]:
    """Samples a draft from logits [V] with the request's sampling parameters. Returns (token id, distribution [V] that
    it was sampled from). `place`: index of the draft in its round, from 0; it selects the random number."""
    probs_V = target_probs(logits_V[None], seq.params)[0]
    return sample(probs_V, rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, place)), probs_V


class NoDrafter(Drafter):
    """Plain decoding: a drafter that drafts nothing."""

    name = "none"

    def propose(self, batch: Batch) -> DraftBlock:
        return DraftBlock.certain([[] for _ in batch.sequences])

"""Base class of drafters that read the target's hidden states. These features wait for each row until the row drafts.

A row that never drafts never computes keys and values of its features. When it drafts, all its pending features go in
one pass; a long queue is shortened early, so that it does not delay a round of other rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.model.config.decoder import DecoderConfig
from paceline.model.kv_cache import KVCache
from paceline.model.native.decoder import padded
from paceline.model.sampling.device_race import Draws
from paceline.model.sharing import copied, once
from paceline.model.target import Target
from paceline.types import Sequence

MOST_PENDING = 512
"""Maximum positions of a row with pending features (without keys and values yet); they take a few megabytes."""
PENDING_PIECE = 32
"""Minimum positions that are computed together when a row exceeds MOST_PENDING; other rows wait for this pass."""
MOST_UNSORTED = 16
"""Number of target passes whose features are collected before they are sorted by row."""


class Verified(NamedTuple):
    """Positions that a decode round on the device verified: J = K + 1 in each of the cache rows 0..B-1."""

    length_B: Tensor
    """Number of cached tokens of each row before the round."""
    counts_B: Tensor
    """Number of verified positions of each row; 0 for an idle row."""
    tokens_BJ: Tensor
    """The last committed token of each row, then its K drafts."""
    accepted_B: Tensor
    """Number of accepted drafts."""
    bonus_B: Tensor
    """Token after the accepted drafts; negative if the device could not compute it."""
    taps_TF: Tensor
    """The target's hidden states at all T = B * J positions, F = tapped layers * hidden size."""


class StaticDrafting(Protocol):
    """A drafter's part of a decode round that is captured as one CUDA graph (`engine/device_round.py`): tensor
    operations of fixed shape on the cache rows 0..B-1, without copies between host and device."""

    def draft(
        self, anchor_B: Tensor, length_B: Tensor, is_live_B: Tensor, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        """Returns K drafts of each row, -1 where logits are not finite, and their log-probabilities in float64: [B, K]
        each. `anchor_B`: last committed tokens. `length_B`: numbers of cached tokens. `is_live_B`: False for idle rows.
        `draws`: the requests' sampling parameters; None if all rows are greedy."""
        ...

    def write_behind(self, verified: Verified) -> None:
        """Write the drafter's state of the verified positions behind the rows' contexts. Entries after the accepted
        drafts are never read."""
        ...


class TappedDrafter(Drafter):
    """Base class of drafters that read the target's hidden states (features). The features of a row are stored, and
    keys and values are computed from them only when necessary: when the row drafts, when another row adopts its state,
    or when more than 512 positions (MOST_PENDING) are stored. A subclass's `bind` calls `_bind_path`, which makes the
    decode path."""

    network: Any
    """The network as an nn.Module, with the weights as they were read."""
    looks_ahead = 0
    """Number of following tokens that a position's keys and values depend on. The same number of positions at the end
    of a shared prefix is recomputed."""
    _kept: Mapping[str, Tensor] | None = None
    """The weights as they were read; drafters share equal ones as long as these objects exist."""
    _overwrites_taps: bool
    _path: Any
    """The decode path for the bound target."""
    _bound: tuple[Target, KVCache] | None = None

    @property
    def recorded_rounds(self) -> dict[Any, Any] | None:
        """Store of the decode rounds captured as CUDA graphs that contain this drafter as it is bound now.
        `engine/device_round.py` fills and reads it. None if the drafter cannot be part of such a round."""
        return None

    def static_drafting(self, num_rows: int, count: int) -> StaticDrafting:
        """Creates the drafter's part of a round captured as one CUDA graph, for `num_rows` cache rows of `count` = K +
        1 verified positions. Call it only if `recorded_rounds` is not None."""
        raise NotImplementedError(f"{type(self).__name__} is not part of rounds on the device")

    def _bind_path(self, target: Target, make_path: Callable[[], Any]) -> None:
        """Make the decode path for a target. If the drafter is bound to its current cache, only reset all rows."""
        if self._bound is not None and self._bound[0] is target and self._bound[1] is target.cache:
            self._cache.rollback(list(range(target.cache.num_rows)), [0] * target.cache.num_rows)
        else:
            if not self._kept:
                self._keep({name: once(tensor) for name, tensor in self._own_tensors().items()})
            self._path, self._rounds = make_path(), dict[Any, Any]()
        self._bound, self._overwrites_taps = (target, target.cache), target.overwrites_taps
        self._forget_rows()

    @property
    def weight_bytes(self) -> int:
        own = sum(tensor.nbytes for tensor in self._own_tensors().values())
        return own + (self._path.weight_bytes if self._bound else 0)

    def cache_bytes(self, target: Target) -> int:
        return 2 * math.prod(self.cache_shape(target)) * target.dtype.itemsize

    @abstractmethod
    def cache_shape(self, target: Target) -> tuple[int, ...]: ...

    def _own_tensors(self) -> Mapping[str, Tensor]:
        return self.network.state_dict()

    @property
    def _cache(self) -> KVCache:
        """The drafter's KV cache, indexed by the target's rows."""
        return self._path.cache

    @abstractmethod
    def _take_in(self, rows: list[int], starts: list[int], counts: list[int], observed: list[Observed]) -> None:
        """Append keys and values of `counts` positions to each row; `observed` holds their features, row after row."""

    def _forget_rows(self) -> None:
        self._pending = PendingFeatures()
        self._unsorted: list[list[Observed]] = []
        """Positions verified by the latest passes, not sorted by row yet."""
        self._fresh: set[int] = set()
        """Rows whose sequence has just started: their cache belongs to an earlier sequence, which the new one may
        adopt."""

    def keep_weights(self) -> None:
        self._keep({name: copied(tensor) for name, tensor in self._own_tensors().items()})

    def _keep(self, tensors: dict[str, Tensor]) -> None:
        """Use these equal tensors instead of the drafter's own."""
        own = self._own_tensors()
        if any(tensor.data_ptr() != own[name].data_ptr() for name, tensor in tensors.items()):
            self._use_tensors(tensors)
        self._kept = tensors

    def replace_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the network's weights, for example by newly trained ones. They take effect when the drafter is bound
        to a new cache of the target; until then it drafts with the old weights."""
        self._use_tensors(tensors)
        self._kept, self.held = None, {}

    def _use_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.network.load_state_dict(tensors, assign=True)

    def start(self, seq: Sequence) -> None:
        self._sort()
        self._fresh.add(seq.row)

    def observe(self, observed: list[Observed]) -> None:
        """Store the features (target's hidden states) of newly verified positions. Keys and values are computed from
        them later, at the latest when the row drafts."""
        if self._overwrites_taps:
            observed = [
                replace(one, taps_TF=one.taps_NF.clone(), begin=0) for one in observed if one.taps_NF is not None
            ]
        self._unsorted.append(observed)
        if len(self._unsorted) >= MOST_UNSORTED:
            self._sort()

    def _sort(self) -> None:
        """Sort the latest observations by row; several rounds at once take a third of the time."""
        latest, self._unsorted = self._unsorted, []
        for one in chain.from_iterable(latest):
            assert one.taps_TF is not None, "the target was not asked for taps"
            row = one.sequence.row
            if row in self._fresh:
                self._reset(row, 0)
            assert one.start == self._num_observed(row), "positions must be observed once, in order"
            self._pending.add(one)
            if (excess := self._pending.count(row) - MOST_PENDING) > 0:
                self._inject([row], max(excess, PENDING_PIECE))

    def drop(self, seq: Sequence) -> None:
        self._sort()

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """Take over keys and values from row `source`, whose first `length` tokens equal those of `seq`. Returns the
        number of leading positions taken over. This may be less than `length`, for example because an EAGLE-3 cache
        entry depends on the token after it."""
        self._sort()
        self._inject([source])
        length = max(min(length - self.looks_ahead, self._cache.lengths[source]), 0)
        if source == seq.row:
            self._reset(source, length)
        else:
            self._reset(seq.row, 0)
            self._cache.adopt(source, seq.row, length)
        return length

    def _reset(self, row: int, length: int) -> None:
        self._cache.rollback([row], [length])
        self._pending.drop(row)
        self._fresh.discard(row)

    def _inject(self, rows: list[int], most: float = math.inf) -> None:
        """Compute keys and values of pending features: each row's oldest `most`, or all."""
        waiting = [row for row in rows if self._pending.count(row)]
        if not waiting:
            return
        taken = [self._pending.take(row, most) for row in waiting]
        starts = [self._cache.lengths[row] for row in waiting]
        counts = [sum(one.count for one in observed) for observed in taken]
        self._take_in(waiting, starts, counts, [one for observed in taken for one in observed])

    def take_in_pending(self, rows: list[int]) -> None:
        """Compute keys and values from all features that are stored for these rows."""
        self._sort()
        self._inject(rows)

    def advance(self, rows: list[int], lengths: list[int]) -> None:
        """Set the cache lengths of `rows` to `lengths`, after a round captured as a CUDA graph has itself written the
        new keys and values. No features may be stored for these rows."""
        self._cache.append(rows, [length - self._cache.lengths[row] for row, length in zip(rows, lengths, strict=True)])

    def can_draft(self, seq: Sequence) -> bool:
        """True if all positions before the sequence's last token were observed."""
        self._sort()
        return seq.row not in self._fresh and self._num_observed(seq.row) == seq.cached_len

    def _num_observed(self, row: int) -> int:
        return self._cache.lengths[row] + self._pending.count(row)


def cache_shape_of(config: DecoderConfig, target: Target, slack: int, *, is_native: bool) -> tuple[int, ...]:
    """Returns the shape [layers, rows, kv_heads, positions, head_dim] of the keys in a drafter's KV cache; values have
    the same shape. `slack`: positions of a row beyond the longest text, for drafts. `is_native`: True for the layout of
    native (C++) calls."""
    max_len, head_dim = target.cache.max_len, config.head_dim
    if is_native:
        head_dim, slack = padded(config, max_len, slack)
    return config.num_layers, target.cache.num_rows, config.num_kv_heads, max_len + slack, head_dim


class PendingFeatures:
    """Stored features (target's hidden states) of positions whose keys and values were not computed yet. The positions
    of each row are contiguous, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[Observed]] = {}

    def count(self, row: int) -> int:
        waiting = self._rows.get(row)
        return waiting[-1].start + waiting[-1].count - waiting[0].start if waiting else 0

    def add(self, one: Observed) -> None:
        """Store the features of positions of one row, which must directly follow those already stored for it."""
        self._rows.setdefault(one.sequence.row, deque()).append(one)

    def take(self, row: int, most: float = math.inf) -> list[Observed]:
        """Remove and return the stored features of a row's oldest positions, at most `most` of them; default: all."""
        waiting, taken = self._rows.get(row), list[Observed]()
        while waiting and most:
            one = waiting.popleft()
            if one.count > most:
                left = int(most)
                waiting.appendleft(replace(one, start=one.start + left, count=one.count - left, begin=one.begin + left))
                one = replace(one, count=left)
            taken.append(one)
            most -= one.count
        return taken

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)


def features_of(observed: list[Observed]) -> Tensor:
    """Returns the features (target's hidden states) of all T observed positions, in order: a tensor of at least T rows,
    F = tapped layers * hidden size columns. Rows after the first T must be ignored: to avoid a copy, the result may be
    the features of a whole target pass."""
    if len(observed) == 1 and observed[0].begin == 0 and observed[0].taps_TF is not None:
        return observed[0].taps_TF
    return torch.cat([one.taps_NF for one in observed if one.taps_NF is not None])
